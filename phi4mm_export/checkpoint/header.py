"""The header of one safetensors file, parsed and judged before anything is read.

safetensors' own reader accepts duplicate keys, path-like names and empty tensors, and its errors name no file;
so the header is parsed here first, with a sentence per fault, and the library's reader must accept the file too.

Format: 8 bytes little-endian header length, that many bytes of JSON (name -> dtype, shape, data_offsets; and
`__metadata__`), then the tensors without gaps (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from phi4mm_export.checkpoint.documents import (
    FETCH_AGAIN,
    check_regular_file,
    parse_checked,
    refuse_lfs_pointer,
)
from phi4mm_export.checkpoint.source import DType
from phi4mm_export.errors import CheckpointError, SystemLimitError
from phi4mm_export.spec.json_fields import is_integer, shown
from phi4mm_export.spec.names import canonical_name, is_recomputed_buffer
from phi4mm_export.spec.on_disk import POINTER_NBYTES

LENGTH_NBYTES = 8
MAX_HEADER_NBYTES = 100_000_000
"""The library's own limit."""
MAX_DIMENSIONS = 8
METADATA = "__metadata__"


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a header; `offset` counts from the start of the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path, label: str) -> tuple[StoredTensor, ...]:
    """The tensors of one file in the order of their bytes; recomputed buffers are left out.

    Raises CheckpointError naming the file (as `label`) for anything that is not a complete, plain
    safetensors file of BF16, F16 or F32 tensors.
    """
    check_regular_file(path, label)
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            entries, start = _parse(file.read(LENGTH_NBYTES + POINTER_NBYTES), file, size, label)
    except PermissionError as err:
        raise SystemLimitError("the file may not be read", where=label, fix="give read permission") from err
    except OSError as err:
        raise CheckpointError(f"reading failed: {err.strerror or err}", where=label, fix=FETCH_AGAIN) from err
    tensors = [_judge(name, entry, start, label) for name, entry in entries.items()]
    _check_extent(tensors, start, size, label)
    _accepted_by_library(path, label)
    return tuple(t for t in tensors if not isinstance(t, _Buffer))


@dataclass(frozen=True)
class _Buffer:
    """An entry that is never read, of whatever type."""

    name: str
    offset: int
    nbytes: int


def _parse(head: bytes, file: Any, size: int, label: str) -> tuple[dict[str, Any], int]:
    """The header's entries without metadata, and the offset at which the data starts."""
    refuse_lfs_pointer(head, size, label)
    if size < LENGTH_NBYTES:
        raise CheckpointError(
            f"the file has {size} bytes, expected at least {LENGTH_NBYTES} of header length",
            where=label,
            fix=FETCH_AGAIN,
        )
    (length,) = struct.unpack("<Q", head[:LENGTH_NBYTES])
    if length > MAX_HEADER_NBYTES:
        text = head[:LENGTH_NBYTES].decode("ascii", "replace")
        looks = f"; it starts with {shown(text)}, so it may be a text or web page" if text.isprintable() else ""
        raise CheckpointError(
            f"not a safetensors file: it states a header of {length} bytes, at most {MAX_HEADER_NBYTES} are allowed"
            + looks,
            where=label,
            fix=FETCH_AGAIN,
        )
    if LENGTH_NBYTES + length > size:
        raise CheckpointError(
            f"the file is cut short: the header alone ends at byte {LENGTH_NBYTES + length}, found {size} bytes",
            where=label,
            fix=FETCH_AGAIN,
        )
    file.seek(LENGTH_NBYTES)
    parsed = parse_checked(file.read(length), label)
    metadata = parsed.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            f"{METADATA} must map text to text, found {shown(metadata)}", where=label, fix=FETCH_AGAIN
        )
    if not parsed:
        raise CheckpointError("the file holds no tensor", where=label, fix=FETCH_AGAIN)
    return parsed, LENGTH_NBYTES + length


def _judge(name: str, entry: Any, start: int, label: str) -> StoredTensor | _Buffer:
    """One header entry as a tensor, or the sentence that says what is wrong with it."""

    def refuse(what: str, fix: str = FETCH_AGAIN) -> CheckpointError:
        return CheckpointError(what, where=f"{label}: {shown(name)}", fix=fix)

    if not _is_plain_name(name):
        raise refuse("tensor names must be dotted words, found one that is empty or looks like a path", "save it anew")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refuse(f"expected dtype, shape and data_offsets, found {shown(entry)}")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(is_integer(d) and d >= 0 for d in shape):
        raise refuse(f"shape must be at most {MAX_DIMENSIONS} lengths, found {shown(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_integer(o) and o >= 0 for o in offsets):
        raise refuse(f"data_offsets must be two byte positions, found {shown(offsets)}")
    nbytes = offsets[1] - offsets[0]
    if is_recomputed_buffer(canonical_name(name)) and nbytes >= 0:
        return _Buffer(name, start + offsets[0], nbytes)
    if not isinstance(dtype, str) or dtype not in DType.__members__:
        raise refuse(
            f"element type {shown(dtype)} is not supported, expected {', '.join(DType)}",
            "if the weights are quantized, export from the checkpoint before quantization; else convert them",
        )
    if 0 in shape:
        raise refuse(f"the tensor is empty: shape {shape}", "save the checkpoint anew without partitioned parameters")
    if math.prod(shape) * DType(dtype).nbytes != nbytes:
        raise refuse(
            f"shape {shape} of {dtype} needs {math.prod(shape) * DType(dtype).nbytes} bytes, data_offsets give {nbytes}"
        )
    return StoredTensor(name, DType(dtype), tuple(shape), start + offsets[0])


def _is_plain_name(name: str) -> bool:
    return bool(name) and name.isprintable() and not set(name) & set("/\\: ") and all(name.split("."))


def _check_extent(tensors: list[StoredTensor | _Buffer], start: int, size: int, label: str) -> None:
    """The tensors follow one another without gap or overlap and end with the file. Sorts `tensors` by offset."""
    tensors.sort(key=lambda t: (t.offset, _nbytes(t), t.name))
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            kind = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise CheckpointError(
                f"{tensor.name} {kind}: expected at byte {end}, found at {tensor.offset}",
                where=f"{label}: {tensor.name}",
                fix=FETCH_AGAIN,
            )
        end += _nbytes(tensor)
    if end != size:
        kind = "is cut short" if size < end else "has bytes after the last tensor"
        raise CheckpointError(
            f"the file {kind}: expected {end} bytes, found {size}",
            where=f"{label}: {tensors[-1].name}",
            fix=FETCH_AGAIN,
        )


def _nbytes(tensor: StoredTensor | _Buffer) -> int:
    if isinstance(tensor, _Buffer):
        return tensor.nbytes
    return math.prod(tensor.shape) * tensor.dtype.nbytes


def _accepted_by_library(path: Path, label: str) -> None:
    """The library's reader must open the file too: it is the judge of the format."""
    try:
        with safetensors.safe_open(path, framework="np"):
            pass
    except safetensors.SafetensorError as err:
        raise CheckpointError(f"safetensors refuses the file: {err}", where=label, fix=FETCH_AGAIN) from err
