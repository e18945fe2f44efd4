"""One crafted adapter per fault: which setting or tensor, what was expected and found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints as ck

from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.errors import CheckpointError, UsageError
from phi4mm_export.spec.model import Role

QKV = "model.layers.0.self_attn.qkv_proj"
Tensors = dict[str, ck.Stored]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without adapters; the tests add one from outside."""
    return ck.native().write(tmp_path_factory.mktemp("base") / "model")


def refusal(base: Path, adapter: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(base, adapter_paths={Role.VISION: adapter})
    assert caught.value.where.startswith(adapter.name)
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("fan_in_fan_out", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", True),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("target_parameters", ["mlp.weight"]),
        ("trainable_token_indices", [200010]),
        ("alora_invocation_tokens", [1, 2]),
        ("megatron_config", {"x": 1}),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("peft_type", "LOHA"),
        ("peft_type", 7),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", 3),
        ("r", 0),
        ("r", "4"),
        ("r", 4.0),
        ("r", True),
        ("lora_alpha", None),
        ("lora_alpha", "8"),
        ("use_rslora", "no"),
        ("rank_pattern", ["qkv_proj"]),
        ("alpha_pattern", {"qkv_proj": "8"}),
        ("rank_pattern", {"(": 4}),
    ],
)
def test_a_setting_that_is_not_computed_is_refused_by_name(base: Path, tmp_path: Path, key: str, value: object) -> None:
    error = refusal(base, ck.write_adapter(tmp_path / "own", **{key: value}))
    assert key in str(error)
    assert "adapter_config.json" in error.where


@pytest.mark.parametrize("key", ["r", "lora_alpha"])
def test_an_adapter_without_rank_or_alpha_is_refused_not_guessed(base: Path, tmp_path: Path, key: str) -> None:
    adapter = ck.write_adapter(tmp_path / "own")
    settings = {k: v for k, v in ck.adapter_config().items() if k != key}
    ck.write_json(adapter / "adapter_config.json", settings)
    assert f"{key} must be" in refusal(base, adapter).what


def test_infinite_alpha_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = ck.write_adapter(tmp_path / "own")
    text = json.dumps(ck.adapter_config(lora_alpha=float("inf")))
    (adapter / "adapter_config.json").write_text(text)
    assert "Infinity" in refusal(base, adapter).what


@pytest.mark.parametrize("value", [True, False, "gaussian", "Gaussian", "eva", "orthogonal", None])
def test_starts_that_leave_the_base_alone_are_fine(base: Path, tmp_path: Path, value: object) -> None:
    adapter = ck.write_adapter(tmp_path / "own", init_lora_weights=value)
    open_checkpoint(base, adapter_paths={Role.VISION: adapter}).close()


def changed(edit: Callable[[Tensors], object]) -> Tensors:
    tensors = ck.lora_tensors()
    edit(tensors)
    return tensors


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda t: t.update({f"{QKV}.lora_A.weight": ck.Stored((4, 17))}), "[4, 17], expected [4, 16]"),
        (lambda t: t.update({f"{QKV}.lora_B.weight": ck.Stored((47, 4))}), "[47, 4], expected [48, 4]"),
        (lambda t: t.update({f"{QKV}.lora_A.weight": ck.Stored((8, 16))}), "[8, 16], expected [4, 16]"),
        (lambda t: t.update({f"{QKV}.lora_A.weight": ck.Stored((16, 4))}), "[16, 4], expected [4, 16]"),
        (lambda t: t.pop(f"{QKV}.lora_B.weight"), f"missing: {QKV}.lora_B"),
        (lambda t: t.pop(f"{QKV}.lora_A.weight"), f"missing: {QKV}.lora_A"),
        (lambda t: t.update({f"{QKV}.lora_magnitude_vector": ck.Stored((48,))}), "lora_magnitude_vector"),
        (lambda t: t.update({f"{QKV}.lora_B.bias": ck.Stored((48,))}), "lora_B.bias"),
        (lambda t: t.update({"model.layers.9.mlp.down_proj.lora_A.weight": ck.Stored((4, 24))}), "layers.9"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.lora_A.weight": ck.Stored((4, 16))}), "q_proj"),
        (lambda t: t.update({"lm_head.weight": ck.Stored((8, 16))}), "lm_head.weight"),
        (lambda t: t.update({f"base_model.model.{QKV}.lora_A.weight": ck.Stored((4, 16))}), "same tensor"),
        (lambda t: t.update({f"{QKV}.lora_A.mine.weight": ck.Stored((4, 16))}), "'mine'"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    base: Path, tmp_path: Path, edit: Callable[[Tensors], object], expected: str
) -> None:
    error = refusal(base, ck.write_adapter(tmp_path / "own", changed(edit)))
    assert expected in error.what
    assert "adapter_model.safetensors" in error.where


def test_the_rank_a_pattern_promises_is_the_rank_the_tensors_must_have(base: Path, tmp_path: Path) -> None:
    error = refusal(base, ck.write_adapter(tmp_path / "own", rank_pattern={"qkv_proj": 8}))
    assert "[4, 16], expected [8, 16]" in error.what
    assert "r 8 by own/adapter_config.json" in error.what


def test_a_pickled_adapter_is_not_read(base: Path, tmp_path: Path) -> None:
    adapter = ck.write_adapter(tmp_path / "own")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    error = refusal(base, adapter)
    assert "adapter_model.bin" in error.what
    assert "safetensors" in error.fix


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_folder_without_one_of_its_files_is_refused(base: Path, tmp_path: Path, file: str) -> None:
    adapter = ck.write_adapter(tmp_path / "own")
    (adapter / file).unlink()
    assert file in refusal(base, adapter).where


def test_a_pointer_in_place_of_adapter_weights_is_recognised(base: Path, tmp_path: Path) -> None:
    adapter = ck.write_adapter(tmp_path / "own")
    (adapter / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 99\n")
    assert "Git LFS pointer" in refusal(base, adapter).what


def test_an_adapter_path_that_is_no_folder_is_a_usage_error(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--adapter-path vision=DIR"):
        open_checkpoint(base, adapter_paths={Role.VISION: tmp_path / "gone"})


# ------------------------------------------------------------------ adapters in the shards


def opened(draft: ck.Draft, tmp_path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(draft.write(tmp_path / "m"))
    return caught.value


def test_a_rank_that_config_json_does_not_state_names_key_and_both_shapes(tmp_path: Path) -> None:
    draft = ck.original()
    draft.config["vision_lora"]["r"] = 8
    error = opened(draft, tmp_path)
    assert "[4, 16], expected [8, 16]" in error.what
    assert "config.json: vision_lora" in error.what


def test_a_rank_pattern_in_config_json_may_explain_another_rank(tmp_path: Path) -> None:
    draft = ck.original()
    draft.config["vision_lora"] |= {"r": 8, "rank_pattern": {".*_proj": ck.RANK}}
    with open_checkpoint(draft.write(tmp_path / "m")) as checkpoint:
        assert checkpoint.adapters[Role.VISION].ranks == (ck.RANK,)


def test_adapter_tensors_without_their_settings_are_refused(tmp_path: Path) -> None:
    draft = ck.original()
    del draft.config["speech_lora"]
    error = opened(draft, tmp_path)
    assert error.where == "config.json: speech_lora.r"


@pytest.mark.parametrize(
    "name", [f"{QKV}.lora_A.default.weight", f"{QKV}.lora_A.weight", f"{QKV}.lora_E.vision.weight"]
)
def test_an_adapter_in_the_shards_that_is_neither_vision_nor_speech_is_refused(tmp_path: Path, name: str) -> None:
    draft = ck.original()
    draft.tensors[name] = ck.Stored((4, 16))
    error = opened(draft, tmp_path)
    assert name in error.what
    assert "--adapter-path" in error.fix


def test_half_a_pair_in_the_shards_names_what_is_missing(tmp_path: Path) -> None:
    draft = ck.original()
    draft.tensors = {n: t for n, t in draft.tensors.items() if ".lora_B.speech." not in n}
    error = opened(draft, tmp_path)
    assert "8 modules of the speech adapter with one matrix of two" in error.what
    assert f"{QKV}.lora_B" in error.what


def test_a_replaced_built_in_adapter_is_not_judged(tmp_path: Path) -> None:
    draft = ck.original()
    draft.config["vision_lora"]["r"] = 8
    own = ck.write_adapter(tmp_path / "own")
    open_checkpoint(draft.write(tmp_path / "m"), adapter_paths={Role.VISION: own}).close()
