"""The adapters form: `.onnx_adapter` files for onnxruntime's active adapters.

onnxruntime-genai 0.9 to 0.18 never activates them for phi4mm (docs/export.md); plain onnxruntime does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from phi4mm_export.checkpoint.adapters import Adapter
from phi4mm_export.checkpoint.open import Checkpoint
from phi4mm_export.graphs.layers import ONNX_FLOAT
from phi4mm_export.package.adapter_file import AdapterTensor, adapter_nbytes, write_adapter
from phi4mm_export.package.write import WrittenFile
from phi4mm_export.spec.contract import FloatType
from phi4mm_export.spec.model import ModelConfig
from phi4mm_export.spec.phi4mm_config import ADAPTER_FILES
from phi4mm_export.weights.rows import StoredRows
from phi4mm_export.weights.streams import TensorSpec, narrow

A_SUFFIX, B_SUFFIX = ".lora_A.MatMul.weight", ".lora_B.MatMul.weight"


def write_adapter_files(folder: Path, checkpoint: Checkpoint, float_type: FloatType) -> list[WrittenFile]:
    """One file per adapter of the checkpoint: A [in, r] and B [r, out] of every projection, B times alpha / r."""
    return [
        write_adapter(folder, ADAPTER_FILES[role], _tensors(checkpoint.config, adapter, float_type))
        for role, adapter in checkpoint.adapters.items()
    ]


def adapter_file_sizes(checkpoint: Checkpoint, float_type: FloatType) -> dict[str, int]:
    """Name and size of every adapter file, from shapes alone."""
    return {
        ADAPTER_FILES[role]: adapter_nbytes([t.spec for t in _tensors(checkpoint.config, adapter, float_type)])
        for role, adapter in checkpoint.adapters.items()
    }


def _tensors(config: ModelConfig, adapter: Adapter, float_type: FloatType) -> list[AdapterTensor]:
    """The two matrices of every part of every projection, each part with its own copy of A."""
    kind, found = ONNX_FLOAT[float_type], list[AdapterTensor]()
    for module, pair in adapter.pairs.items():
        rank, width = pair.a.shape
        start = 0
        for name, height in _parts(config, module):
            a = TensorSpec(name + A_SUFFIX, kind, (width, rank))
            b = TensorSpec(name + B_SUFFIX, kind, (rank, height))
            found.append(AdapterTensor(a, partial(_turned, a, StoredRows(pair.a), 0, rank)))
            rows = StoredRows(pair.b, scale=pair.scale)
            found.append(AdapterTensor(b, partial(_turned, b, rows, start, start + height)))
            start += height
    return found


def _turned(spec: TensorSpec, rows: StoredRows, start: int, stop: int) -> NDArray[Any]:
    """Rows start .. stop-1, transposed. Raises PackageError for a value that does not fit the type."""
    return narrow(rows.read(start, stop).T, spec, rows)


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
