"""One graph and its data file: streamed in order, hashed while written, each byte once.

The data file holds the streams' tensors at aligned offsets with zeros between; the graph file holds everything else.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from phi4mm_export.spec.contract import data_file_name
from phi4mm_export.weights.streams import Band, Stream, TensorSpec

PAGE = 4096
"""Offsets are multiples of this where a tensor is at least as large: what memory mapping wants."""
SMALL_ALIGNMENT = 64
CHUNK = 8 << 20


@dataclass(frozen=True)
class Placed:
    """Where one tensor lies."""

    spec: TensorSpec
    location: str
    """The data file, relative to the graph's folder."""
    offset: int


@dataclass(frozen=True)
class WrittenFile:
    """A finished file: name relative to the package, size in bytes, sha256 in hex."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class WrittenGraph:
    """The files of one graph and the place of its tensors."""

    files: tuple[WrittenFile, ...]
    placed: Mapping[str, Placed] = field(repr=False)


def padding_before(spec: TensorSpec, at: int) -> int:
    """Zero bytes between the end `at` of what is written and the start of a tensor."""
    return -at % (PAGE if spec.nbytes >= PAGE else SMALL_ALIGNMENT)


def data_nbytes(streams: Iterable[Stream]) -> int:
    """The exact size of the data file that `write_graph` makes of these streams."""
    at = 0
    for spec in (spec for stream in streams for spec in stream.outputs):
        at += padding_before(spec, at) + spec.nbytes
    return at


class DataFile:
    """Appends tensors at aligned offsets and hashes what it writes."""

    def __init__(self, handle: BinaryIO, location: str, on_bytes: Callable[[int], None]) -> None:
        self.location, self.placed = location, dict[str, Placed]()
        self._handle, self._digest, self._at, self._on_bytes = handle, hashlib.sha256(), 0, on_bytes

    def begin(self, spec: TensorSpec) -> None:
        """Pad to the next aligned offset and note the tensor there."""
        self._put(bytes(padding_before(spec, self._at)))
        self.placed[spec.name] = Placed(spec, self.location, self._at)

    def write(self, rows: NDArray[np.generic]) -> None:
        """The next bytes of the tensor begun last, little-endian."""
        self._put(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data if rows.size else b"")

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            count = self._handle.write(view)
            self._digest.update(view[:count])
            view = view[count:]
            self._at += count
            self._on_bytes(count)

    def finished(self, name: str) -> WrittenFile:
        """Size and digest of everything written."""
        return WrittenFile(name, self._at, self._digest.hexdigest())


def write_graph(
    model: ir.Model,
    streams: Sequence[Stream],
    folder: Path,
    file_name: str,
    *,
    shared: Mapping[str, Placed] | None = None,
    jobs: int = 1,
    on_bytes: Callable[[int], None] = lambda _count: None,
) -> WrittenGraph:
    """Write `file_name` below `folder` and, when there are streams, its data file.

    shared: tensors whose bytes lie in another graph's data file already. on_bytes: called with each count of bytes
    written. The model's empty initializers become references to external data.
    """
    (folder / file_name).parent.mkdir(parents=True, exist_ok=True)
    placed: dict[str, Placed] = dict(shared or {})
    files: list[WrittenFile] = []
    if streams:
        data_name = data_file_name(file_name)
        with (folder / data_name).open("xb", buffering=0) as raw:
            out = DataFile(raw, Path(data_name).name, on_bytes)
            for stream in streams:
                _write_stream(out, stream, jobs)
        files.append(out.finished(data_name))
        placed |= out.placed
    _refer(model, placed)
    files.append(write_file(folder, file_name, ir.to_proto(model).SerializeToString(deterministic=True)))
    return WrittenGraph(tuple(files), placed)


def write_file(folder: Path, name: str, data: bytes) -> WrittenFile:
    """One small file of the package, whole."""
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as handle:
        handle.write(data)
    return WrittenFile(name, len(data), hashlib.sha256(data).hexdigest())


def hashed(folder: Path, name: str) -> WrittenFile:
    """Size and digest of a file that another library wrote."""
    with (folder / name).open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return WrittenFile(name, (folder / name).stat().st_size, digest)


def _write_stream(out: DataFile, stream: Stream, jobs: int) -> None:
    """The first output band by band; the others, which are small, after it."""
    first, *others = stream.outputs
    kept: list[list[NDArray[np.generic]]] = [[] for _ in others]
    out.begin(first)
    for band in in_order(stream, jobs):
        out.write(band[0])
        for store, rows in zip(kept, band[1:], strict=True):
            store.append(rows)
    for spec, store in zip(others, kept, strict=True):
        out.begin(spec)
        for rows in store:
            out.write(rows)


def in_order(stream: Stream, jobs: int) -> Iterator[Band]:
    """Bands of a stream in order, computed by `jobs` threads that run at most one band each ahead."""
    bands = stream.bands()
    if jobs <= 1 or len(bands) == 1:
        for start, stop in bands:
            yield stream.compute(start, stop)
        return
    waiting: deque[Future[Band]] = deque()
    with ThreadPoolExecutor(jobs) as pool:
        for start, stop in bands:
            waiting.append(pool.submit(stream.compute, start, stop))
            if len(waiting) > jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _refer(model: ir.Model, placed: Mapping[str, Placed]) -> None:
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            at = placed[name]
            spec = at.spec
            value.const_value = ir.ExternalTensor(
                at.location,
                at.offset,
                spec.nbytes,
                spec.dtype,
                shape=value.shape if isinstance(value.shape, ir.Shape) else ir.Shape(spec.shape),
                name=name,
            )
