"""Stored names to canonical names and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phi4mm_export.spec.names import (
    NATIVE_ROWS,
    WRAPPER_PREFIXES,
    WRAPPER_SEGMENTS,
    LoraName,
    NameRow,
    canonical_name,
    is_recomputed_buffer,
    native_name,
    original_stored_name,
    split_lora,
)

IMAGE, AUDIO = "model.embed_tokens_extend.image_embed.", "model.embed_tokens_extend.audio_embed."
QKV = "model.layers.31.self_attn.qkv_proj"

BOTH_SPELLINGS = [
    (IMAGE + "global_img_feature_extensor", IMAGE + "glb_GN"),
    (IMAGE + "sub_img_feature_extensor", IMAGE + "sub_GN"),
    (IMAGE + "img_projection_up.weight", IMAGE + "img_projection.0.weight"),
    (IMAGE + "img_projection_down.bias", IMAGE + "img_projection.2.bias"),
    (AUDIO + "up_proj_for_speech.weight", AUDIO + "audio_projection.speech.0.weight"),
    (AUDIO + "down_proj_for_speech.weight", AUDIO + "audio_projection.speech.2.weight"),
    (AUDIO + "up_proj_for_vision_speech.bias", AUDIO + "audio_projection.vision.0.bias"),
    (AUDIO + "down_proj_for_vision_speech.bias", AUDIO + "audio_projection.vision.2.bias"),
    (
        AUDIO + "encoder.encoders.23.feed_forward_in.gate_up_proj.weight",
        AUDIO + "encoder.encoders.23.feed_forward_in.net.0.linear.weight",
    ),
    (
        AUDIO + "encoder.encoders.7.feed_forward_out.down_proj.bias",
        AUDIO + "encoder.encoders.7.feed_forward_out.net.2.bias",
    ),
    (AUDIO + "encoder.encoders.0.self_attn.q_proj.weight", AUDIO + "encoder.encoders.0.self_attn.linear_q.weight"),
    (AUDIO + "encoder.encoders.0.self_attn.o_proj.weight", AUDIO + "encoder.encoders.0.self_attn.linear_out.weight"),
    ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.weight"),
    (
        IMAGE + "img_processor.encoder.layers.0.self_attn.q_proj.weight",
        IMAGE + "img_processor.encoder.layers.0.self_attn.q_proj.weight",
    ),
]


@pytest.mark.parametrize(("native", "original"), BOTH_SPELLINGS)
def test_a_native_name_becomes_the_original_one_and_back(native: str, original: str) -> None:
    assert canonical_name(native) == original
    assert native_name(original) == native


@pytest.mark.parametrize(
    "wrapped",
    [
        "module.model.norm.weight",
        "_orig_mod.model.norm.weight",
        "base_model.model.model.norm.weight",
        "module._orig_mod.base_model.model.model.norm.weight",
        "_orig_mod.module.model.norm.weight",
        "model._orig_mod.norm.weight",
        "model.norm._fsdp_wrapped_module.weight",
    ],
)
def test_training_wrappers_are_taken_off(wrapped: str) -> None:
    assert canonical_name(wrapped) == "model.norm.weight"


def test_peft_and_checkpointing_segments_are_taken_out_wherever_they_stand() -> None:
    assert canonical_name(f"{QKV}.base_layer.weight") == f"{QKV}.weight"
    assert canonical_name(f"{QKV}.base_layer.base_layer.weight") == f"{QKV}.weight"
    wrapped = AUDIO + "encoder.encoders.3._checkpoint_wrapped_module.self_attn.q_proj.weight"
    assert canonical_name(wrapped) == AUDIO + "encoder.encoders.3.self_attn.linear_q.weight"


def test_a_row_ends_at_a_whole_path_segment() -> None:
    longer = IMAGE + "img_projection_upper.weight"
    assert canonical_name(longer) == longer


def test_unknown_names_stay_as_they_are() -> None:
    assert canonical_name("visual.blocks.0.weight") == "visual.blocks.0.weight"


def test_the_original_layout_stores_adapted_projections_under_base_layer() -> None:
    assert original_stored_name(f"{QKV}.weight") == f"{QKV}.base_layer.weight"
    assert original_stored_name("model.layers.0.input_layernorm.weight") == "model.layers.0.input_layernorm.weight"
    tower = IMAGE + "img_processor.encoder.layers.0.self_attn.out_proj.weight"
    assert original_stored_name(tower) == tower


def test_an_adapter_name_is_taken_apart_with_and_without_its_adapter() -> None:
    assert split_lora(f"{QKV}.lora_A.vision.weight") == LoraName(QKV, "A", "vision")
    assert split_lora(f"{QKV}.lora_B.weight") == LoraName(QKV, "B", None)
    assert split_lora(f"{QKV}.weight") is None
    assert split_lora(f"{QKV}.lora_magnitude_vector") is None


def test_an_adapter_name_loses_its_role_in_the_native_layout() -> None:
    assert native_name(f"{QKV}.lora_B.speech.weight") == f"{QKV}.lora_B.weight"


def test_buffers_that_follow_from_the_config_are_known() -> None:
    assert is_recomputed_buffer("model.layers.4.self_attn.rotary_emb.inv_freq")
    assert is_recomputed_buffer(IMAGE + "img_processor.embeddings.position_ids")
    assert not is_recomputed_buffer(IMAGE + "img_processor.embeddings.position_embedding.weight")


ends = st.sampled_from(["", ".weight", ".bias"])


@given(st.sampled_from(NATIVE_ROWS), st.integers(0, 10**6), ends)
def test_either_spelling_of_any_layer_leads_to_the_other_and_back(row: NameRow, layer: int, end: str) -> None:
    native, original = (name.replace("{i}", str(layer)) + end for name in (row.native, row.original))
    assert canonical_name(native) == canonical_name(original) == original
    assert native_name(original) == native


@given(st.lists(st.tuples(st.sampled_from(NATIVE_ROWS), st.integers(0, 99), ends), max_size=20, unique=True))
def test_different_tensors_have_different_names_in_both_layouts(tensors: list[tuple[NameRow, int, str]]) -> None:
    names = {row.original.replace("{i}", str(layer)) + end for row, layer, end in tensors}
    assert len({native_name(name) for name in names}) == len(names)
    assert {canonical_name(native_name(name)) for name in names} == names


segments = st.text("abz019_", min_size=1, max_size=5).filter(lambda text: text not in ("module", "_orig_mod"))


@given(st.data(), st.lists(segments, min_size=1, max_size=6), st.lists(st.sampled_from(WRAPPER_PREFIXES), max_size=3))
def test_wrappers_anywhere_around_any_name_are_taken_off(
    data: st.DataObject, parts: list[str], before: list[str]
) -> None:
    wrapped = list(parts)
    for wrapper in data.draw(st.lists(st.sampled_from(sorted(WRAPPER_SEGMENTS)), max_size=3)):
        wrapped.insert(data.draw(st.integers(0, len(wrapped))), wrapper)
    assert canonical_name("".join(before) + ".".join(wrapped)) == ".".join(parts)
