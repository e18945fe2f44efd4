"""Operators of ONNX Runtime's com.microsoft domain, one typed function each.

The only module that spells that domain: onnxscript knows no schema of it, so every function states the
element type and the shape of its result. Source: ONNX Runtime, docs/ContribOperators.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import OpBuilder

DOMAIN = "com.microsoft"
DOMAIN_VERSION = 1
Dim = int | str | None


def set_type(value: ir.Value, dtype: ir.DataType, dims: Sequence[Any]) -> ir.Value:
    """State what inference cannot know: element type and shape (int, symbolic name, or None)."""
    value.type = ir.TensorType(dtype)
    value.shape = ir.Shape(list(dims))
    return value


def dtype_of(value: ir.Value) -> ir.DataType:
    """The element type of an edge whose type is known."""
    if value.dtype is None:
        raise TypeError(f"edge {value.name} has no element type yet")
    return value.dtype


def dims_of(value: ir.Value) -> list[Any]:
    """The dimensions of an edge whose rank is known."""
    if value.shape is None:
        raise TypeError(f"edge {value.name} has no shape yet")
    return list(value.shape)


def _emit(op: OpBuilder, name: str, inputs: Sequence[ir.Value | None], outputs: int = 1, **attributes: Any) -> Any:
    return getattr(op, name)(*inputs, _domain=DOMAIN, _version=DOMAIN_VERSION, _outputs=outputs, **attributes)


def matmul_nbits(
    op: OpBuilder,
    x: ir.Value,
    qweight: ir.Value,
    scales: ir.Value,
    *,
    in_features: int,
    out_features: int,
    bits: int,
    block_size: int,
    accuracy_level: int,
) -> ir.Value:
    """x [..., K] float, qweight uint8 [N, ceil(K/block), block*bits/8], scales [N, ceil(K/block)] -> [..., N]."""
    level = {"accuracy_level": accuracy_level} if accuracy_level else {}
    y = _emit(
        op,
        "MatMulNBits",
        [x, qweight, scales],
        K=in_features,
        N=out_features,
        bits=bits,
        block_size=block_size,
        **level,
    )
    return set_type(y, dtype_of(x), [*dims_of(x)[:-1], out_features])


def matmul_transposed(op: OpBuilder, x: ir.Value, weight: ir.Value) -> ir.Value:
    """x [..., K] times weight [N, K] transposed -> [..., N]: the weight stays as the checkpoint stores it."""
    y = _emit(op, "FusedMatMul", [x, weight], transB=1)
    return set_type(y, dtype_of(x), [*dims_of(x)[:-1], dims_of(weight)[0]])


def skip_rms_norm(
    op: OpBuilder, x: ir.Value, residual: ir.Value, weight: ir.Value, eps: float
) -> tuple[ir.Value, ir.Value]:
    """x, residual [B, S, H] -> (rms_norm(x + residual) * weight, x + residual), both [B, S, H]."""
    normed, _, _, total = _emit(op, "SkipSimplifiedLayerNormalization", [x, residual, weight], outputs=4, epsilon=eps)
    # The two statistics in the middle are not computed: their names are empty in the file.
    for unused in (normed.producer().outputs[1], normed.producer().outputs[2]):
        unused.name = ""
    for value in (normed, total):
        set_type(value, dtype_of(x), dims_of(x))
    return normed, total


def group_query_attention(
    op: OpBuilder,
    qkv: ir.Value,
    past: tuple[ir.Value, ir.Value],
    seqlens_k: ir.Value,
    total_length: ir.Value,
    rope: tuple[ir.Value, ir.Value],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Packed qkv [B, S, (heads + 2 kv) * d], past [B, kv, P, d] twice -> [B, S, heads * d], present [B, kv, T, d].

    seqlens_k int32 [B]: real tokens minus one; total_length int32 scalar T; rope: cosine and sine [>= T, rotary/2],
    which the operator applies to the leading part of every head (partial rotary) before it caches the keys.
    """
    out, key, value = _emit(
        op,
        "GroupQueryAttention",
        [qkv, None, None, *past, seqlens_k, total_length, *rope],
        outputs=3,
        num_heads=num_heads,
        kv_num_heads=num_kv_heads,
        do_rotary=1,
        rotary_interleaved=0,
        scale=1.0 / math.sqrt(head_dim),
    )
    batch, length = dims_of(qkv)[:2]
    set_type(out, dtype_of(qkv), [batch, length, num_heads * head_dim])
    for present in (key, value):
        set_type(present, dtype_of(qkv), [batch, num_kv_heads, "total_sequence_length", head_dim])
    return out, key, value


def multi_head_attention(
    op: OpBuilder, q: ir.Value, k: ir.Value, v: ir.Value, bias: ir.Value, *, num_heads: int
) -> ir.Value:
    """q, k, v [B, S, D], bias [B or 1, heads or 1, S, S] -> softmax(q k' / sqrt(D / heads) + bias) v, [B, S, D]."""
    y = _emit(op, "MultiHeadAttention", [q, k, v, None, None, bias], num_heads=num_heads)
    return set_type(y, dtype_of(q), dims_of(q))


def gather_block_quantized(
    op: OpBuilder, qweight: ir.Value, ids: ir.Value, scales: ir.Value, *, bits: int, block_size: int, width: int
) -> ir.Value:
    """Rows `ids` of a table of codes uint8 [V, H*bits/8] with scales [V, H/block] -> float [*ids, H], symmetric."""
    y = _emit(
        op,
        "GatherBlockQuantized",
        [qweight, ids, scales],
        bits=bits,
        block_size=block_size,
        gather_axis=0,
        quantize_axis=1,
    )
    return set_type(y, dtype_of(scales), [*dims_of(ids), width])
