"""Limits that kernels check themselves: bits, block sizes and shapes of quantized weights, head sizes of attention.

Measured with onnxruntime 1.32.0 on the CPU: MatMulNBits takes 2, 4 and 8 bits in blocks of 16 to 512, zero points as
floats only with 4 bits, g_idx only with 4 bits; GroupQueryAttention wants head sizes and rotary tables in eights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from phi4mm_export.checks.element_types import TypedNode
from phi4mm_export.checks.tensors import all_tensors
from phi4mm_export.package.graph_io import graph_io

if TYPE_CHECKING:
    import onnx

NBITS = (2, 4, 8)
BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
GATHER_BITS = (4, 8)
HEAD_MULTIPLE = 8
_PAST_KEY, _COS_CACHE = 3, 7
"""Positions among the inputs of GroupQueryAttention."""
Dims = Mapping[str, tuple[int, ...]]


def constants(model: onnx.ModelProto) -> Dims:
    """Dims of every constant, and of the graph inputs (0 for a symbolic dim)."""
    found = {tensor.name: tuple(int(dim) for dim in tensor.dims) for _, tensor in all_tensors(model) if tensor.name}
    for value in graph_io(model.graph).inputs:
        found.setdefault(value.name, tuple(dim if isinstance(dim, int) else 0 for dim in value.dims or ()))
    return found


def limit_faults(node: TypedNode, dims: Dims) -> Iterator[str]:
    """Sentences about a node that its kernel would refuse."""
    kind = node.operator.removeprefix("com.microsoft::")
    attributes = {
        attribute.name: int(attribute.i) for attribute in node.node.attribute if attribute.type == attribute.INT
    }
    if kind == "MatMulNBits":
        yield from _matmul_nbits(node, attributes, dims)
    elif kind == "GatherBlockQuantized":
        yield from _gather(node, attributes, dims)
    elif kind == "GroupQueryAttention":
        yield from _attention(node, attributes, dims)


def _matmul_nbits(node: TypedNode, attributes: Mapping[str, int], dims: Dims) -> Iterator[str]:
    bits, block = attributes.get("bits", 4), attributes.get("block_size", 0)
    if bits not in NBITS:
        yield f"MatMulNBits has no kernel for {bits} bits, expected one of {', '.join(map(str, NBITS))}"
        return
    if block not in BLOCK_SIZES:
        yield f"MatMulNBits has no kernel for blocks of {block}, expected one of {', '.join(map(str, BLOCK_SIZES))}"
        return
    inputs = list(node.node.input) + [""] * 6
    if node.inputs[3:4] and node.inputs[3].startswith("float") and bits != 4:
        yield f"MatMulNBits takes float zero points with 4 bits only, found {bits} bits"
    if inputs[4] and bits != 4:
        yield f"MatMulNBits takes g_idx with 4 bits only, found {bits} bits"
    k, n = attributes.get("K", 0), attributes.get("N", 0)
    blocks = -(-k // block)
    wanted = n * blocks * (block * bits // 8)
    for position, label, elements in ((1, "weight", wanted), (2, "scales", n * blocks)):
        shape = dims.get(inputs[position])
        if shape is not None and math.prod(shape) != elements:
            yield f"the {label} of a MatMulNBits (K {k}, N {n}) is {list(shape)}, expected {elements:,} elements"


def _gather(node: TypedNode, attributes: Mapping[str, int], dims: Dims) -> Iterator[str]:
    bits, block = attributes.get("bits", 4), attributes.get("block_size", 128)
    if bits not in GATHER_BITS:
        yield f"GatherBlockQuantized has no kernel for {bits} bits, expected 4 or 8"
        return
    if block < 16 or block & (block - 1):
        yield f"GatherBlockQuantized wants blocks that are a power of two from 16, found {block}"
        return
    data = dims.get(node.node.input[0]) if node.node.input else None
    scales = dims.get(node.node.input[2]) if len(node.node.input) > 2 else None
    if data and scales and len(data) == 2 and node.inputs[0] == "uint8":
        wanted = (data[0], -(-data[1] * 8 // bits // block))
        if scales != wanted:
            yield f"the scales of a GatherBlockQuantized are {list(scales)}, expected {list(wanted)}"


def _attention(node: TypedNode, attributes: Mapping[str, int], dims: Dims) -> Iterator[str]:
    inputs = node.node.input
    past = dims.get(inputs[_PAST_KEY], ()) if len(inputs) > _PAST_KEY else ()
    heads, kv_heads = attributes.get("num_heads", 0), attributes.get("kv_num_heads", 0)
    if heads and kv_heads and heads % kv_heads:
        yield f"GroupQueryAttention has {heads} query heads, no multiple of its {kv_heads} key and value heads"
    if len(past) == 4 and past[3] and past[3] % HEAD_MULTIPLE:
        yield f"GroupQueryAttention wants a head size that is a multiple of {HEAD_MULTIPLE}, found {past[3]}"
    if len(past) == 4 and past[1] and kv_heads and past[1] != kv_heads:
        yield f"GroupQueryAttention has {kv_heads} key and value heads, its cache {past[1]}"
    table = dims.get(inputs[_COS_CACHE], ()) if len(inputs) > _COS_CACHE else ()
    if attributes.get("do_rotary") and len(table) == 2 and table[1] % HEAD_MULTIPLE:
        yield f"GroupQueryAttention wants rotary tables {HEAD_MULTIPLE} columns wide or multiples, found {table[1]}"
