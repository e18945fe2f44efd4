"""Linear layers and norms that every graph uses.

A parameter's name in the graph is its canonical checkpoint name, so what a user sees in a viewer is what the
checkpoint calls it. A Linear asks its WeightFormat which operator it becomes.
"""

from __future__ import annotations

from enum import StrEnum

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from phi4mm_export.graphs import fused
from phi4mm_export.spec.contract import FloatType
from phi4mm_export.spec.recipe import Blockwise, WeightFormat
from phi4mm_export.weights.rotation import EXPORTED_NAME, rotation_matrix, rotation_size

ONNX_FLOAT = {FloatType.FLOAT32: ir.DataType.FLOAT, FloatType.FLOAT16: ir.DataType.FLOAT16}


class Placement(StrEnum):
    """What a weight parameter holds of the checkpoint's matrix [out, in]."""

    AS_STORED = "as stored"
    TRANSPOSED = "transposed"
    CODES = "codes"
    SCALES = "scales"


class WeightParameter(nn.Parameter):
    """A parameter that is no plain copy of the tensor of its name: placement; bits, block and rotation of codes."""

    def __init__(
        self,
        shape: list[int],
        dtype: ir.DataType,
        placement: Placement,
        *,
        bits: int = 0,
        block_size: int = 0,
        rotation: int = 0,
    ) -> None:
        super().__init__(shape, dtype)
        self.placement, self.bits, self.block_size, self.rotation = placement, bits, block_size, rotation


def code_parameters(
    height: int, width: int, fmt: Blockwise, compute: ir.DataType, *, flat: bool = False
) -> dict[str, nn.Parameter]:
    """`qweight` uint8 [height, blocks, block * bits / 8] and `scales` [height, blocks] of a quantized matrix.

    flat: one row of bytes per row of codes, [height, width * bits / 8], the form of GatherBlockQuantized.
    """
    block = fmt.block_for(width)
    blocks, rotation = -(-width // block), rotation_of(width, fmt)
    shape = [height, width * fmt.bits // 8] if flat else [height, blocks, block * fmt.bits // 8]
    codes = WeightParameter(
        shape, ir.DataType.UINT8, Placement.CODES, bits=fmt.bits, block_size=block, rotation=rotation
    )
    scales = WeightParameter([height, blocks], compute, Placement.SCALES, bits=fmt.bits, block_size=block)
    return {"qweight": codes, "scales": scales}


def rotation_of(width: int, fmt: WeightFormat) -> int:
    """Channels mixed with each other in an input of `width` channels, 0 for none."""
    return rotation_size(width) if isinstance(fmt, Blockwise) and fmt.rotate else 0


def rotate(op: OpBuilder, x: ir.Value, size: int) -> ir.Value:
    """x R' for R of weights/rotation.py, every `size` channels alike.  [B, S, K] -> [B, S, K]."""
    dtype, width = fused.dtype_of(x), fused.dims_of(x)[-1]
    name = f"{EXPORTED_NAME}{size}"
    matrix = op.builder.root.graph.initializers.get(name)
    if matrix is None:
        values = rotation_matrix(size).astype(dtype.numpy())
        matrix = op.builder.initializer(ir.Tensor(values, name=name), qualify=False)
    groups = op.Reshape(x, [0, 0, width // size, size])
    return fused.set_type(op.Reshape(op.MatMul(groups, matrix), [0, 0, width]), dtype, fused.dims_of(x))


class Affine:
    """The weights of y = x W' (+ b) and the operator they become.  x [..., in_features] -> [..., out_features].

    `weight` [out_features, in_features] in the checkpoint. Dense weights stay so (FusedMatMul with transB) unless
    `transposed`: then they are stored [in_features, out_features] for a plain MatMul, which every quantizer knows.
    Integer weights are codes uint8 [out, blocks, block * bits / 8] and scales [out, blocks] for MatMulNBits, of rows
    whose channels are mixed in groups of `rotation` where that is not 0: y = (x R') (W R')'.

    Not a module: whoever holds one registers its parameters, so that it can also be used inside a branch of an `If`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        fmt: WeightFormat,
        compute: FloatType,
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        self.in_features, self.out_features, self.fmt, self.transposed = in_features, out_features, fmt, transposed
        self.compute, self.rotation = ONNX_FLOAT[compute], rotation_of(in_features, fmt)
        self.parameters: dict[str, nn.Parameter] = {}
        if isinstance(fmt, Blockwise):
            self.parameters |= code_parameters(out_features, in_features, fmt, self.compute)
        else:
            shape = [in_features, out_features] if transposed else [out_features, in_features]
            placement = Placement.TRANSPOSED if transposed else Placement.AS_STORED
            self.parameters["weight"] = WeightParameter(shape, ONNX_FLOAT[fmt.storage], placement)
        if bias:
            self.parameters["bias"] = nn.Parameter([out_features], self.compute)

    def register(self, module: nn.Module, prefix: str = "") -> Affine:
        """Make the parameters initializers of `module` under its name, `prefix` in front of their own."""
        for name, parameter in self.parameters.items():
            parameter.name = f"{prefix}{name}"
            setattr(module, parameter.name, parameter)
        return self

    def turned(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """The input of the product: x, or x rotated."""
        return rotate(op, x, self.rotation) if self.rotation else x

    def __call__(self, op: OpBuilder, x: ir.Value, turned: ir.Value | None = None) -> ir.Value:
        """`turned`: what `turned(op, x)` gave, where it is there already."""
        y = self._product(op, self.turned(op, x) if turned is None else turned)
        bias = self.parameters.get("bias")
        return y if bias is None else op.Add(y, bias)

    def _product(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        if isinstance(self.fmt, Blockwise):
            return fused.matmul_nbits(
                op,
                x,
                self.parameters["qweight"],
                self.parameters["scales"],
                in_features=self.in_features,
                out_features=self.out_features,
                bits=self.fmt.bits,
                block_size=self.fmt.block_for(self.in_features),
                accuracy_level=self.fmt.accuracy_level,
            )
        weight = cast(op, self.parameters["weight"], self.compute)
        return op.MatMul(x, weight) if self.transposed else fused.matmul_transposed(op, x, weight)


class Linear(nn.Module):
    """One Affine under its own name.  [..., in_features] -> [..., out_features]."""

    def __init__(self, affine: Affine, name: str | None = None) -> None:
        super().__init__(name)
        self.affine = affine.register(self)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return self.affine(op, x)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis.  [..., D] -> [..., D]."""

    def __init__(self, width: int, eps: float, compute: FloatType) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter([width], ONNX_FLOAT[compute])
        self.bias = nn.Parameter([width], ONNX_FLOAT[compute])

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return op.LayerNormalization(x, self.weight, self.bias, axis=-1, epsilon=self.eps)


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), in float32, times weight.  [..., D] -> [..., D]."""

    def __init__(self, width: int, eps: float, compute: FloatType) -> None:
        super().__init__()
        self.eps, self.compute = eps, ONNX_FLOAT[compute]
        self.weight = nn.Parameter([width], self.compute)

    def forward(self, op: OpBuilder, x: ir.Value, residual: ir.Value | None = None) -> tuple[ir.Value, ir.Value]:
        """(norm(x + residual), x + residual); without a residual (norm(x), x)."""
        if residual is not None:
            return fused.skip_rms_norm(op, x, residual, self.weight, self.eps)
        wide = cast(op, x, ir.DataType.FLOAT)
        power = op.ReduceMean(op.Mul(wide, wide), [-1], keepdims=1)
        normed = op.Div(wide, op.Sqrt(op.Add(power, self.eps)))
        return op.Mul(cast(op, normed, self.compute), self.weight), x


def cast(op: OpBuilder, x: ir.Value, dtype: ir.DataType) -> ir.Value:
    """x as `dtype`; the same edge when it has that type already."""
    return x if x.dtype == dtype else op.Cast(x, to=int(dtype))
