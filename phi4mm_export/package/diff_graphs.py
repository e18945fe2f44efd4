"""Two ONNX graphs side by side: border, operator sets, nodes, attributes, constants and their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from phi4mm_export.errors import PackageError
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.package.diff import Difference, Level
from phi4mm_export.package.diff_values import QuantizedWeight, Weight, same_bytes, value_distance, weight_distance
from phi4mm_export.package.graph_io import TensorIo, graph_io
from phi4mm_export.package.graph_side import QUANTIZED_OPERATORS, GraphSide
from phi4mm_export.package.graph_text import attribute_text

if TYPE_CHECKING:
    import onnx


def compare_graphs(a: Path, file_a: str, b: Path, file_b: str, *, tolerance: float = 0.0) -> Iterator[Difference]:
    """What differs between graph `file_a` of folder `a` and `file_b` of folder `b`."""
    try:
        models = [load_graph(folder / file, where=file) for folder, file in ((a, file_a), (b, file_b))]
    except PackageError as err:
        yield Difference(Level.GRAPH, err.where or file_a, f"cannot be compared: {err.what}")
        return
    label = file_a if file_a == file_b else f"{file_a} / {file_b}"
    yield from _border(models[0], models[1], label)
    yield from _model(models[0], models[1], label)
    sides = [GraphSide(f, (folder / f).parent) for folder, f in ((a, file_a), (b, file_b))]
    for side, model in zip(sides, models, strict=True):
        side.gather(model.graph)
    yield from _nodes(sides[0], sides[1], label)
    yield from _constants(sides[0], sides[1], label, tolerance)


def _border(a: onnx.ModelProto, b: onnx.ModelProto, label: str) -> Iterator[Difference]:
    first, second = graph_io(a.graph), graph_io(b.graph)
    for kind, x, y in (
        ("input", first.inputs, second.inputs),
        ("output", first.outputs, second.outputs),
        ("overridable input", first.overridable, second.overridable),
    ):
        names = ([tensor.name for tensor in x], [tensor.name for tensor in y])
        yield from _named(kind, {t.name: t for t in x}, {t.name: t for t in y}, label)
        if names[0] != names[1] and sorted(names[0]) == sorted(names[1]):
            yield Difference(Level.CONTRACT, label, f"{kind}s in another order", ", ".join(names[0][:8]),
                             ", ".join(names[1][:8]))  # fmt: skip


def _named(kind: str, x: Mapping[str, TensorIo], y: Mapping[str, TensorIo], label: str) -> Iterator[Difference]:
    for name in [*x, *(name for name in y if name not in x)]:
        where = f"{label}: {name}"
        if name not in y:
            yield Difference(Level.CONTRACT, where, f"{kind} only in A", str(x[name]))
        elif name not in x:
            yield Difference(Level.CONTRACT, where, f"{kind} only in B", "", str(y[name]))
        elif x[name] != y[name]:
            yield Difference(Level.CONTRACT, where, f"{kind} of another type or shape", str(x[name]), str(y[name]))


def _model(a: onnx.ModelProto, b: onnx.ModelProto, label: str) -> Iterator[Difference]:
    for key in ("ir_version", "producer_name", "producer_version", "domain", "model_version", "doc_string"):
        if getattr(a, key) != getattr(b, key):
            yield Difference(Level.GRAPH, label, key, str(getattr(a, key))[:80], str(getattr(b, key))[:80])
    for kind, x, y in (
        ("opset", _opsets(a), _opsets(b)),
        ("metadata", {p.key: p.value for p in a.metadata_props}, {p.key: p.value for p in b.metadata_props}),
        ("function", _functions(a), _functions(b)),
    ):
        for key in sorted({*x, *y}):
            if x.get(key) != y.get(key):
                yield Difference(Level.GRAPH, label, f"{kind} {key}", str(x.get(key, "none"))[:80],
                                 str(y.get(key, "none"))[:80])  # fmt: skip


def _opsets(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.domain or "ai.onnx": str(entry.version) for entry in model.opset_import}


def _functions(model: onnx.ModelProto) -> dict[str, str]:
    return {f"{f.domain}::{f.name}": f"{len(f.node)} nodes" for f in model.functions}


def _nodes(a: GraphSide, b: GraphSide, label: str) -> Iterator[Difference]:
    renamed = _renamed(a, b)
    for key, node in a.nodes.items():
        other = b.nodes.get(renamed.get(key, key))
        where = f"{label}: {node.name or key}"
        if other is None:
            yield Difference(Level.NODE, where, "node only in A", _signature(node))
            continue
        if _operator(node) != _operator(other):
            yield Difference(Level.NODE, where, "another operator", _signature(node), _signature(other))
            continue  # its inputs and attributes are another operator's
        for kind in ("input", "output"):
            mine, theirs = list(getattr(node, kind)), list(getattr(other, kind))
            if mine != theirs:
                yield Difference(Level.NODE, where, f"other {kind}s", ", ".join(mine), ", ".join(theirs))
        yield from _attributes(node, other, where)
    found = {renamed.get(key, key) for key in a.nodes}
    for key, node in b.nodes.items():
        if key not in found:
            yield Difference(Level.NODE, f"{label}: {node.name or key}", "node only in B", "", _signature(node))


def _renamed(a: GraphSide, b: GraphSide) -> dict[str, str]:
    """Nodes whose outputs were renamed, found by the name and operator of the node."""
    left = {node.name: key for key, node in a.nodes.items() if key not in b.nodes and node.name}
    right = {node.name: key for key, node in b.nodes.items() if key not in a.nodes and node.name}
    return {left[name]: right[name] for name in left if name in right}


def _attributes(a: onnx.NodeProto, b: onnx.NodeProto, where: str) -> Iterator[Difference]:
    x = {attribute.name: attribute_text(attribute) for attribute in a.attribute}
    y = {attribute.name: attribute_text(attribute) for attribute in b.attribute}
    for name in sorted({*x, *y}):
        if x.get(name) != y.get(name):
            yield Difference(
                Level.ATTRIBUTE, f"{where}.{name}", "attribute differs", x.get(name, "none"), y.get(name, "none")
            )


def _operator(node: onnx.NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else str(node.op_type)


def _signature(node: onnx.NodeProto) -> str:
    text = f"{_operator(node)}({', '.join(node.input)})"
    return text if len(text) <= 120 else f"{text[:117]}..."


def _constants(a: GraphSide, b: GraphSide, label: str, tolerance: float) -> Iterator[Difference]:
    told: set[str] = set()
    for key in a.nodes:
        if key in b.nodes:
            yield from _weights(a, b, key, label, tolerance, told)
    for name in a.constants:
        where = f"{label}: {name}"
        if name in told:
            continue
        if name not in b.constants:
            yield Difference(Level.INITIALIZER, where, "constant only in A", _shape(a.constants[name]))
        else:
            yield from _constant(a, b, name, where, tolerance)
    for name in b.constants:
        if name not in a.constants and name not in told:
            yield Difference(Level.INITIALIZER, f"{label}: {name}", "constant only in B", "", _shape(b.constants[name]))


def _constant(a: GraphSide, b: GraphSide, name: str, where: str, tolerance: float) -> Iterator[Difference]:
    try:
        x, y = a.tensor(name), b.tensor(name)
        if (x.dtype, x.dims) != (y.dtype, y.dims):
            shapes = (_shape(a.constants[name]), _shape(b.constants[name]))
            yield Difference(Level.INITIALIZER, where, "another type or shape", *shapes)
            if x.dims != y.dims:
                return
        elif same_bytes(x, y):
            return
        distance = value_distance(x, y)
    except PackageError as err:
        yield Difference(Level.VALUE, where, f"cannot be compared: {err.what}")
        return
    if not distance.equal:
        unit = "bytes" if x.numpy_type is None or y.numpy_type is None else "values"
        text = f"{distance.differing:,} of {distance.count:,} {unit} differ, by at most {distance.max_abs:.6g}"
        yield Difference(
            Level.VALUE, where, f"{text}, relative L2 {distance.rel_l2:.3g}", figures=distance.as_json(),
            within=distance.rel_l2 <= tolerance,
        )  # fmt: skip


def _weights(
    a: GraphSide, b: GraphSide, key: str, label: str, tolerance: float, told: set[str]
) -> Iterator[Difference]:
    """The weights of a node that is quantized on one side or both, by codes and by what they stand for.

    The constants that make them up are `told`.
    """
    if not any(side.nodes[key].op_type in QUANTIZED_OPERATORS for side in (a, b)):
        return
    where = f"{label}: {a.nodes[key].name or key}"
    try:
        first, second = a.weight(key), b.weight(key)
        if first is None or second is None:
            return
        (x, names_a), (y, names_b) = first, second
        if (x.rows, x.width) != (y.rows, y.width):
            return
        told |= names_a | names_b
        alike = type(x) is type(y) and len(x.parts) == len(y.parts) and _rotation(x) == _rotation(y)
        if alike and all(map(same_bytes, x.parts, y.parts)):
            return
        distance = weight_distance(x, y)
    except PackageError as err:
        yield Difference(Level.VALUE, where, f"cannot be compared: {err.what}")
        return
    if distance.codes is None:
        text = f"{_format(x)} against {_format(y)}"
    else:
        text = f"{distance.differing:,} of {distance.codes:,} codes differ, by at most {distance.steps}"
    values = distance.values
    text += f"; dequantized by at most {values.max_abs:.6g}, relative L2 {values.rel_l2:.3g}"
    yield Difference(Level.VALUE, where, text, figures=distance.as_json(), within=values.rel_l2 <= tolerance)


def _format(weight: Weight) -> str:
    if isinstance(weight, QuantizedWeight):
        mixed = f", mixed in groups of {weight.rotation}" if weight.rotation else ""
        return f"{weight.bits} bits in blocks of {weight.block}{mixed}"
    return weight.values.dtype.lower()


def _rotation(weight: Weight) -> int:
    return weight.rotation if isinstance(weight, QuantizedWeight) else 0


def _shape(tensor: onnx.TensorProto) -> str:
    import onnx

    known: Iterable[int] = onnx.TensorProto.DataType.values()
    kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower() if tensor.data_type in known else "?"
    return f"{kind} [{', '.join(map(str, tensor.dims))}]"
