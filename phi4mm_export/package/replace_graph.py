"""A whole new package in which one graph is replaced: every other file is copied, and no graph loses its bytes.

A graph that keeps tensors in the replaced graph's data file (the embedding, whose table may be the decoder's head) gets
its own copy of them in its own data file: the replaced graph's file is not carried over.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

from phi4mm_export.errors import PackageError, some
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.package.file_names import is_left_over
from phi4mm_export.package.manifest import check_names
from phi4mm_export.package.write import CHUNK, PAGE, SMALL_ALIGNMENT
from phi4mm_export.spec.contract import data_file_name
from phi4mm_export.spec.on_disk import is_file

if TYPE_CHECKING:
    import onnx

DESCRIPTIONS = frozenset({"phi4mm.json", "SHA256SUMS", "README.md"})
"""Files that describe the whole package: what they say does not hold for the new one."""


@dataclass(frozen=True)
class CopyPlan:
    """What becomes of each file of a package, names relative to it.

    `copied` go over as they are; `detached` are graphs that get an own copy of tensors they kept in the replaced
    graph's data; `dropped` belong to the replaced graph alone, or describe the package.
    """

    package: Path
    graph: str
    copied: tuple[str, ...]
    detached: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take, at most."""
        names = {*self.copied, *(n for graph in self.detached for n in (graph, *data_files(self.package, graph)))}
        return sum((self.package / name).stat().st_size for name in names)


def plan_copy(package: Path, graph: str) -> CopyPlan:
    """Sort the files of a package in which `graph` is to be replaced.

    What downloads and operating systems left in the package is no part of it. Raises PackageError for a data file that
    a graph names and the package lacks, or one outside the package, and for file names that no package may have.
    """
    names = sorted(name for name in _files(package) if not is_left_over(name))
    check_names(name for name in names if name not in DESCRIPTIONS)
    if graph not in names:
        raise PackageError("the graph file is missing", where=graph)
    data_of = {name: data_files(package, name) for name in names if name.endswith(".onnx")}
    own = data_of.pop(graph) | {data_file_name(graph)}
    detached = tuple(name for name, files in data_of.items() if files & own)
    needed = {file for name, files in data_of.items() if name not in detached for file in files}
    dropped = {graph, *DESCRIPTIONS} | ((own | {f for name in detached for f in data_of[name]}) - needed)
    copied = tuple(name for name in names if name not in dropped and name not in detached)
    return CopyPlan(package, graph, copied, detached, tuple(sorted(dropped & set(names))))


def copy_files(plan: CopyPlan, folder: Path) -> tuple[str, ...]:
    """Carry out a plan in the new package's folder: the names of the files written."""
    written: list[str] = []
    for name in plan.copied:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(plan.package / name, folder / name)
        written.append(name)
    for name in plan.detached:
        written += detach(plan.package, name, folder)
    return tuple(written)


def data_files(package: Path, graph: str) -> set[str]:
    """The data files that a graph's tensors name, relative to the package.

    Raises PackageError for names that lead out of the package and for files that do not hold all of a tensor.
    """
    found: dict[str, int] = {}
    for tensor in external_tensors(load_graph(package / graph, where=graph)):
        name, offset, length = _place(tensor, graph)
        found[name] = max(found.get(name, 0), offset + length)
    missing = [f"{name} ({end:,} bytes)" for name, end in sorted(found.items()) if _nbytes(package / name) < end]
    if missing:
        raise PackageError(
            f"expected the data files {some(missing)}, found them missing or shorter",
            where=graph,
            fix="copy the whole package again",
        )
    return set(found)


def detach(package: Path, graph: str, folder: Path) -> tuple[str, str]:
    """Write a graph with all its external tensors in its own data file: the names of the two files."""
    model = load_graph(package / graph, where=graph)
    data_name = data_file_name(graph)
    (folder / graph).parent.mkdir(parents=True, exist_ok=True)
    placed: dict[tuple[str, int, int], int] = {}
    with (folder / data_name).open("xb") as out:
        for tensor in external_tensors(model):
            place = _place(tensor, graph)
            if place not in placed:
                step = PAGE if place[2] >= PAGE else SMALL_ALIGNMENT
                out.write(bytes(-out.tell() % step))
                placed[place] = out.tell()
                _copy_range(package / place[0], place[1], place[2], out)
            del tensor.external_data[:]
            for key, value in (
                ("location", PurePosixPath(data_name).name),
                ("offset", str(placed[place])),
                ("length", str(place[2])),
            ):
                tensor.external_data.add(key=key, value=value)
    with (folder / graph).open("xb") as file:
        file.write(model.SerializeToString(deterministic=True))
    return graph, data_name


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model whose bytes lie in another file: initializers and attributes, at any depth."""
    import onnx

    for tensor in _tensors(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield tensor
    for function in model.functions:
        for tensor in _node_tensors(function.node):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                yield tensor


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _tensors(graph)


def _place(tensor: onnx.TensorProto, graph: str) -> tuple[str, int, int]:
    """Data file relative to the package, offset and length of an external tensor."""
    import onnx

    entries = {entry.key: entry.value for entry in tensor.external_data}
    name = PurePosixPath(os.path.normpath(PurePosixPath(graph).parent / entries.get("location", ""))).as_posix()
    if not entries.get("location") or name.startswith("..") or PurePosixPath(name).is_absolute():
        raise PackageError(
            f"expected a data file inside the package, found {entries.get('location')!r}",
            where=f"{graph}: {tensor.name}",
        )
    width = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    whole = width
    for dim in tensor.dims:
        whole *= dim
    try:
        return name, int(entries.get("offset", "0")), int(entries.get("length", whole))
    except ValueError as err:
        raise PackageError("offset or length is no number", where=f"{graph}: {tensor.name}") from err


def _nbytes(path: Path) -> int:
    return path.stat().st_size if is_file(path) else -1


def _copy_range(source: Path, offset: int, length: int, out: BinaryIO) -> None:
    with source.open("rb") as file:
        file.seek(offset)
        left = length
        while left:
            chunk = file.read(min(CHUNK, left))
            if not chunk:
                raise PackageError(f"the file ends {left:,} bytes too early", where=source.name)
            out.write(chunk)
            left -= len(chunk)


def _files(package: Path) -> Iterator[str]:
    for root, folders, files in os.walk(package):
        folders.sort()
        for name in sorted(files):
            yield (Path(root) / name).relative_to(package).as_posix()
