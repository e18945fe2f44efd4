"""One stored tensor, read in pieces of bounded size.

A plain positioned read is used instead of safetensors' mapped file: mapped pages count into the resident set,
and a file that shrinks under a mapping ends the process with a bus error instead of a message.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import CheckpointError

Array = NDArray[Any]


class DType(StrEnum):
    """Element types of stored weights, as safetensors spells them; nothing else is accepted."""

    BF16 = "BF16"
    F16 = "F16"
    F32 = "F32"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The little-endian numpy type (ml_dtypes.bfloat16, float16 or float32)."""
        return _NUMPY[self]

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return self.numpy.itemsize


_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.F16: np.dtype("<f2"),
    DType.F32: np.dtype("<f4"),
}


class ShardFile:
    """An open shard: positioned reads from any thread, until it is closed.

    Every read checks that the file has the size and modification time it had when it was opened. `label` is the
    name errors show: the path below the checkpoint. `stated_digest` is set where the file need not be read to know
    its content (a server states its sha256).
    """

    stated_digest: str | None = None

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._opened_as = self._identity()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Size of the file when it was opened."""
        return self._opened_as[0]

    def close(self) -> None:
        """Close the descriptor; later reads are errors. Closing twice does nothing."""
        self._close()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        Raises CheckpointError naming the file if it ends early, changed since it was opened, or is closed.
        """
        if not self._close.alive:
            raise CheckpointError(
                "the checkpoint was closed before this read", where=self.label, fix="read inside the with block"
            )
        done = 0
        try:
            while done < len(buffer):
                count = self._read_once(buffer[done:], offset + done)
                if count == 0:
                    break
                done += count
        except OSError as err:
            raise CheckpointError(
                f"reading {len(buffer)} bytes at {offset} failed: {err.strerror or err}",
                where=self.label,
                fix="check the disk, or fetch the file again",
            ) from err
        if done < len(buffer) or self._identity() != self._opened_as:
            size, _ = self._identity()
            raise CheckpointError(
                f"the file changed while it was read: opened with {self.nbytes} bytes, now {size}; "
                f"{done} of {len(buffer)} bytes came from offset {offset}",
                where=self.label,
                fix="let the download or save finish, then run again",
            )

    def _read_once(self, buffer: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._descriptor, [buffer], offset)
        with self._lock:  # Windows: one shared file position
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            piece = os.read(self._descriptor, len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def _identity(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


OpenShard = Callable[[Path, str], ShardFile]
"""Opens one file of weights, given its path and its name in errors."""


@dataclass(frozen=True)
class TensorSource:
    """One stored tensor; reads nothing until asked and keeps nothing.

    `name` is canonical, `stored_name` as the file spells it; `file` is the shard as the checkpoint names it (a
    link, not its target); `offset` counts bytes from the start of the file.
    """

    name: str
    stored_name: str
    file: Path
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    shard: ShardFile = field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.nbytes

    @property
    def where(self) -> str:
        """File and stored name, as errors show them."""
        return f"{self.shard.label}: {self.stored_name}"

    @property
    def row_size(self) -> int:
        """Values in one row: the product of all dimensions but the first."""
        return math.prod(self.shape[1:])

    @property
    def row_count(self) -> int:
        """Length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def rows(self, start: int, stop: int) -> Array:
        """Rows `start` to `stop` as [stop - start, product of the other dimensions] in the stored type.

        Reads only those rows. Thread-safe. Raises CheckpointError if the file changed or was closed.
        """
        if not 0 <= start <= stop <= self.row_count:
            raise IndexError(f"rows {start}:{stop} of {self.row_count}")
        values = np.empty((stop - start, self.row_size), self.dtype.numpy)
        if values.size:
            row_nbytes = self.row_size * self.dtype.nbytes
            self.shard.read_into(values.reshape(-1).view(np.uint8).data, self.offset + start * row_nbytes)
        return values

    def whole(self) -> Array:
        """All values in the stored shape and type."""
        return self.rows(0, self.row_count).reshape(self.shape)
