"""LoRA pairs and scales: from shards, from PEFT folders, by PEFT's own rules."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from support import checkpoints as ck

from phi4mm_export.checkpoint.adapters import LoraSettings, parse_settings
from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.spec.json_fields import Fields
from phi4mm_export.spec.model import Role

QKV = "model.layers.0.self_attn.qkv_proj"
DOWN = "model.layers.1.mlp.down_proj"


def settings(**changes: object) -> LoraSettings:
    return parse_settings(Fields(ck.adapter_config(**changes), "adapter_config.json"))


def test_the_scale_is_alpha_over_r() -> None:
    assert settings(r=16, lora_alpha=48).scale_of(QKV) == 3.0


def test_rank_stabilized_adapters_divide_by_the_root_of_r() -> None:
    assert settings(r=16, lora_alpha=48, use_rslora=True).scale_of(QKV) == pytest.approx(48 / math.sqrt(16))


def test_patterns_match_a_whole_path_or_its_end_after_a_dot() -> None:
    made = settings(r=4, lora_alpha=8, rank_pattern={"qkv_proj": 16}, alpha_pattern={"self_attn.qkv_proj": 48})
    assert (made.rank_of(QKV), made.scale_of(QKV)) == (16, 3.0)
    assert (made.rank_of(DOWN), made.scale_of(DOWN)) == (4, 2.0)
    assert settings(rank_pattern={"kv_proj": 16}).rank_of(QKV) == ck.RANK
    assert settings(rank_pattern={"qkv": 16}).rank_of(QKV) == ck.RANK
    assert settings(rank_pattern={"^" + QKV: 16}).rank_of(QKV) == 16


def test_the_first_pattern_that_matches_wins() -> None:
    made = settings(rank_pattern={r".*layers\.0\..*": 8, "qkv_proj": 16})
    assert made.rank_of(QKV) == 8
    assert made.rank_of("model.layers.1.self_attn.qkv_proj") == 16


@pytest.mark.reference
def test_peft_names_the_same_pattern_for_every_module() -> None:
    peft = pytest.importorskip("peft.utils.other", reason="compares with PEFT where it is installed")
    patterns = ["qkv_proj", r"layers\.0\.mlp.*", "^model.layers.1.mlp.down_proj", "proj", r".*o_proj", "x|down_proj"]
    for pattern in patterns:
        ours = LoraSettings("here", 4, 8.0, rank_pattern={pattern: 16})
        for module in (QKV, DOWN, "model.layers.0.mlp.gate_up_proj", "model.layers.10.self_attn.o_proj"):
            assert (ours.rank_of(module) == 16) == (peft.get_pattern_key([pattern], module) == pattern), pattern


def test_adapters_in_the_shards_take_their_scale_from_config_json(tmp_path: Path) -> None:
    with open_checkpoint(ck.original().write(tmp_path / "m")) as checkpoint:
        vision, speech = checkpoint.adapters[Role.VISION], checkpoint.adapters[Role.SPEECH]
    assert (vision.ranks, vision.scales) == ((4,), (2.0,))
    assert (speech.ranks, speech.scales) == ((4,), (3.0,))
    assert list(vision.pairs)[:2] == [QKV, "model.layers.0.self_attn.o_proj"]
    assert vision.pairs[QKV].a.shape == (4, 16)
    assert vision.pairs[QKV].b.shape == (48, 4)


def test_adapter_tensors_are_not_among_the_models_tensors(tmp_path: Path) -> None:
    with open_checkpoint(ck.original().write(tmp_path / "m")) as checkpoint:
        assert not [name for name in checkpoint.tensors if "lora" in name]


@pytest.mark.parametrize("prefix", ["", "base_model.model.", "module.base_model.model."])
def test_native_adapters_are_read_from_their_folders_with_and_without_prefix(tmp_path: Path, prefix: str) -> None:
    folder = ck.native().write(tmp_path / "m")
    ck.write_adapter(folder / "vision-lora", ck.lora_tensors(prefix=prefix))
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.adapters) == {Role.VISION}
        adapter = checkpoint.adapters[Role.VISION]
        assert (adapter.source, len(adapter.pairs), adapter.scales) == ("vision-lora", 8, (2.0,))
        assert folder / "vision-lora" / "adapter_model.safetensors" in checkpoint.files


def test_a_raw_state_dict_may_keep_the_adapters_name_in_its_keys(tmp_path: Path) -> None:
    folder = ck.native().write(tmp_path / "m")
    ck.write_adapter(folder / "speech-lora", ck.lora_tensors(".default", prefix="base_model.model."))
    with open_checkpoint(folder) as checkpoint:
        assert len(checkpoint.adapters[Role.SPEECH].pairs) == 8


def test_a_named_folder_replaces_the_built_in_adapter_of_its_role_only(tmp_path: Path) -> None:
    folder = ck.original().write(tmp_path / "m")
    own = ck.write_adapter(
        tmp_path / "my-adapter",
        {
            **ck.lora_tensors(rank=2),
            f"{QKV}.lora_A.weight": ck.Stored((6, 16)),
            f"{QKV}.lora_B.weight": ck.Stored((48, 6)),
        },
        r=2,
        lora_alpha=4,
        rank_pattern={r".*layers\.0\.self_attn\.qkv_proj": 6},
        alpha_pattern={r".*layers\.0\.self_attn\.qkv_proj": 18},
    )
    with open_checkpoint(folder, adapter_paths={Role.VISION: own}) as checkpoint:
        vision = checkpoint.adapters[Role.VISION]
        assert vision.source == "my-adapter"
        assert vision.pairs[QKV].scale == 3.0
        assert vision.pairs[DOWN].scale == 2.0
        assert checkpoint.adapters[Role.SPEECH].source == "config.json: speech_lora"


def test_an_adapter_on_some_modules_only_is_legal(tmp_path: Path) -> None:
    tensors = {name: t for name, t in ck.lora_tensors().items() if name.startswith(QKV)}
    own = ck.write_adapter(tmp_path / "own", tensors)
    folder = ck.native().write(tmp_path / "m")
    with open_checkpoint(folder, adapter_paths={Role.SPEECH: own}) as checkpoint:
        assert list(checkpoint.adapters[Role.SPEECH].pairs) == [QKV]


def test_a_merged_checkpoint_has_no_adapter_although_config_json_still_names_them(tmp_path: Path) -> None:
    with open_checkpoint(ck.original(adapters=False).write(tmp_path / "m")) as checkpoint:
        assert checkpoint.adapters == {}
        assert checkpoint.warnings == ()


def test_adapter_folders_beside_merged_original_shards_are_not_applied_twice(tmp_path: Path) -> None:
    folder = ck.original(adapters=False).write(tmp_path / "m")
    ck.write_adapter(folder / "vision-lora")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.adapters == {}
        (warning,) = checkpoint.warnings
    assert "vision-lora is not used" in warning
    assert "--adapter-path vision=vision-lora" in warning


def test_one_adapter_may_be_absent(tmp_path: Path) -> None:
    draft = ck.original()
    draft.tensors = {name: t for name, t in draft.tensors.items() if ".speech." not in name or "lora" not in name}
    with open_checkpoint(draft.write(tmp_path / "m")) as checkpoint:
        assert set(checkpoint.adapters) == {Role.VISION}


def test_the_values_of_a_pair_are_the_stored_ones(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((ck.RANK, ck.WIDTH), np.float32)
    draft = ck.original()
    draft.tensors[f"{QKV}.lora_A.vision.weight"] = ck.stored_f32(values)
    with open_checkpoint(draft.write(tmp_path / "m")) as checkpoint:
        np.testing.assert_array_equal(checkpoint.adapters[Role.VISION].pairs[QKV].a.whole(), values)
