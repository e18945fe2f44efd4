"""config.json of both layouts: what is read, what the tensors decide, what is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from support import checkpoints as ck

from phi4mm_export.errors import CheckpointError
from phi4mm_export.spec.config_json import parse_config
from phi4mm_export.spec.model import Layout, ModelConfig, Role
from phi4mm_export.spec.names import canonical_name

AUDIO = "audio_processor.config."


def parse(
    draft: ck.Draft, *, generation: dict[str, Any] | None = None, preprocessor: dict[str, Any] | None = None
) -> ModelConfig:
    shapes = {canonical_name(name): tensor.shape for name, tensor in draft.tensors.items() if ".lora_" not in name}
    return parse_config(draft.config, shapes, preprocessor=preprocessor, generation=generation)


def changed(draft: ck.Draft, path: str, value: object) -> ck.Draft:
    """The draft with the dotted key set; KeyError-free for new sections."""
    config = copy.deepcopy(draft.config)
    *parents, key = path.split(".")
    section = config
    for parent in parents:
        section = section.setdefault(parent, {})
    section[key] = value
    return ck.Draft(draft.tensors, config)


def without(draft: ck.Draft, *paths: str) -> ck.Draft:
    config = copy.deepcopy(draft.config)
    for path in paths:
        *parents, key = path.split(".")
        section = config
        for parent in parents:
            section = section[parent]
        del section[key]
    return ck.Draft(draft.tensors, config)


@pytest.mark.parametrize("make", [ck.original, ck.native])
def test_every_dimension_is_read_from_either_layout(make: Callable[[], ck.Draft]) -> None:
    config = parse(make())
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (ck.WIDTH, ck.MLP, ck.LAYERS)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (1, 1, 16)
    assert config.tied_head
    assert config.rope.rotary_dim == 16
    assert config.rope.long_factor == (2.0,) * 8
    assert config.rope.original_max_positions == 4096
    vision, audio = config.vision, config.audio
    assert (vision.hidden_size, vision.intermediate_size, vision.num_layers, vision.num_heads) == (32, 20, 2, 16)
    assert (audio.hidden_size, audio.num_heads, audio.linear_units, audio.num_blocks) == (16, 2, 12, 1)
    assert (audio.kernel_size, audio.conv_channels, audio.bias_max_distance) == (3, 8, 5)


def test_the_layout_follows_the_model_type() -> None:
    assert parse(ck.original()).layout is Layout.ORIGINAL
    assert parse(ck.native()).layout is Layout.NATIVE


def test_dimensions_without_a_key_are_read_off_the_tensors() -> None:
    draft = without(ck.original(), "audio_processor", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = parse(draft)
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (ck.WIDTH, ck.MLP, ck.LAYERS)
    assert config.audio.bias_max_distance == ck.DISTANCE


def test_a_native_config_without_bias_distance_takes_the_tensors_value_not_the_class_default() -> None:
    assert parse(without(ck.native(), "audio_config.bias_max_distance")).audio.bias_max_distance == ck.DISTANCE


@pytest.mark.parametrize(
    ("draft", "key", "value", "stored"),
    [
        (ck.original(), "vocab_size", 200100, "200064"),
        (ck.original(), "hidden_size", 32, "16"),
        (ck.original(), "intermediate_size", 48, "24"),
        (ck.original(), "num_hidden_layers", 3, "2"),
        (ck.original(), AUDIO + "attention_dim", 32, "16"),
        (ck.original(), AUDIO + "attention_heads", 4, "2"),
        (ck.original(), AUDIO + "linear_units", 24, "12"),
        (ck.original(), AUDIO + "num_blocks", 2, "1"),
        (ck.original(), AUDIO + "kernel_size", 5, "3"),
        (ck.original(), AUDIO + "nemo_conv_settings.conv_channels", 16, "8"),
        (ck.original(), AUDIO + "relative_attention_bias_args.t5_bias_max_distance", 1000, "5"),
        (ck.original(), AUDIO + "ext_pw_out_channel", 32, "16"),
        (ck.native(), "vision_config.hidden_size", 64, "32"),
        (ck.native(), "vision_config.num_hidden_layers", 5, "2"),
        (ck.native(), "audio_config.bias_max_distance", 1000, "5"),
        (ck.native(), "audio_config.nemo_conv_channels", 16, "8"),
    ],
)
def test_a_key_that_contradicts_the_tensors_is_named_with_both_numbers(
    draft: ck.Draft, key: str, value: int, stored: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(changed(draft, key, value))
    message = str(caught.value)
    assert "config.json" in message
    assert key in message
    assert str(value) in message
    assert stored in message


@pytest.mark.parametrize(
    ("draft", "key", "value"),
    [
        (ck.original(), "model_type", "phi3"),
        (ck.original(), "model_type", None),
        (ck.original(), "hidden_act", "gelu"),
        (ck.original(), "attention_bias", True),
        (ck.original(), "mlp_bias", True),
        (ck.original(), "lm_head_bias", True),
        (ck.original(), "quantization_config", {"quant_method": "gptq"}),
        (ck.original(), "sliding_window", 4096),
        (ck.original(), "embd_layer.image_embd_layer.crop_size", 336),
        (ck.original(), "embd_layer.image_embd_layer.hd_transform_order", "glb_sub"),
        (ck.original(), "embd_layer.image_embd_layer.use_hd_transform", False),
        (ck.original(), "embd_layer.audio_embd_layer.compression_rate", 4),
        (ck.original(), "image_token_id", 200012),
        (ck.original(), AUDIO + "chunk_size", 18),
        (ck.original(), AUDIO + "causal", False),
        (ck.original(), AUDIO + "time_reduction", 4),
        (ck.original(), "rope_scaling.type", "linear"),
        (ck.original(), "rope_scaling.type", "yarn"),
        (ck.original(), "rope_scaling.short_mscale", 1.2),
        (ck.original(), "rope_scaling.attention_factor", 1.0),
        (ck.original(), "rope_scaling.factor", 16),
        (ck.original(), "rms_norm_eps", 0),
        (ck.original(), "num_attention_heads", "1"),
        (ck.original(), "tie_word_embeddings", "yes"),
        (ck.native(), "vision_config.image_token_id", 200011),
        (ck.native(), "vision_config.feature_layer", -1),
        (ck.native(), "vision_config.crop_size", 224),
        (ck.native(), "vision_config.num_attention_heads", 12),
        (ck.native(), "audio_config.audio_token_id", 200010),
        (ck.native(), "audio_config.bias_symmetric", True),
        (ck.native(), "audio_config.activation", "gelu"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(draft: ck.Draft, key: str, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(changed(draft, key, value))
    assert key.rsplit(".", 1)[-1] in str(caught.value)
    assert caught.value.where.startswith("config.json")
    assert caught.value.fix


def test_true_is_not_one() -> None:
    with pytest.raises(CheckpointError, match="full_attn_mod must be 1, found true"):
        parse(changed(ck.original(), "full_attn_mod", True))


def test_a_model_without_longrope_is_refused() -> None:
    with pytest.raises(CheckpointError, match="rope_scaling must be an object of type longrope, found null"):
        parse(changed(ck.original(), "rope_scaling", None))


def test_rope_parameters_of_newer_savers_are_read() -> None:
    draft = without(ck.native(), "rope_scaling", "rope_theta", "partial_rotary_factor")
    draft = changed(
        draft,
        "rope_parameters",
        {
            "rope_type": "longrope",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 1.0,
            "short_factor": [1.5] * 8,
            "long_factor": [3.0] * 8,
            "original_max_position_embeddings": 4096,
        },
    )
    rope = parse(draft).rope
    assert (rope.theta, rope.short_factor[0], rope.long_factor[0]) == (5000.0, 1.5, 3.0)


def test_two_rope_sections_that_disagree_are_refused() -> None:
    other = {"rope_type": "longrope", "type": "longrope", "short_factor": [9.0] * 8, "long_factor": [2.0] * 8}
    with pytest.raises(CheckpointError, match=r"rope_scaling.short_factor is .* rope_parameters.short_factor is"):
        parse(changed(ck.native(), "rope_parameters", other))


def test_two_thetas_that_disagree_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"rope_theta is 10000.0 at the top level and 500 in rope_scaling"):
        parse(changed(ck.native(), "rope_scaling.rope_theta", 500))


def test_stated_scales_that_follow_from_the_lengths_are_accepted() -> None:
    draft = changed(ck.native(), "rope_scaling.attention_factor", 1.1902380714238083)
    assert parse(changed(draft, "rope_scaling.factor", 32.0)).rope.theta == 10000.0


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([1.0] * 7, "must hold 8 numbers, found 7"),
        ([1.0] * 7 + [0], r"\[7\] must be a positive finite number, found 0"),
        ([1.0] * 7 + [float("nan")], r"\[7\] must be a positive finite number, found NaN"),
        ("1.0", "must be a list of 8 numbers"),
    ],
)
def test_rotary_factors_are_counted_and_positive(factors: object, expected: str) -> None:
    with pytest.raises(CheckpointError, match=f"rope_scaling.long_factor.*{expected}"):
        parse(changed(ck.original(), "rope_scaling.long_factor", factors))


def test_a_rotary_dimension_that_no_kernel_takes_is_refused() -> None:
    with pytest.raises(CheckpointError, match="rotates 8 values, supported are multiples of 16"):
        parse(changed(ck.original(), "partial_rotary_factor", 0.5))


def test_a_head_dimension_that_no_kernel_takes_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"head dimension .* is 8, supported are multiples of 16"):
        parse(changed(ck.original(), "num_attention_heads", 2))


def test_heads_that_do_not_make_the_packed_rows_are_refused_with_both_numbers() -> None:
    draft = ck.original()
    draft.tensors["model.layers.0.self_attn.qkv_proj.base_layer.weight"] = ck.Stored((64, ck.WIDTH))
    with pytest.raises(CheckpointError, match=r"make 48 rows of q, k and v, but .* has 64"):
        parse(draft)


def test_null_key_value_heads_means_one_per_query_head() -> None:
    assert parse(changed(ck.original(), "num_key_value_heads", None)).num_kv_heads == 1


def test_a_window_as_long_as_the_context_changes_nothing() -> None:
    assert parse(changed(ck.original(), "sliding_window", 262144)).num_layers == ck.LAYERS


def test_without_the_tie_key_a_checkpoint_without_a_head_is_tied_and_one_with_a_head_is_not() -> None:
    draft = without(ck.native(), "tie_word_embeddings")
    assert parse(draft).tied_head
    draft.tensors["lm_head.weight"] = ck.Stored((ck.VOCAB, ck.WIDTH))
    assert not parse(draft).tied_head


def test_a_vocabulary_without_the_placeholder_rows_is_refused() -> None:
    draft = changed(ck.original(), "vocab_size", 32000)
    draft.tensors["model.embed_tokens.weight"] = ck.Stored((32000, ck.WIDTH))
    with pytest.raises(CheckpointError, match=r"vocab_size must be more than .* 200010 and 200011, found 32000"):
        parse(draft)


def test_stop_ids_come_from_the_generation_config_first_without_doubles() -> None:
    draft = changed(ck.original(), "eos_token_id", [199999, 200021])
    assert parse(draft, generation={"eos_token_id": [200020, 199999]}).eos_token_ids == (200020, 199999, 200021)
    assert parse(draft, generation={"eos_token_id": 200020}).eos_token_ids == (200020, 199999, 200021)
    assert parse(draft).eos_token_ids == (199999, 200021)


@pytest.mark.parametrize("value", [200064, -1, "200020", 1.5, True, [199999, "x"], [[199999]]])
def test_a_stop_id_that_is_no_token_is_refused_with_file_and_key(value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(ck.original(), generation={"eos_token_id": value})
    assert caught.value.where == "generation_config.json: eos_token_id"
    assert "200063" in caught.value.what


def test_begin_and_pad_ids_fall_back_to_config_json() -> None:
    config = parse(ck.original(), generation={"bos_token_id": 5})
    assert (config.bos_token_id, config.pad_token_id) == (5, 199999)
    assert parse(changed(ck.original(), "pad_token_id", None)).pad_token_id is None


def test_fewer_crops_follow_the_preprocessor_config() -> None:
    assert parse(ck.original(), preprocessor={"dynamic_hd": 12}).dynamic_hd == 12
    assert parse(ck.original(), preprocessor={}).dynamic_hd == 36


@pytest.mark.parametrize("value", [0, -3, 12.5, "12", True, None, 10**30])
def test_a_crop_count_that_no_processor_takes_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="dynamic_hd must be an integer of at least 1") as caught:
        parse(ck.original(), preprocessor={"dynamic_hd": value})
    assert caught.value.where == "preprocessor_config.json: dynamic_hd"


def test_stated_ranks_are_kept_for_the_original_layout_only() -> None:
    assert parse(ck.original()).lora == {Role.VISION: (4, 8.0), Role.SPEECH: (4, 12.0)}
    assert parse(ck.native()).lora == {}


def test_a_tower_without_its_last_layer_keeps_the_depth_that_the_native_config_states() -> None:
    draft = ck.native()
    last = f"encoder.layers.{ck.VISION_LAYERS - 1}."
    dropped = ck.Draft({n: t for n, t in draft.tensors.items() if f"img_processor.{last}" not in n}, draft.config)
    assert parse(dropped).vision.num_layers == ck.VISION_LAYERS


def test_a_tower_of_unknown_depth_is_refused_instead_of_guessed() -> None:
    draft = ck.original()
    cut = ("img_processor.post_layernorm.", "img_processor.head.")
    draft.tensors = {n: t for n, t in draft.tensors.items() if not any(c in n for c in cut)}
    with pytest.raises(CheckpointError, match=r"state the tower's full depth as vision_config\.num_hidden_layers"):
        parse(draft)


@pytest.mark.parametrize("part", ["model.layers.", "audio_embed.encoder.encoders.", "img_processor.encoder.layers."])
def test_a_stack_without_any_stored_layer_is_refused_however_many_the_config_states(part: str) -> None:
    draft = ck.native()
    draft.tensors = {name: tensor for name, tensor in draft.tensors.items() if part not in name}
    with pytest.raises(CheckpointError, match="is stored, which shows"):
        parse(draft)


def test_without_any_shapes_keys_and_class_defaults_count() -> None:
    raw = without(ck.native(), "vision_config", "audio_config", "intermediate_size").config
    config = parse_config(raw, {}, preprocessor=None, generation=None)
    assert (config.hidden_size, config.intermediate_size) == (ck.WIDTH, 8192)
    assert (config.vision.hidden_size, config.vision.num_layers) == (1152, 27)
    assert (config.audio.num_blocks, config.audio.bias_max_distance) == (24, 1000)
