"""Two ONNX graphs side by side: border, operator sets, nodes, attributes, constants and their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from phi4mm_export.errors import PackageError
from phi4mm_export.package.diff import Difference, Level
from phi4mm_export.package.diff_values import (
    QuantizedWeight,
    quantized_distance,
    same_bytes,
    value_distance,
)
from phi4mm_export.package.graph_io import TensorIo, graph_io, load_graph
from phi4mm_export.package.graph_text import attribute_text
from phi4mm_export.package.tensor_bytes import TensorBytes, tensor_bytes

if TYPE_CHECKING:
    import onnx

SCOPE = " > "
"""Between a node and what lies inside its subgraphs, in keys and messages."""
QUANTIZED_OPERATORS = ("MatMulNBits", "GatherBlockQuantized")


@dataclass
class _Side:
    """One graph, its subgraphs included: nodes by a stable key, constants by name."""

    file: str
    folder: Path
    nodes: dict[str, onnx.NodeProto] = field(default_factory=dict)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)

    def tensor(self, name: str) -> TensorBytes:
        """Where a constant's bytes lie. Raises PackageError for headers that cannot be right."""
        return tensor_bytes(self.constants[name], self.folder, f"{self.file}: {name}")


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
    sides = [_Side(f, (folder / f).parent) for folder, f in ((a, file_a), (b, file_b))]
    for side, model in zip(sides, models, strict=True):
        _gather(model.graph, "", side)
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


def _gather(graph: onnx.GraphProto, prefix: str, side: _Side) -> None:
    """Nodes keyed by their first output, which is unique in a graph; constants by name, subgraphs by their node."""
    for tensor in graph.initializer:
        side.constants[prefix + tensor.name] = tensor
    for index, node in enumerate(graph.node):
        key = prefix + next((name for name in node.output if name), f"node {index}")
        side.nodes[key] = node
        for attribute in node.attribute:
            if attribute.HasField("t"):
                side.constants[f"{key}.{attribute.name}"] = attribute.t
            if attribute.HasField("g"):
                _gather(attribute.g, f"{key}{SCOPE}{attribute.name}{SCOPE}", side)


def _nodes(a: _Side, b: _Side, label: str) -> Iterator[Difference]:
    renamed = _renamed(a, b)
    for key, node in a.nodes.items():
        other = b.nodes.get(renamed.get(key, key))
        where = f"{label}: {node.name or key}"
        if other is None:
            yield Difference(Level.NODE, where, "node only in A", _signature(node))
            continue
        if _operator(node) != _operator(other):
            yield Difference(Level.NODE, where, "another operator", _signature(node), _signature(other))
        for kind in ("input", "output"):
            mine, theirs = list(getattr(node, kind)), list(getattr(other, kind))
            if mine != theirs:
                yield Difference(Level.NODE, where, f"other {kind}s", ", ".join(mine), ", ".join(theirs))
        yield from _attributes(node, other, where)
    found = {renamed.get(key, key) for key in a.nodes}
    for key, node in b.nodes.items():
        if key not in found:
            yield Difference(Level.NODE, f"{label}: {node.name or key}", "node only in B", "", _signature(node))


def _renamed(a: _Side, b: _Side) -> dict[str, str]:
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


def _constants(a: _Side, b: _Side, label: str, tolerance: float) -> Iterator[Difference]:
    told: set[str] = set()
    for key in a.nodes:
        if key in b.nodes:
            yield from _quantized(a, b, key, label, tolerance, told)
    for name in a.constants:
        where = f"{label}: {name}"
        if name not in b.constants:
            yield Difference(Level.INITIALIZER, where, "constant only in A", _shape(a.constants[name]))
        elif name not in told:
            yield from _constant(a, b, name, where, tolerance)
    for name in b.constants:
        if name not in a.constants:
            yield Difference(Level.INITIALIZER, f"{label}: {name}", "constant only in B", "", _shape(b.constants[name]))


def _constant(a: _Side, b: _Side, name: str, where: str, tolerance: float) -> Iterator[Difference]:
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


def _quantized(a: _Side, b: _Side, key: str, label: str, tolerance: float, told: set[str]) -> Iterator[Difference]:
    """The weights of a node that is quantized on both sides, by code; their tensors are `told`."""
    nodes = (a.nodes[key], b.nodes[key])
    if any(node.op_type not in QUANTIZED_OPERATORS for node in nodes):
        return
    where = f"{label}: {nodes[0].name or key}"
    prefix = key.rpartition(SCOPE)[0] + SCOPE if SCOPE in key else ""
    try:
        x, y = _quantized_weight(nodes[0], a, prefix), _quantized_weight(nodes[1], b, prefix)
        if x is None or y is None or (x.rows, x.width) != (y.rows, y.width):
            return
        names = {part.name for part in x.parts} & {part.name for part in y.parts}
        told |= {found for found in (_found(a, prefix, name) for name in names) if found}
        if len(x.parts) == len(y.parts) and all(same_bytes(*pair) for pair in zip(x.parts, y.parts, strict=True)):
            return
        distance = quantized_distance(x, y)
    except PackageError as err:
        yield Difference(Level.VALUE, where, f"cannot be compared: {err.what}")
        return
    if distance.codes is None:
        text = f"quantized weights of {x.bits} and {y.bits} bits in blocks of {x.block} and {y.block}"
    else:
        text = f"{distance.differing:,} of {distance.codes:,} codes differ, by at most {distance.steps}"
    values = distance.values
    text += f"; dequantized by at most {values.max_abs:.6g}, relative L2 {values.rel_l2:.3g}"
    yield Difference(
        Level.VALUE,
        where,
        text,
        figures=distance.as_json(),
        within=values.rel_l2 <= tolerance,
    )


def _quantized_weight(node: onnx.NodeProto, side: _Side, prefix: str) -> QuantizedWeight | None:
    """The weight of a MatMulNBits or GatherBlockQuantized node, None where a part of it is no constant.

    Raises PackageError for headers that cannot be right.
    """
    values = {attribute.name: attribute.i for attribute in node.attribute}
    names = [_found(side, prefix, name) if name else None for name in node.input]
    bits, block = values.get("bits", 4), values.get("block_size", 128)
    matmul = node.op_type == "MatMulNBits"
    order = (1, 2, 3) if matmul else (0, 2, 3)
    code_name, scale_name = (names[i] if i < len(names) else None for i in order[:2])
    has_zeros = len(names) > order[2] and bool(node.input[order[2]])
    zero_name = names[order[2]] if has_zeros else None
    if code_name is None or scale_name is None or (has_zeros and zero_name is None) or bits not in (4, 8):
        return None
    codes, scales = side.tensor(code_name), side.tensor(scale_name)
    if codes.dtype != "UINT8":
        return None
    if matmul:
        rows, width = values.get("N", 0), values.get("K", 0)
    else:
        rows, width = codes.dims[0], codes.dims[-1] * (8 // bits)
    weight = QuantizedWeight(rows, width, bits, block, codes, scales, side.tensor(zero_name) if zero_name else None)
    fits = min(rows, width, block) > 0 and codes.nbytes == rows * weight.blocks * block * bits // 8
    return weight if fits and scales.elements == rows * weight.blocks else None


def _found(side: _Side, prefix: str, name: str) -> str | None:
    """A constant seen from inside a subgraph: its own, else that of a graph around it."""
    while True:
        if prefix + name in side.constants:
            return prefix + name
        if not prefix:
            return None
        outer = prefix.removesuffix(SCOPE).rpartition(SCOPE)[0].rpartition(SCOPE)[0]
        prefix = f"{outer}{SCOPE}" if outer else ""


def _shape(tensor: onnx.TensorProto) -> str:
    import onnx

    known: Iterable[int] = onnx.TensorProto.DataType.values()
    kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower() if tensor.data_type in known else "?"
    return f"{kind} [{', '.join(map(str, tensor.dims))}]"
