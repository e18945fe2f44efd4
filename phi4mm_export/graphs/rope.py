"""LongRoPE tables and the choice between them.

Source: LongRoPE, arXiv 2402.13753, in the form Phi-3 and Phi-4 use: the long divisors apply as soon as the
total length T (past and new tokens) exceeds original_max_position_embeddings.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from phi4mm_export.graphs import fused
from phi4mm_export.graphs.layers import ONNX_FLOAT
from phi4mm_export.spec.contract import FloatType
from phi4mm_export.spec.model import LongRope


class RopeTables(nn.Module):
    """Cosine and sine of every position, [positions, rotary_dim / 2], the attention scale inside."""

    def __init__(self, rope: LongRope, compute: FloatType) -> None:
        super().__init__()
        self.rope, self.compute = rope, ONNX_FLOAT[compute]
        half = rope.rotary_dim // 2
        self.has_long = rope.max_positions > rope.original_max_positions
        short_rows = min(rope.original_max_positions, rope.max_positions)
        self.cos_short = nn.Parameter([short_rows, half], self.compute)
        self.sin_short = nn.Parameter([short_rows, half], self.compute)
        if self.has_long:
            self.cos_long = nn.Parameter([rope.max_positions, half], self.compute)
            self.sin_long = nn.Parameter([rope.max_positions, half], self.compute)

    def forward(self, op: OpBuilder, total_length: ir.Value) -> tuple[ir.Value, ir.Value]:
        """total_length int64 [1] -> cosine and sine of positions 0 .. T-1, [T, rotary_dim / 2].

        Only T rows leave the branch: an `If` copies what it returns.
        """
        short = (self.cos_short, self.sin_short)
        if not self.has_long:
            return self._first_rows(op, short, total_length)
        long = (self.cos_long, self.sin_long)
        is_long = op.Greater(op.Squeeze(total_length, [0]), self.rope.original_max_positions)
        branches = {
            name: op.builder.subgraph(
                lambda sub, tables=tables: self._first_rows(sub, tables, total_length),
                [],
                [self._result(f"cos_{name}_rows"), self._result(f"sin_{name}_rows")],
                name=f"rope_{name}",
            )
            for name, tables in (("long", long), ("short", short))
        }
        cos, sin = op.If(is_long, then_branch=branches["long"], else_branch=branches["short"], _outputs=2)
        dims = ["total_sequence_length", self.rope.rotary_dim // 2]
        return fused.set_type(cos, self.compute, dims), fused.set_type(sin, self.compute, dims)

    def _result(self, name: str) -> ir.Value:
        shape = ir.Shape(["total_sequence_length", self.rope.rotary_dim // 2])
        return ir.Value(name=name, type=ir.TensorType(self.compute), shape=shape)

    @staticmethod
    def _first_rows(
        op: OpBuilder, tables: tuple[ir.Value, ir.Value], total_length: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        cos, sin = (op.Slice(table, [0], total_length, [0]) for table in tables)
        return cos, sin
