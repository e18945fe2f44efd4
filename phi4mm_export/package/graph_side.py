"""One of two graphs that are compared: nodes under stable keys, constants by scope, weights of layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from phi4mm_export.package.diff_values import DenseWeight, QuantizedWeight, Weight
from phi4mm_export.package.tensor_bytes import TensorBytes, tensor_bytes
from phi4mm_export.weights.rotation import ROTATED, rotation_matrix

if TYPE_CHECKING:
    import onnx

SCOPE = " > "
"""Between a node and what lies inside its subgraphs, in keys and messages."""
QUANTIZED_OPERATORS = ("MatMulNBits", "GatherBlockQuantized")
DENSE_OPERATORS = ("MatMul", "FusedMatMul", "Gemm")


@dataclass
class GraphSide:
    """A graph, its subgraphs included. `folder` is the graph file's."""

    file: str
    folder: Path
    nodes: dict[str, onnx.NodeProto] = field(default_factory=dict)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)

    def gather(self, graph: onnx.GraphProto, prefix: str = "") -> None:
        """Take in a graph: nodes keyed by their first output, which is unique in a graph."""
        for tensor in graph.initializer:
            self.constants[prefix + tensor.name] = tensor
        for index, node in enumerate(graph.node):
            key = prefix + next((name for name in node.output if name), f"node {index}")
            self.nodes[key] = node
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    self.constants[f"{key}.{attribute.name}"] = attribute.t
                if attribute.HasField("g"):
                    self.gather(attribute.g, f"{key}{SCOPE}{attribute.name}{SCOPE}")

    def tensor(self, name: str) -> TensorBytes:
        """Where a constant's bytes lie. Raises PackageError for headers that cannot be right."""
        return tensor_bytes(self.constants[name], self.folder, f"{self.file}: {name}")

    def find(self, key: str, name: str) -> str | None:
        """A constant as the node `key` sees it: of its own graph, else of a graph around that; None if it is none."""
        return next((prefix + name for prefix in _scopes(key) if prefix + name in self.constants), None)

    def producer(self, key: str, name: str) -> str | None:
        """The key of the node that makes a value as its first output, seen as `find` sees constants."""
        return next((prefix + name for prefix in _scopes(key) if prefix + name in self.nodes), None)

    def rotation(self, key: str) -> int:
        """Channels that the input of a product is mixed by (weights/rotation.py), 0 for any other input.

        The steps are Reshape, MatMul with the rotation's matrix, Reshape, as `export` and `quantize` write them.
        Raises PackageError for headers that cannot be right.
        """
        for operator in ("Reshape", "MatMul"):
            found = self.producer(key, self.nodes[key].input[0])
            if found is None or self.nodes[found].op_type != operator or len(self.nodes[found].input) != 2:
                return 0
            key = found
        name = self.find(key, self.nodes[key].input[1])
        if name is None:
            return 0
        matrix = self.tensor(name)
        size = matrix.dims[0] if matrix.dims else 0
        kind = matrix.numpy_type
        if matrix.dims != (size, size) or not 0 < size <= ROTATED or size & (size - 1) or kind is None:
            return 0
        return size if np.array_equal(matrix.rows(0, size, size), rotation_matrix(size).astype(kind)) else 0

    def weight(self, key: str) -> tuple[Weight, frozenset[str]] | None:
        """The weight of a linear layer or a table, and the constants it is made of; None for other nodes, and where a
        part of it is no constant. Raises PackageError for headers that cannot be right."""
        node = self.nodes[key]
        if node.op_type in QUANTIZED_OPERATORS:
            return self._quantized(key, node)
        if node.op_type in DENSE_OPERATORS and len(node.input) > 1:
            return self._dense(key, node)
        return None

    def _dense(self, key: str, node: onnx.NodeProto) -> tuple[Weight, frozenset[str]] | None:
        name = self.find(key, node.input[1])
        if name is None or len(self.constants[name].dims) != 2:
            return None
        values = self.tensor(name)
        if values.numpy_type is None or values.numpy_type.kind not in "fV":
            return None
        as_rows = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        rows, width = values.dims if as_rows else reversed(values.dims)
        return DenseWeight(rows, width, values, turned=not as_rows), frozenset({name})

    def _quantized(self, key: str, node: onnx.NodeProto) -> tuple[Weight, frozenset[str]] | None:
        values = {attribute.name: attribute.i for attribute in node.attribute}
        bits, block = values.get("bits", 4), values.get("block_size", 128)
        matmul = node.op_type == "MatMulNBits"
        order = (1, 2, 3) if matmul else (0, 2, 3)
        inputs = [node.input[i] if i < len(node.input) else "" for i in order]
        names = [self.find(key, name) if name else None for name in inputs]
        if names[0] is None or names[1] is None or (inputs[2] and names[2] is None) or bits not in (4, 8):
            return None
        codes, scales = self.tensor(names[0]), self.tensor(names[1])
        if codes.dtype != "UINT8" or len(codes.dims) < 2:
            return None
        rows = values.get("N", 0) if matmul else codes.dims[0]
        width = values.get("K", 0) if matmul else codes.dims[-1] * (8 // bits)
        zeros = self.tensor(names[2]) if names[2] else None
        if min(rows, width, block) <= 0:
            return None
        rotation = self.rotation(key) if matmul else 0
        if rotation and width % rotation:
            rotation = 0
        weight = QuantizedWeight(rows, width, bits, block, codes, scales, zeros, rotation)
        fits = codes.nbytes == rows * weight.blocks * block * bits // 8 and scales.elements == rows * weight.blocks
        return (weight, frozenset(filter(None, names))) if fits else None


def _scopes(key: str) -> Iterator[str]:
    """What keys begin with in the graph of the node `key`, then in every graph around that."""
    prefix = key.rpartition(SCOPE)[0] + SCOPE if SCOPE in key else ""
    while prefix:
        yield prefix
        outer = prefix.removesuffix(SCOPE).rpartition(SCOPE)[0].rpartition(SCOPE)[0]
        prefix = f"{outer}{SCOPE}" if outer else ""
    yield ""
