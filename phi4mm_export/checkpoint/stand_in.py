"""Files that have a checkpoint's headers and sizes but no weights: what a plan or a remote checkpoint is opened from.

A stand-in is a sparse file: the header, then a hole of the tensors' size. Every check that reads headers works on it.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from phi4mm_export.checkpoint.header import LENGTH_NBYTES
from phi4mm_export.checkpoint.source import DType

WEIGHTS_FILE = "model.safetensors"


def header_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: DType = DType.BF16) -> tuple[bytes, int]:
    """The head of a safetensors file with these tensors in this order, and the size of the whole file."""
    entries: dict[str, object] = {}
    at = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * dtype.nbytes
        entries[name] = {"dtype": dtype.value, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_NBYTES)
    return struct.pack("<Q", len(text)) + text, LENGTH_NBYTES + len(text) + at


def write_stand_in(path: Path, head: bytes, nbytes: int) -> None:
    """A file of `nbytes` bytes that begins with `head` and is a hole after it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        _make_sparse(file.fileno())
        file.write(head)
        file.truncate(nbytes)


def _make_sparse(descriptor: int) -> None:
    """Windows gives a file its full size on disk unless it is marked; elsewhere holes need no mark."""
    if sys.platform == "win32":
        import ctypes
        import msvcrt

        set_sparse = 0x900C4  # FSCTL_SET_SPARSE
        handle, returned = msvcrt.get_osfhandle(descriptor), ctypes.c_ulong()
        ctypes.windll.kernel32.DeviceIoControl(handle, set_sparse, None, 0, None, 0, ctypes.byref(returned), None)
