"""`.onnx_adapter` files, tensor by tensor: what onnxruntime.AdapterFormat writes, in bounded memory and a fixed order.

onnxruntime's own writer holds all tensors twice, orders them as its hash table happens to, and closes the file without
looking. Format: flatbuffers, file identifier TORT, one table `Adapter` of tables `Parameter`.
Source: ONNX Runtime, onnxruntime/lora/adapter_format/adapter_schema.fbs.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import PackageError
from phi4mm_export.package.write import WrittenFile
from phi4mm_export.weights.streams import TensorSpec

IDENTIFIER = b"TORT"
VERSION = 1
"""Format, adapter and model version."""
MAX_NBYTES = 2**31 - 1
"""Flatbuffers hold signed 32-bit offsets."""
ALIGNMENT = 8
"""Of dims and of raw_data, by the schema."""
_VTABLE = struct.pack("<6H", 12, 20, 4, 8, 12, 16)
"""Serves both tables: its own size, the table's size, and where the table's four fields lie."""
_VTABLE_AT = 8
_ADAPTER_AT = _VTABLE_AT + len(_VTABLE)
_TABLE_NBYTES = 20
_LIST_AT = _ADAPTER_AT + _TABLE_NBYTES


@dataclass(frozen=True)
class AdapterTensor:
    """One tensor: name, element type, shape; `read` gives its values when they are written."""

    spec: TensorSpec
    read: Callable[[], NDArray[Any]]


def adapter_nbytes(specs: Sequence[TensorSpec]) -> int:
    """The exact size of the file."""
    at = _first(specs)
    for spec in specs:
        at += len(_about(spec, at)) + spec.nbytes
    return at


def write_adapter(folder: Path, name: str, tensors: Sequence[AdapterTensor]) -> WrittenFile:
    """Write the file `name` below `folder`. Raises PackageError where the format cannot hold so many bytes."""
    specs = [tensor.spec for tensor in tensors]
    total = adapter_nbytes(specs)
    if total > MAX_NBYTES:
        raise PackageError(
            f"the adapters would take {total:,} bytes, an adapter file holds at most {MAX_NBYTES:,}",
            where=name,
            fix="export in float16 (--ep cuda), or choose --lora gated",
        )
    digest = hashlib.sha256()
    with (folder / name).open("xb") as file:
        for piece in _pieces(tensors):
            file.write(piece)
            digest.update(piece)
    return WrittenFile(name, total, digest.hexdigest())


def _pieces(tensors: Sequence[AdapterTensor]) -> Iterator[bytes | memoryview]:
    specs = [tensor.spec for tensor in tensors]
    yield _head(specs)
    at = _first(specs)
    for tensor in tensors:
        about = _about(tensor.spec, at)
        yield about
        values = tensor.read()
        if values.shape != tensor.spec.shape or values.dtype != tensor.spec.dtype.numpy():
            raise ValueError(f"{tensor.spec.name}: {values.dtype} {values.shape} came, {tensor.spec} was announced")
        yield values.reshape(-1).view(np.uint8).data
        at += len(about) + tensor.spec.nbytes


def _first(specs: Sequence[TensorSpec]) -> int:
    """Where the first parameter begins: behind the adapter's table and its list of parameters."""
    return _aligned(_LIST_AT + 4 + 4 * len(specs))


def _head(specs: Sequence[TensorSpec]) -> bytes:
    """Everything before the first parameter."""
    places, at = [], _first(specs)
    for number, spec in enumerate(specs):
        places.append(_aligned(at) - (_LIST_AT + 4 + 4 * number))
        at += len(_about(spec, at)) + spec.nbytes
    root = struct.pack("<I4s", _ADAPTER_AT, IDENTIFIER) + _VTABLE
    adapter = struct.pack("<iiiiI", _ADAPTER_AT - _VTABLE_AT, VERSION, VERSION, VERSION, 4)
    listed = struct.pack(f"<I{len(places)}I", len(places), *places)
    return (root + adapter + listed).ljust(_first(specs), b"\0")


def _about(spec: TensorSpec, at: int) -> bytes:
    """What stands before a parameter's values when it begins at byte `at`: padding, table, name, dims, length."""
    table = _aligned(at)
    name_at = table + _TABLE_NBYTES
    name = spec.name.encode("utf-8")
    text = struct.pack("<I", len(name)) + name + b"\0"
    dims_at = _aligned(name_at + len(text) + 4) - 4
    raw_at = dims_at + 4 + 8 * len(spec.shape) + 4
    fields = (name_at - (table + 4), dims_at - (table + 8), spec.dtype.value, raw_at - (table + 16))
    start = (struct.pack("<iIIiI", table - _VTABLE_AT, *fields) + text).ljust(dims_at - table, b"\0")
    dims = struct.pack(f"<I{len(spec.shape)}q", len(spec.shape), *spec.shape)
    return bytes(table - at) + (start + dims).ljust(raw_at - table, b"\0") + struct.pack("<I", spec.nbytes)


def _aligned(at: int) -> int:
    return at + -at % ALIGNMENT
