"""The adapters form: `.onnx_adapter` files for onnxruntime's active adapters.

onnxruntime-genai 0.9 to 0.18 never activates them for phi4mm (docs/export.md); plain onnxruntime does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.checkpoint.adapters import LoraPair
from phi4mm_export.checkpoint.open import Checkpoint
from phi4mm_export.graphs.layers import ONNX_FLOAT
from phi4mm_export.package.write import WrittenFile, hashed
from phi4mm_export.runtime.ort import import_onnxruntime
from phi4mm_export.spec.contract import FloatType
from phi4mm_export.spec.model import ModelConfig
from phi4mm_export.spec.phi4mm_config import ADAPTER_FILES, ITEM_NBYTES
from phi4mm_export.weights.rows import StoredRows

FORMAT_VERSION = 1
ENTRY_NBYTES = 56
"""What the file takes per parameter beside its name and values (measured)."""
A_SUFFIX, B_SUFFIX = ".lora_A.MatMul.weight", ".lora_B.MatMul.weight"
Parameters = Iterator[tuple[str, NDArray[Any]]]


def write_adapter_files(folder: Path, checkpoint: Checkpoint, float_type: FloatType) -> list[WrittenFile]:
    """One file per adapter of the checkpoint: A [in, r] and B [r, out] of every projection, B times alpha / r."""
    onnxruntime = import_onnxruntime("writing adapter files")
    kind = ONNX_FLOAT[float_type].numpy()
    written = []
    for role, adapter in checkpoint.adapters.items():
        parameters = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values.astype(kind)))
            for module, pair in adapter.pairs.items()
            for name, values in _split_parameters(checkpoint.config, module, pair)
        }
        made = onnxruntime.AdapterFormat()
        made.set_adapter_version(FORMAT_VERSION)
        made.set_model_version(FORMAT_VERSION)
        made.set_parameters(parameters)
        made.export_adapter(str(folder / ADAPTER_FILES[role]))
        written.append(hashed(folder, ADAPTER_FILES[role]))
    return written


def adapter_file_sizes(checkpoint: Checkpoint, float_type: FloatType) -> dict[str, int]:
    """Name and size of every adapter file, from shapes alone; right within a thousandth."""
    item, sizes = ITEM_NBYTES[float_type], dict[str, int]()
    for role, adapter in checkpoint.adapters.items():
        sizes[ADAPTER_FILES[role]] = sum(
            item * pair.rank * (pair.a.shape[1] + height) + 2 * (len(name) + len(A_SUFFIX) + ENTRY_NBYTES)
            for module, pair in adapter.pairs.items()
            for name, height in _parts(checkpoint.config, module)
        )
    return sizes


def _split_parameters(config: ModelConfig, module: str, pair: LoraPair) -> Parameters:
    """The two matrices of every part, each part with its own copy of A."""
    a = StoredRows(pair.a).read(0, pair.a.shape[0]).T
    b = StoredRows(pair.b, scale=pair.scale)
    start = 0
    for name, height in _parts(config, module):
        yield name + A_SUFFIX, a
        yield name + B_SUFFIX, b.read(start, start + height).T
        start += height


def _parts(config: ModelConfig, module: str) -> Iterator[tuple[str, int]]:
    """Official names of a projection's parts, the packed ones split, and the rows of each."""
    layer, _, projection = module.removeprefix("model.layers.").partition(".")
    d, kv, f = config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    parts: dict[str, tuple[str, list[tuple[str, int]]]] = {
        "self_attn.qkv_proj": ("attn", [("q_proj", config.num_heads * d), ("k_proj", kv), ("v_proj", kv)]),
        "self_attn.o_proj": ("attn", [("o_proj", config.hidden_size)]),
        "mlp.gate_up_proj": ("mlp", [("gate_proj", f), ("up_proj", f)]),
        "mlp.down_proj": ("mlp", [("down_proj", config.hidden_size)]),
    }
    block, splits = parts[projection]
    for name, height in splits:
        yield f"model.layers.{layer}.{block}.{name}", height
