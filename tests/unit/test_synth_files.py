"""The files of synthetic checkpoints, read by the safetensors library and compared with known digests."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes  # noqa: F401 - lets safetensors hand out bfloat16 arrays
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.checkpoint.source import DType
from phi4mm_export.checkpoint.synth import plan_checkpoint, write_safetensors
from phi4mm_export.checkpoint.synth_configs import json_text, original_config
from phi4mm_export.checkpoint.synth_plan import PlannedTensor, StoredTensor, inventory
from phi4mm_export.checkpoint.synth_settings import DEFAULTS, Size, WeightStyle, model_config
from phi4mm_export.checkpoint.synth_values import Numbers
from phi4mm_export.pipeline.synth import synth
from phi4mm_export.spec.model import Layout
from phi4mm_export.spec.names import canonical_name

REAL_INVENTORY_SHA256 = {
    Layout.ORIGINAL: "39bfd85c478896e9ea960ef8274838c7960d8c03feac876d8709cb084437f872",
    Layout.NATIVE: "af3d2b84e76f95e3a411d4313bc21506f541e5ba5215457b0f0bcf6970541439",
}
"""Digests of the real checkpoint's tensor lists (name, dtype, shape, file), derived apart from this program and equal
to a meta-device instance of transformers' model class."""
REAL_CONFIG_SHA256 = "61419445d8cc21bd6fb72c35a6621efe678801a83cab235abc487d49610fd591"
"""Digest of the real config.json in the original layout."""
ORACLE_SHA256 = """
35e0dec1e323927b741d154e0dbfc3a8163b640518641dec7eafc45be76dc221  original/config.json
757daa0d0e89171fe48fc3286341833e95b90bdb7dd3b02a2f8920fb09f85a38  original/generation_config.json
2082820143713a1a5ba13918debe3badcbf1ea6263d773d54b4550383e0a2989  original/model-00001-of-00002.safetensors
1669d18ff63e2b9ed8a9cc12b629c759554e1ed3e528fbf82caf3d92676a3a18  original/model-00002-of-00002.safetensors
a63e822531f5c6f9e56fc298c2a26874cad9624bb7aa8aa23f34aa4938f70bec  original/model.safetensors.index.json
57404240a114fe193cef8481730312a6d5e68040d1fbf1263831f4707087235b  original/preprocessor_config.json
8bcf4e58d0970bbcb3b111a4c1e297c082fbf61253b14b3c0c8f2972ccb61ba4  original/special_tokens_map.json
ae34a36f16c2c2dc603251c79780cc8589c46fa0790118821959fca5e23fe00d  original/tokenizer.json
30768cf47ef9a8b6ca4769c92b5dca39f9a94e23e8b6f79e114b28a0e2aba99e  original/tokenizer_config.json
734cba8ac2d381390a33f32fc35b5d09a0f814a6ed7d90dd52d4c2e4a3db53a0  native/config.json
757daa0d0e89171fe48fc3286341833e95b90bdb7dd3b02a2f8920fb09f85a38  native/generation_config.json
d13fc7e06b9ad37e1b1aa6a38516fbad26945dadd6530d4d458a84c82af325e9  native/model-00001-of-00002.safetensors
21f95ca1a7b001270b205fbe17600219abf64e9894a3cc76f0eb28e31a64f128  native/model-00002-of-00002.safetensors
533e7eedc3b48cbc9c56e83840b395c87da25821be0c24443a0029e833884c2c  native/model.safetensors.index.json
945846f6d607860ed333312c63583f627ba5d664fc4cbd7dc57b961b142984b7  native/preprocessor_config.json
8bcf4e58d0970bbcb3b111a4c1e297c082fbf61253b14b3c0c8f2972ccb61ba4  native/special_tokens_map.json
ae34a36f16c2c2dc603251c79780cc8589c46fa0790118821959fca5e23fe00d  native/tokenizer.json
30768cf47ef9a8b6ca4769c92b5dca39f9a94e23e8b6f79e114b28a0e2aba99e  native/tokenizer_config.json
a6368b1b9958baeb68e775926b9deb966fd4190bab99e1eec91bdfc3ebd1ac2c  native/speech-lora/adapter_config.json
2d7c49e3dd499183b3ded7c69750b4b4b8d2540c4855984bc9b04b3cb75f2dac  native/speech-lora/adapter_model.safetensors
69fb783be23199390a8198b4701559852d674728b611f367567ef1ee18ace2ae  native/vision-lora/adapter_config.json
f216d1b48b98ea3dee3274b4fd3573746fe9fc0c423d4afeca48ec8dc56e6b78  native/vision-lora/adapter_model.safetensors
"""
"""Files of the checkpoint that the stored goldens belong to, as another program writes them: sha256, layout/path."""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): _digest(path) for path in folder.rglob("*") if path.is_file()}


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    """Canonical name -> bytes of every tensor, adapters of the native layout included."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        role = path.parent.name.removesuffix("-lora") if path.parent != folder else ""
        for name, value in load_file(path).items():
            own = name.replace(".weight", f".{role}.weight") if role else name
            found[canonical_name(own)] = value
    return found


def _write(path: Path, tensors: Iterable[tuple[str, DType, tuple[int, ...]]], seed: int = 1) -> None:
    rows = tuple(StoredTensor(name, dtype, PlannedTensor(name, shape, Numbers(1.0))) for name, dtype, shape in tensors)
    write_safetensors(path, rows, seed, lambda _: None)


@pytest.mark.parametrize("layout", Layout)
def test_full_size_has_the_tensors_of_the_real_checkpoint_row_for_row(layout: Layout) -> None:
    rows = inventory(DEFAULTS[Size.FULL], layout)

    assert len(rows) == 1 + 2047
    assert hashlib.sha256("".join(f"{row}\n" for row in rows).encode()).hexdigest() == REAL_INVENTORY_SHA256[layout]


@pytest.mark.parametrize("layout", Layout)
def test_full_size_has_the_bytes_of_the_real_checkpoint(layout: Layout) -> None:
    plan = plan_checkpoint(DEFAULTS[Size.FULL], layout=layout, seed=1, weights=WeightStyle.HEAVY)

    assert plan.num_tensors == 2047
    assert plan.nbytes == 11_148_920_768
    assert sum(file.path.startswith("model-") for file in plan.files) == 3


def test_full_size_has_the_real_config() -> None:
    text = json_text(original_config(DEFAULTS[Size.FULL]))

    assert hashlib.sha256(text.encode()).hexdigest() == REAL_CONFIG_SHA256


@pytest.mark.parametrize("layout", Layout)
def test_oracle_size_writes_the_files_of_the_stored_goldens(layout: Layout, tmp_path: Path) -> None:
    lines = (line.split("  ") for line in ORACLE_SHA256.split("\n") if line)
    wanted = {name.removeprefix(f"{layout}/"): digest for digest, name in lines if name.startswith(f"{layout}/")}

    synth(tmp_path / "oracle", size=Size.ORACLE, layout=layout)

    assert _digests(tmp_path / "oracle") == wanted


def test_a_file_has_the_bytes_that_the_safetensors_library_writes(tmp_path: Path) -> None:
    _write(
        tmp_path / "ours",
        [("b", DType.BF16, (3, 5)), ("é", DType.F16, (2,)), ("a", DType.F32, (1, 1, 4)), ("c", DType.F32, (7,))],
    )

    save_file(load_file(tmp_path / "ours"), tmp_path / "theirs", metadata={"format": "pt"})

    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    _write(tmp_path / "warm", [("a", DType.BF16, (8, 8))])
    tracemalloc.start()
    try:
        _write(tmp_path / "large", [("a", DType.BF16, (16384, 2048)), ("b", DType.BF16, (16384, 1024))])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (tmp_path / "large").stat().st_size > 96 * 2**20
    assert peak < 8 * 2**20


def test_every_shard_is_valid_and_the_index_tells_the_truth(tiny_checkpoint: Path) -> None:
    index = json.loads((tiny_checkpoint / "model.safetensors.index.json").read_text())
    held, nbytes = {}, 0
    for path in sorted(tiny_checkpoint.glob("*.safetensors")):
        with safe_open(path, "np") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                held[name] = path.name
                nbytes += shard.get_tensor(name).nbytes

    assert held == index["weight_map"]
    assert nbytes == index["metadata"]["total_size"]
    assert len(set(held.values())) == 2


def test_both_layouts_hold_the_same_numbers(tiny_checkpoint: Path, tiny_native: Path) -> None:
    original, native = _tensors(tiny_checkpoint), _tensors(tiny_native)

    assert original.keys() == native.keys()
    assert [name for name in original if original[name].tobytes() != native[name].tobytes()] == []


def test_the_reader_sees_the_dimensions_that_were_asked_for(tiny_checkpoint: Path, tiny_native: Path) -> None:
    wanted = model_config(DEFAULTS[Size.TINY])

    for folder in (tiny_checkpoint, tiny_native):
        config = open_checkpoint(folder).config
        assert (config.hidden_size, config.num_layers, config.qkv_size) == (128, 2, 256)
        assert (config.rope, config.vision, config.audio) == (wanted.rope, wanted.vision, wanted.audio)


def test_the_same_arguments_give_the_same_bytes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    synth(tmp_path / "again")

    assert _digests(tmp_path / "again") == _digests(tiny_checkpoint)


def test_another_seed_changes_every_tensor_and_no_side_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    synth(tmp_path / "other", seed=2)

    first, second = _tensors(tiny_checkpoint), _tensors(tmp_path / "other")
    assert [name for name in first if first[name].tobytes() == second[name].tobytes()] == []
    differ = _digests(tmp_path / "other").items() - _digests(tiny_checkpoint).items()
    assert sorted(name for name, _ in differ) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def test_heavy_weights_have_outliers_in_matrices_and_norms_but_not_in_biases(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    synth(tmp_path / "heavy", weights=WeightStyle.HEAVY)
    plain, heavy = _tensors(tiny_checkpoint), _tensors(tmp_path / "heavy")

    def reach(tensors: dict[str, np.ndarray], name: str) -> float:
        value = tensors[f"model.layers.0.{name}.weight"].astype(np.float64)
        return float(np.abs(value).max() / value.std())

    assert reach(plain, "mlp.gate_up_proj") < 3.6
    assert reach(heavy, "mlp.gate_up_proj") > 12
    assert heavy["model.norm.weight"].max() > 3 > plain["model.norm.weight"].max()
    same = [name for name in plain if name.endswith("bias") and "norm" not in name]
    assert [name for name in same if plain[name].tobytes() != heavy[name].tobytes()] == []


def test_every_id_of_the_vocabulary_decodes_to_its_own_piece(tiny_checkpoint: Path) -> None:
    tokenizer = json.loads((tiny_checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    pieces = {i: piece for piece, i in tokenizer["model"]["vocab"].items()}
    pieces |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}

    assert sorted(pieces) == list(range(200064))
    assert len(set(pieces.values())) == 200064
    assert [pieces[i] for i in (198, 199999, 200010, 200011, 200020)] == [
        "Ċ",
        "<|endoftext|>",
        "<|endoftext10|>",
        "<|endoftext11|>",
        "<|end|>",
    ]
    merged = {pair.replace(" ", "") for pair in tokenizer["model"]["merges"]}
    assert merged <= set(pieces.values())


def test_a_larger_vocabulary_has_tokens_for_its_extra_rows(tmp_path: Path) -> None:
    synth(tmp_path / "larger", settings=["vocab_size=200070", "shards=1"])

    added = json.loads((tmp_path / "larger" / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    assert [token["id"] for token in added][-2:] == [200068, 200069]
    assert not (tmp_path / "larger" / "model.safetensors.index.json").exists()
    with safe_open(tmp_path / "larger" / "model.safetensors", "np") as file:
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [200070, 128]
