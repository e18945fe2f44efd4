"""Low-rank adapters on a Linear, in the four forms an export offers.

    merged    nothing here: the product is added to the base weight before it is stored
    branch    y = x W' + (x A') B'                 one adapter, always on
    gated     y = x W' + g (x A') B'               both adapters, g per batch row, each inside an `If`
    adapters  y = x W' + (x A) B                   A, B are graph inputs with zero defaults

B carries alpha / r. Source: LoRA, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder, nn

from phi4mm_export.graphs import fused
from phi4mm_export.graphs.layers import ONNX_FLOAT, Affine
from phi4mm_export.spec.contract import FloatType
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.recipe import Blockwise, WeightFormat


@dataclass(frozen=True)
class Gate:
    """Whether one adapter is wanted: per row [B, 1, 1] in the graph's float type, and by any row (bool scalar)."""

    rows: ir.Value
    any_row: ir.Value


Gates = Mapping[Role, Gate]


@dataclass(frozen=True)
class Split:
    """One output block of a packed projection and the official name of its overridable LoRA inputs."""

    name: str
    out_features: int


@dataclass(frozen=True)
class LowRank:
    """(x A') B' with A [r, in], B [out, r].  x [B, S, in] -> [B, S, out]."""

    a: Affine
    b: Affine

    def __call__(self, op: OpBuilder, x: ir.Value, turned: ir.Value, rows: ir.Value | None = None) -> ir.Value:
        """turned: x as the base's product takes it. `rows` [B, 1, 1] multiplies the small product in the middle."""
        down = self.a(op, x, turned if self.a.rotation else x)
        return self.b(op, down if rows is None else op.Mul(down, rows))


class AdaptedLinear(nn.Module):
    """A Linear with the adapters of its recipe on it.  x [B, S, in] -> [B, S, out]."""

    def __init__(
        self,
        base: Affine,
        *,
        ranks: Mapping[Role, int],
        fmt: WeightFormat,
        compute: FloatType,
        overridable: Sequence[Split] = (),
    ) -> None:
        super().__init__()
        self.base = base.register(self)
        self.overridable = tuple(overridable)
        self.adapters = {
            role: LowRank(
                Affine(base.in_features, rank, fmt, compute).register(self, f"lora_A.{role}."),
                Affine(rank, base.out_features, not_rotated(fmt), compute).register(self, f"lora_B.{role}."),
            )
            for role, rank in sorted(ranks.items())
        }

    def forward(
        self,
        op: OpBuilder,
        x: ir.Value,
        gates: Gates | None = None,
        inputs: Mapping[str, tuple[ir.Value, ir.Value]] | None = None,
    ) -> ir.Value:
        turned = self.base.turned(op, x)
        y = self.base(op, x, turned)
        for role, adapter in self.adapters.items():
            if gates is None:
                y = op.Add(y, adapter(op, x, turned))
            else:
                y = self._gated(op, (x, turned), y, adapter, gates[role], role)
        if inputs and self.overridable:
            pieces = [op.MatMul(op.MatMul(x, inputs[s.name][0]), inputs[s.name][1]) for s in self.overridable]
            y = op.Add(y, pieces[0] if len(pieces) == 1 else op.Concat(*pieces, axis=-1))
        return y

    @staticmethod
    def _gated(
        op: OpBuilder, inputs: tuple[ir.Value, ir.Value], y: ir.Value, adapter: LowRank, gate: Gate, role: Role
    ) -> ir.Value:
        """y + gate (x A') B' where any row wants it, else y: one `If`, never nested, so its weights stay prepacked."""

        def result(branch: str) -> list[ir.Value]:
            shape = ir.Shape(fused.dims_of(y))
            return [ir.Value(name=f"{role}_{branch}", type=ir.TensorType(fused.dtype_of(y)), shape=shape)]

        wanted = op.builder.subgraph(
            lambda sub: sub.Add(y, adapter(sub, *inputs, gate.rows)), [], result("on"), name=f"{role}_on"
        )
        unwanted = op.builder.subgraph(lambda sub: sub.Identity(y), [], result("off"), name=f"{role}_off")
        out = op.If(gate.any_row, then_branch=wanted, else_branch=unwanted)
        return fused.set_type(out, fused.dtype_of(y), fused.dims_of(y))


def not_rotated(fmt: WeightFormat) -> WeightFormat:
    """The same format for inputs that are as they are: the few channels in an adapter's middle."""
    return replace(fmt, rotate=False) if isinstance(fmt, Blockwise) else fmt


def overridable_inputs(
    op: OpBuilder, prefix: str, in_features: int, splits: Sequence[Split], compute: FloatType
) -> dict[str, tuple[ir.Value, ir.Value]]:
    """Graph inputs A [in, r] and B [r, out] per split, float, zero by default with rank 1 (the rank is symbolic).

    Names as in Microsoft's package: `PREFIX.NAME.lora_{A,B}.MatMul.weight`.
    """
    dtype = ONNX_FLOAT[compute]
    made: dict[str, tuple[ir.Value, ir.Value]] = {}
    for split in splits:
        pair = []
        for side, shape in (("A", (in_features, 1)), ("B", (1, split.out_features))):
            name = f"{prefix}.{split.name}.lora_{side}.MatMul.weight"
            zero = ir.Tensor(np.zeros(shape, dtype.numpy()), name=name)
            value = op.builder.input(name, dtype, shape, const_value=zero)
            value.shape = ir.Shape([f"{split.name}_rank" if size == 1 else size for size in shape])
            pair.append(value)
        made[split.name] = (pair[0], pair[1])
    return made
