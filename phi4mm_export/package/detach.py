"""A graph whose tensors lie in another graph's data file, given a data file of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from phi4mm_export.errors import PackageError
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.package.write import PAGE, WrittenFile, write_file
from phi4mm_export.spec.contract import data_file_name

if TYPE_CHECKING:
    import onnx

CHUNK = 8 << 20


def detach_data(package: Path, graph: str, folder: Path) -> list[WrittenFile]:
    """Copy `graph` of `package` into `folder` with every external tensor in its own `NAME.onnx.data`.

    The values stay; only where they lie changes. Raises PackageError for a data file that is missing or too short.
    """
    model = load_graph(package / graph, where=graph)
    name = data_file_name(graph)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    digest, at = hashlib.sha256(), 0
    with (folder / name).open("xb") as out:
        for tensor in _external(model.graph):
            entries = {entry.key: entry.value for entry in tensor.external_data}
            source = (package / graph).parent / entries["location"]
            padding = bytes(-at % PAGE)
            start = at + len(padding)
            for piece in _pieces(source, entries, padding, f"{graph}: {tensor.name}"):
                out.write(piece)
                digest.update(piece)
                at += len(piece)
            del tensor.external_data[:]
            for key, value in (("location", Path(name).name), ("offset", start), ("length", at - start)):
                tensor.external_data.add(key=key, value=str(value))
    data = WrittenFile(name, at, digest.hexdigest())
    return [data, write_file(folder, graph, model.SerializeToString(deterministic=True))]


def detached_nbytes(package: Path, graph: str) -> int:
    """The size of the data file that `detach_data` makes. Raises PackageError for a graph that cannot be read."""
    at = 0
    for tensor in _external(load_graph(package / graph, where=graph).graph):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        at += -at % PAGE + int(entries.get("length", "0"))
    return at


def _external(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    for tensor in graph.initializer:
        if tensor.external_data:
            yield tensor


def _pieces(source: Path, entries: dict[str, str], padding: bytes, where: str) -> Iterator[bytes]:
    """The padding, then the tensor's bytes in pieces."""
    yield padding
    offset = int(entries.get("offset", "0"))
    try:
        left = int(entries.get("length", source.stat().st_size - offset))
        with source.open("rb") as handle:
            handle.seek(offset)
            while left:
                piece = handle.read(min(CHUNK, left))
                if not piece:
                    raise PackageError(f"{source.name} ends {left:,} bytes before the tensor does", where=where)
                left -= len(piece)
                yield piece
    except FileNotFoundError as err:
        raise PackageError(f"the data file {source.name} is missing", where=where) from err
