"""Constants that enter a product in a place where they cannot be quantized: computed, sparse, left, inside functions.

They stay in float, and the report has to say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phi4mm_export.quant.graph import Graph, names_read, subgraphs

if TYPE_CHECKING:
    import onnx

MATRIX_RANK = 2


@dataclass(frozen=True)
class HiddenWeight:
    """A constant that a product uses, and why it stays as it is."""

    tensor: onnx.TensorProto
    reason: str


class HiddenWeights:
    """Looks for them behind the products of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._producer = {name: node for node in graph.nodes for name in node.output if name}
        self._sparse = {tensor.values.name: tensor for tensor in graph.model.graph.sparse_initializer}

    def of(self, node: onnx.NodeProto) -> HiddenWeight | None:
        """The constant matrix in a product whose right factor is not a stored constant; None where there is none."""
        left, right = (*node.input, "", "")[:2]
        if right in self._sparse:
            return HiddenWeight(_dense(self._sparse[right]), "is sparse")
        tensor = self._computed(right)
        if tensor is not None:
            return HiddenWeight(tensor, f"goes through {self._producer[right].op_type} before its product")
        stored = self._graph.constants.get(left) or self._computed(left)
        if stored is not None and len(stored.dims) >= MATRIX_RANK:
            return HiddenWeight(stored, "is the left factor of its product")
        return None

    def _computed(self, name: str) -> onnx.TensorProto | None:
        """The largest constant from which alone a value is computed."""
        found: list[onnx.TensorProto] = []
        waiting, seen = [name], set[str]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            node = self._producer.get(value)
            if value in self._graph.constants:
                found.append(self._graph.constants[value])
            elif value in self._sparse:
                found.append(_dense(self._sparse[value]))
            elif node is None:
                return None
            else:
                found += [_dense(a.sparse_tensor) for a in node.attribute if a.HasField("sparse_tensor")]
                waiting += names_read(node)
        matrices = [tensor for tensor in found if len(tensor.dims) >= MATRIX_RANK]
        return max(matrices, key=lambda tensor: (math.prod(tensor.dims), tensor.name), default=None)


def in_functions(graph: Graph, products: frozenset[str]) -> Iterator[tuple[str, HiddenWeight]]:
    """(label, weight) of the constants that products in functions of the model use. products: their operators."""
    functions = {(function.domain, function.name): function for function in graph.model.functions}
    multiplying = {key for key in functions if _multiplies(key, functions, products)}
    for node in _all_nodes(graph.nodes):
        if (node.domain, node.op_type) in multiplying:
            for name in node.input:
                tensor = graph.constants.get(name)
                if tensor is not None and len(tensor.dims) >= MATRIX_RANK:
                    yield node.name or name, HiddenWeight(tensor, f"is used inside the function {node.op_type}")
    for key in sorted(multiplying):
        for node in _all_nodes(functions[key].node):
            for tensor in (a.t for a in node.attribute if node.op_type == "Constant" and a.name == "value"):
                if len(tensor.dims) >= MATRIX_RANK:
                    reason = f"is a constant of the function {functions[key].name}"
                    named = type(tensor).FromString(tensor.SerializeToString())
                    named.name = node.output[0]
                    yield f"{functions[key].name}/{node.output[0]}", HiddenWeight(named, reason)


def _multiplies(
    key: tuple[str, str], functions: Mapping[tuple[str, str], onnx.FunctionProto], products: frozenset[str]
) -> bool:
    """Whether a function, or one that it calls, holds a product."""
    waiting, seen = [key], set[tuple[str, str]]()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for node in _all_nodes(functions[current].node):
            called = (node.domain, node.op_type)
            if called in functions:
                waiting.append(called)
            elif node.op_type in products:
                return True
    return False


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes with those of their bodies."""
    for node in nodes:
        yield node
        for _, body in subgraphs(node):
            yield from _all_nodes(body.node)


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    """Name, element type and dims of a sparse tensor, without its values."""
    return type(sparse.values)(name=sparse.values.name, data_type=sparse.values.data_type, dims=sparse.dims)
