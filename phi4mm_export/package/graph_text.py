"""A canonical text of a graph or a package, one fact a line, for people and for `git diff` (textconv)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from phi4mm_export.errors import PackageError
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.package.graph_io import graph_io
from phi4mm_export.package.scan import EntryKind, scan
from phi4mm_export.package.tensor_bytes import tensor_bytes
from phi4mm_export.spec.on_disk import is_file

if TYPE_CHECKING:
    import onnx

MOST_SHOWN = 16
"""Constants of up to this many values are written out; of larger ones the digest."""


def package_text(package: Path) -> Iterator[str]:
    """Files with size and digest, then the text of every graph."""
    names = [name for name, entry in scan(package).items() if entry.kind is EntryKind.FILE]
    for name in names:
        with (package / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        yield f"file {name} {(package / name).stat().st_size} sha256 {digest}"
    for name in names:
        if name.endswith(".onnx"):
            yield from graph_text(package / name, name)


def graph_text(path: Path, label: str) -> Iterator[str]:
    """The text of one .onnx file. Data files beside it are digested where they exist.

    Raises PackageError for bytes that are no ONNX model.
    """
    model = load_graph(path, where=label)
    yield f"graph {label}"
    yield f"ir_version {model.ir_version}"
    yield f"producer {model.producer_name} {model.producer_version}".rstrip()
    for entry in sorted(model.opset_import, key=lambda entry: entry.domain):
        yield f"opset {entry.domain or 'ai.onnx'} {entry.version}"
    for item in sorted(model.metadata_props, key=lambda item: item.key):
        yield f"metadata {item.key} = {item.value!r}"
    border = graph_io(model.graph)
    for kind, tensors in (("input", border.inputs), ("overridable", border.overridable), ("output", border.outputs)):
        for tensor in tensors:
            yield f"{kind} {tensor}"
    yield from _graph_lines(model.graph, path.parent, "", label)
    for function in sorted(model.functions, key=lambda function: (function.domain, function.name)):
        yield f"function {function.domain}::{function.name}({', '.join(function.input)})"
        for node in function.node:
            yield from _node_lines(node, path.parent, "  ", label)


def attribute_text(attribute: onnx.AttributeProto) -> str:
    """An attribute's value on one line; a graph is its count of nodes, a tensor its type, shape and digest."""
    import onnx

    kinds = onnx.AttributeProto
    if attribute.type == kinds.FLOAT:
        return f"{attribute.f!r}"
    if attribute.type == kinds.INT:
        return str(attribute.i)
    if attribute.type == kinds.STRING:
        return repr(attribute.s.decode("utf-8", "backslashreplace"))
    if attribute.type in (kinds.FLOATS, kinds.INTS):
        values = attribute.floats if attribute.type == kinds.FLOATS else attribute.ints
        return f"[{', '.join(map(str, values))}]"
    if attribute.type == kinds.STRINGS:
        return str([text.decode("utf-8", "backslashreplace") for text in attribute.strings])
    if attribute.type == kinds.GRAPH:
        return f"graph of {len(attribute.g.node)} nodes"
    if attribute.type == kinds.TENSOR:
        return _shape(attribute.t)
    return str(kinds.AttributeType.Name(attribute.type)).lower()


def _graph_lines(graph: onnx.GraphProto, folder: Path, indent: str, label: str) -> Iterator[str]:
    for tensor in sorted(graph.initializer, key=lambda tensor: tensor.name):
        yield f"{indent}constant {tensor.name}: {_shape(tensor)} {_content(tensor, folder, label)}"
    for node in graph.node:
        yield from _node_lines(node, folder, indent, label)


def _node_lines(node: onnx.NodeProto, folder: Path, indent: str, label: str) -> Iterator[str]:
    operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    yield f"{indent}node {node.name}: {', '.join(node.output)} = {operator}({', '.join(node.input)})"
    for attribute in sorted(node.attribute, key=lambda attribute: attribute.name):
        content = f" {_content(attribute.t, folder, label)}" if attribute.HasField("t") else ""
        yield f"{indent}  {attribute.name} = {attribute_text(attribute)}{content}"
        if attribute.HasField("g"):
            yield from _graph_lines(attribute.g, folder, f"{indent}    ", label)


def _shape(tensor: onnx.TensorProto) -> str:
    import onnx

    known = tensor.data_type in onnx.TensorProto.DataType.values()
    kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower() if known else f"type {tensor.data_type}"
    return f"{kind} [{', '.join(map(str, tensor.dims))}]"


def _content(tensor: onnx.TensorProto, folder: Path, label: str) -> str:
    """The values of a small constant, the digest of a large one, the place of one whose data file is not there."""
    try:
        found = tensor_bytes(tensor, folder, f"{label}: {tensor.name}")
        kind = found.numpy_type
        if kind is not None and found.elements <= MOST_SHOWN:
            return str(found.rows(0, 1, found.elements)[0].tolist())
        if found.path is not None and not is_file(found.path):
            return f"in {found.path.name} at {found.offset}, {found.nbytes} bytes"
        return f"sha256 {found.sha256()}"
    except PackageError as err:
        return f"unreadable: {err.what}"
