"""Every constant tensor of an ONNX model, wherever it hides, and the external bytes it claims."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

MAX_OFFSET = 2**63 - 1
"""Offsets and lengths are signed 64-bit numbers in every reader."""
BITS = {
    "FLOAT": 32, "DOUBLE": 64, "FLOAT16": 16, "BFLOAT16": 16, "BOOL": 8, "COMPLEX64": 64, "COMPLEX128": 128,
    "INT64": 64, "UINT64": 64, "INT32": 32, "UINT32": 32, "INT16": 16, "UINT16": 16, "INT8": 8, "UINT8": 8,
    "INT4": 4, "UINT4": 4, "INT2": 2, "UINT2": 2, "FLOAT4E2M1": 4,
    "FLOAT8E4M3FN": 8, "FLOAT8E4M3FNUZ": 8, "FLOAT8E5M2": 8, "FLOAT8E5M2FNUZ": 8, "FLOAT8E8M0": 8,
}  # fmt: skip
"""Bits per element of the ONNX element types that have a fixed width."""


@dataclass(frozen=True)
class DataRange:
    """Bytes [offset, end) of the file `location` that hold one tensor."""

    tensor: str
    location: str
    offset: int
    end: int


@dataclass(frozen=True)
class Fault:
    """One tensor whose header cannot be right."""

    code: str
    tensor: str
    what: str
    expected: str = ""
    found: str = ""


def all_tensors(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """(name, tensor) of initializers, sparse initializers and node attributes, subgraphs and functions included."""
    yield from _graph_tensors(model.graph, "")
    for function in model.functions:
        for node in function.node:
            yield from _node_tensors(node, f"function {function.name}")


def dtype_name(tensor: onnx.TensorProto) -> str:
    """ONNX's name of the element type, or "element type N" for a number that is none."""
    import onnx

    if tensor.data_type in onnx.TensorProto.DataType.values():
        return str(onnx.TensorProto.DataType.Name(tensor.data_type))
    return f"element type {tensor.data_type}"


def tensor_nbytes(tensor: onnx.TensorProto) -> int | None:
    """Bytes the tensor's elements take; None for a type without a fixed width or a negative dim."""
    bits = BITS.get(dtype_name(tensor))
    if bits is None or any(dim < 0 for dim in tensor.dims):
        return None
    elements: int = math.prod(tensor.dims)
    return (elements * bits + 7) // 8


def data_ranges(model: onnx.ModelProto) -> tuple[list[DataRange], list[Fault]]:
    """The external bytes every tensor claims, and the headers that are wrong by themselves."""
    ranges: list[DataRange] = []
    faults: list[Fault] = []
    for name, tensor in all_tensors(model):
        fault = _header_fault(name, tensor)
        if fault is not None:
            faults.append(fault)
        elif tensor.data_location == tensor.EXTERNAL:
            item = _external(name, tensor)
            if isinstance(item, DataRange):
                ranges.append(item)
            else:
                faults.append(item)
        else:
            fault = _inline_fault(name, tensor)
            if fault is not None:
                faults.append(fault)
    return ranges, faults


def _graph_tensors(graph: onnx.GraphProto, place: str) -> Iterator[tuple[str, onnx.TensorProto]]:
    for tensor in graph.initializer:
        yield f"{place}{tensor.name}", tensor
    for sparse in graph.sparse_initializer:
        yield f"{place}{sparse.values.name}", sparse.values
        yield f"{place}{sparse.values.name} indices", sparse.indices
    for node in graph.node:
        yield from _node_tensors(node, place)


def _node_tensors(node: onnx.NodeProto, place: str) -> Iterator[tuple[str, onnx.TensorProto]]:
    label = f"{place}{node.name or node.op_type}"
    for attribute in node.attribute:
        own = f"{label}.{attribute.name}"
        if attribute.HasField("t"):
            yield own, attribute.t
        for index, tensor in enumerate(attribute.tensors):
            yield f"{own}[{index}]", tensor
        if attribute.HasField("sparse_tensor"):
            yield own, attribute.sparse_tensor.values
            yield f"{own} indices", attribute.sparse_tensor.indices
        for sparse in attribute.sparse_tensors:
            yield own, sparse.values
            yield f"{own} indices", sparse.indices
        for graph in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
            yield from _graph_tensors(graph, f"{label}/")


def _header_fault(name: str, tensor: onnx.TensorProto) -> Fault | None:
    if any(dim < 0 for dim in tensor.dims):
        return Fault("C210", name, "a constant has a negative dim", "dims of 0 or more", str(list(tensor.dims)))
    kind = dtype_name(tensor)
    if kind == "UNDEFINED" or kind.startswith("element type"):
        return Fault("C211", name, "a constant has no known element type", "an ONNX element type", kind)
    nbytes = tensor_nbytes(tensor)
    if nbytes is not None and nbytes > MAX_OFFSET:
        return Fault("C210", name, "a constant is larger than any file", f"at most {MAX_OFFSET:,} bytes", f"{nbytes:,}")
    return None


def _external(name: str, tensor: onnx.TensorProto) -> DataRange | Fault:
    keys = [entry.key for entry in tensor.external_data]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        return Fault("C212", name, "an external data key occurs twice", "each key once", ", ".join(twice))
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if not location:
        return Fault("C213", name, "external data without a location", "a file name", "none")
    if tensor.HasField("raw_data") and tensor.raw_data:
        return Fault("C214", name, "a constant has bytes both inside and outside the graph", "one of the two")
    numbers = {}
    for key in ("offset", "length"):
        text = entries.get(key, "")
        if text and not (text.isascii() and text.isdigit() and int(text[:20]) <= MAX_OFFSET and len(text) < 20):
            return Fault("C215", name, f"the external data {key} is no valid number", f"0 to {MAX_OFFSET}", text[:40])
        numbers[key] = int(text) if text else None
    wanted = tensor_nbytes(tensor)
    if wanted is None:
        return Fault("C216", name, "a constant of this type cannot lie outside the graph", "a type of fixed width",
                     dtype_name(tensor))  # fmt: skip
    length = numbers["length"]
    if length is not None and length != wanted:
        return Fault("C217", name, "the external data length does not fit dims and type", f"{wanted:,} bytes",
                     f"{length:,} bytes")  # fmt: skip
    offset = numbers["offset"] or 0
    if offset + wanted > MAX_OFFSET:
        return Fault("C215", name, "the external data ends beyond any file", f"at most {MAX_OFFSET:,}",
                     f"{offset + wanted:,}")  # fmt: skip
    return DataRange(name, location, offset, offset + wanted)


def _inline_fault(name: str, tensor: onnx.TensorProto) -> Fault | None:
    wanted = tensor_nbytes(tensor)
    if wanted is not None and tensor.HasField("raw_data") and len(tensor.raw_data) != wanted:
        return Fault("C218", name, "the bytes of a constant do not fit its dims and type", f"{wanted:,} bytes",
                     f"{len(tensor.raw_data):,} bytes")  # fmt: skip
    return None
