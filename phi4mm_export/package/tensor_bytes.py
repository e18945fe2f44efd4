"""The bytes of a constant tensor, inside a graph or in a data file, read in pieces of bounded size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import PackageError
from phi4mm_export.spec.on_disk import is_file, real_path

if TYPE_CHECKING:
    import onnx

CHUNK = 4 << 20
_SUB_BYTE = {"INT4": 4, "UINT4": 4, "INT2": 2, "UINT2": 2, "FLOAT4E2M1": 4}
"""Element types of which several share a byte."""


@dataclass(frozen=True)
class TensorBytes:
    """One tensor. `place` is its name in messages; `dtype` is ONNX's name; `path` is None for inline bytes."""

    name: str
    place: str
    dtype: str
    dims: tuple[int, ...]
    path: Path | None
    offset: int
    nbytes: int
    inline: bytes = field(default=b"", repr=False)

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.dims)

    @property
    def numpy_type(self) -> np.dtype[Any] | None:
        """The numpy type of a value; None where several share a byte, or for text."""
        import onnx

        if self.dtype in _SUB_BYTE or self.dtype == "STRING":
            return None
        kind = onnx.TensorProto.DataType.Value(self.dtype)
        found: np.dtype[Any] = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        return found.newbyteorder("<")

    def require_file(self) -> None:
        """Raise PackageError for a data file that is missing or ends before the tensor does; nothing is read."""
        if self.path is None:
            return
        if not is_file(self.path):
            raise PackageError(f"the data file {self.path.name} is missing", where=self.place)
        if self.path.stat().st_size < self.offset + self.nbytes:
            raise PackageError(f"the data file {self.path.name} ends before the tensor does", where=self.place)

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from `start`. Raises PackageError for a data file that is missing or ends early."""
        if self.path is None:
            return self.inline[start : start + count]
        if not is_file(self.path):  # a pipe would be waited for
            raise PackageError(f"the data file {self.path.name} is missing", where=self.place)
        data = bytearray()
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset + start)
            while len(data) < count and (piece := file.read(count - len(data))):
                data += piece
        if len(data) < count:
            raise PackageError(f"the data file {self.path.name} ends before the tensor does", where=self.place)
        return bytes(data)

    def chunks(self, nbytes: int = CHUNK) -> Iterator[tuple[int, bytes]]:
        """(start, bytes) from beginning to end, each at most `nbytes`."""
        for start in range(0, self.nbytes, nbytes):
            yield start, self.read(start, min(nbytes, self.nbytes - start))

    def rows(self, start: int, stop: int, width: int) -> NDArray[Any]:
        """Rows of `width` values each as [stop - start, width] in the stored type."""
        kind = self.numpy_type
        if kind is None:
            raise PackageError(f"{self.dtype} values share bytes and have no rows", where=self.place)
        size = kind.itemsize * width
        return np.frombuffer(self.read(start * size, (stop - start) * size), kind).reshape(stop - start, width)

    def columns(self, start: int, stop: int, width: int) -> NDArray[Any]:
        """Part of every row of `width` values, [rows, stop - start] in the stored type; of a file only that is read."""
        kind = self.numpy_type
        if kind is None:
            raise PackageError(f"{self.dtype} values share bytes and have no columns", where=self.place)
        found = np.empty((self.elements // width, stop - start), kind)
        if self.path is None:
            found[:] = np.frombuffer(self.inline, kind).reshape(-1, width)[:, start:stop]
            return found
        if not is_file(self.path):
            raise PackageError(f"the data file {self.path.name} is missing", where=self.place)
        with self.path.open("rb", buffering=0) as file:
            for number, row in enumerate(found):
                file.seek(self.offset + (number * width + start) * kind.itemsize)
                if file.readinto(row.view(np.uint8).data) != row.nbytes:
                    raise PackageError(f"the data file {self.path.name} ends before the tensor does", where=self.place)
        return found

    def sha256(self) -> str:
        """Digest of all bytes."""
        digest = hashlib.sha256()
        for _, data in self.chunks():
            digest.update(data)
        return digest.hexdigest()


def tensor_bytes(tensor: onnx.TensorProto, folder: Path, place: str) -> TensorBytes:
    """Where the bytes of a tensor lie; nothing is read yet.

    folder: that of the graph. Raises PackageError for data outside the folder and headers that cannot be right.
    """
    import onnx

    known = tensor.data_type in onnx.TensorProto.DataType.values()
    dtype = onnx.TensorProto.DataType.Name(tensor.data_type) if known else "UNDEFINED"
    dims = tuple(tensor.dims)
    if dtype == "UNDEFINED" or any(dim < 0 for dim in dims):
        raise PackageError("a constant without a known type or with a negative dim", where=place)
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        data = _inline(tensor, place)
        return TensorBytes(tensor.name, place, dtype, dims, None, 0, len(data), data)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    windows = PureWindowsPath(location)
    if not location or PurePosixPath(location).is_absolute() or windows.drive or windows.root or ".." in windows.parts:
        raise PackageError(f"expected a data file inside the package, found {location!r}", where=place)
    if dtype == "STRING":
        raise PackageError("text cannot lie in a data file", where=place)
    itemsize = int(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize)
    nbytes = math.prod(dims) * itemsize
    if dtype in _SUB_BYTE:
        nbytes = -(-math.prod(dims) * _SUB_BYTE[dtype] // 8)
    try:
        offset, stated = int(entries.get("offset") or 0), int(entries.get("length") or nbytes)
    except ValueError as err:
        raise PackageError("offset or length of external data is no number", where=place) from err
    if offset < 0 or offset + nbytes >= 2**63 or stated != nbytes:
        raise PackageError(f"expected {nbytes:,} bytes of external data, found {stated:,} at {offset:,}", where=place)
    return TensorBytes(tensor.name, place, dtype, dims, folder / location, offset, nbytes)


def safe_bytes(tensor: onnx.TensorProto, graph: Path, place: str) -> TensorBytes:
    """`tensor_bytes` of a tensor of the graph file `graph`, whose data file lies where it may.

    Hard links are files like any other (the onnx library refuses them); a symbolic link may lead where the graph lies,
    or where the graph's own link leads. Raises PackageError as `tensor_bytes`, and for other links.
    """
    source = tensor_bytes(tensor, graph.parent, place)
    homes = (real_path(graph.parent), real_path(graph).parent)
    if source.path is not None and not any(real_path(source.path).is_relative_to(home) for home in homes):
        raise PackageError(f"the data file {source.path.name} is a link that leaves the folder", where=place)
    return source


def inlined(tensor: onnx.TensorProto, graph: Path, place: str) -> onnx.TensorProto:
    """The tensor with its bytes inside: itself, or a copy that no longer refers to a data file.

    graph: the .onnx file. Raises PackageError as `safe_bytes` and `read`.
    """
    import onnx

    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return tensor
    source = safe_bytes(tensor, graph, place)
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    del copy.external_data[:]
    copy.data_location = onnx.TensorProto.DEFAULT
    copy.raw_data = source.read(0, source.nbytes)
    return copy


def _inline(tensor: onnx.TensorProto, place: str) -> bytes:
    import onnx

    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    if tensor.data_type == onnx.TensorProto.STRING:
        return b"\0".join(tensor.string_data)
    try:
        return bytes(onnx.numpy_helper.to_array(tensor).tobytes())
    except (ValueError, TypeError, KeyError) as err:
        raise PackageError(f"the values do not fit dims and type: {err}", where=place) from err
