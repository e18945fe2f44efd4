"""One graph and its data file: streamed in order, hashed while written, each byte once.

The data file holds the streams' tensors at aligned offsets with zeros between; the graph file holds everything else.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from phi4mm_export.package.resume import Journal, Mark, Resume, identity, journal_path, plan_identity
from phi4mm_export.spec.contract import data_file_name
from phi4mm_export.weights.streams import Band, Stream, TensorSpec
from phi4mm_export.weights.threads import one_blas_thread

PAGE = 4096
"""Offsets are multiples of this where a tensor is at least as large: what memory mapping wants."""
SMALL_ALIGNMENT = 64
CHUNK = 8 << 20
DEFAULT_MEMORY_LIMIT = 256 << 20
"""Bytes of bands in flight when nothing was asked for: two threads are kept busy by a tenth of it."""


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


def place(streams: Iterable[Stream], location: str) -> tuple[dict[str, Placed], int]:
    """Where `write_graph` puts the tensors of these streams in the data file `location`, and that file's size."""
    placed, at = dict[str, Placed](), 0
    for spec in (spec for stream in streams for spec in stream.outputs):
        at += padding_before(spec, at)
        placed[spec.name] = Placed(spec, location, at)
        at += spec.nbytes
    return placed, at


def graph_nbytes(model: ir.Model, placed: Mapping[str, Placed]) -> int:
    """The exact size of the graph file whose tensors lie at `placed`; the model refers there afterwards."""
    _refer(model, placed)
    return int(ir.to_proto(model).ByteSize())


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

    def skip(self, streams: Iterable[Stream], mark: Mark) -> None:
        """Count streams that an earlier run has written already; `mark` is where it ended and what it had hashed."""
        self.placed, self._at = place(streams, self.location)
        self._digest = mark.digest.copy()
        self._on_bytes(self._at)

    def mark(self) -> tuple[int, str]:
        """Bytes written so far, and their sha256 in hex."""
        return self._at, self._digest.copy().hexdigest()

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


@dataclass(frozen=True)
class Effort:
    """How a graph is written; never changes a byte.

    jobs: threads that compute. memory_limit: most bytes of bands in flight, computed or waiting to be written (one
    band is always allowed). resume: where data file and journal are written, to go on from what an earlier run left.
    """

    jobs: int = 1
    memory_limit: int = DEFAULT_MEMORY_LIMIT
    resume: Resume | None = None


def write_graph(
    model: ir.Model,
    streams: Sequence[Stream],
    folder: Path,
    file_name: str,
    *,
    shared: Mapping[str, Placed] | None = None,
    effort: Effort | None = None,
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
        out = _write_data(folder, data_name, streams, effort or Effort(), on_bytes)
        files.append(out.finished(data_name))
        placed |= out.placed
    _refer(model, placed)
    if effort and effort.resume:
        (folder / file_name).unlink(missing_ok=True)
    files.append(write_file(folder, file_name, ir.to_proto(model).SerializeToString(deterministic=True)))
    return WrittenGraph(tuple(files), placed)


def _write_data(
    folder: Path, name: str, streams: Sequence[Stream], effort: Effort, on_bytes: Callable[[int], None]
) -> DataFile:
    """The data file `name`, from its start or from where an earlier run left it."""
    location = Path(name).name
    if effort.resume is None:
        with (folder / name).open("xb", buffering=0) as raw:
            out = DataFile(raw, location, on_bytes)
            _write_streams(out, streams, effort, lambda _count: None)
        return out
    path, content_of = effort.resume.data / name, effort.resume.content_of
    path.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(
        path,
        journal_path(effort.resume.journals, name),
        plan_identity(streams),
        lambda number: identity(streams[number], content_of),
    )
    mark = journal.recover()
    with path.open("r+b" if mark else "xb", buffering=0) as raw:
        out = DataFile(raw, location, on_bytes)
        if mark:
            out.skip(streams[: mark.streams], mark)
            raw.seek(mark.nbytes)
        done = mark.streams if mark else 0
        _write_streams(out, streams[done:], effort, lambda count: journal.note(done + count, *out.mark()))
    return out


def _write_streams(out: DataFile, streams: Sequence[Stream], effort: Effort, on_stream: Callable[[int], None]) -> None:
    """All streams in order; `on_stream` is called with the number of those finished."""
    with contextlib.closing(in_order(streams, effort)) as bands:
        for count, stream in enumerate(streams, 1):
            _write_stream(out, stream, bands)
            on_stream(count)


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


def _write_stream(out: DataFile, stream: Stream, bands: Iterator[Band]) -> None:
    """The first output band by band; the others, which are small, after it."""
    first, *others = stream.outputs
    kept: list[list[NDArray[np.generic]]] = [[] for _ in others]
    out.begin(first)
    for _ in stream.bands():
        band = next(bands)
        out.write(band[0])
        for store, rows in zip(kept, band[1:], strict=True):
            store.append(rows)
    for spec, store in zip(others, kept, strict=True):
        out.begin(spec)
        for rows in store:
            out.write(rows)


def in_order(streams: Sequence[Stream], effort: Effort) -> Generator[Band, None, None]:
    """Bands of all streams in order, computed by threads that run ahead as far as the memory limit allows."""
    work = ((stream, start, stop) for stream in streams for start, stop in stream.bands())
    if effort.jobs <= 1:
        for stream, start, stop in work:
            yield stream.compute(start, stop)
        return
    waiting: deque[tuple[Future[Band], int]] = deque()
    in_flight = 0
    with one_blas_thread(), ThreadPoolExecutor(effort.jobs) as pool:
        try:
            for stream, start, stop in work:
                need = stream.band_nbytes
                while waiting and (len(waiting) > 2 * effort.jobs or in_flight + need > effort.memory_limit):
                    future, nbytes = waiting.popleft()
                    yield future.result()
                    in_flight -= nbytes
                waiting.append((pool.submit(stream.compute, start, stop), need))
                in_flight += need
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            for future, _ in waiting:
                future.cancel()


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
