"""The vision graph: SigLIP over crops, pooling, the HD arrangement with separators, projection.

N images, C crops per image (the first is the global view), G crops that are real, 1024 = 32 x 32 patches per crop,
D = SigLIP width, H = hidden size of the decoder. Sub-crops of an image form a grid of h x w crops, row-major.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from phi4mm_export.graphs import fused
from phi4mm_export.graphs.layers import ONNX_FLOAT, Affine, LayerNorm, Linear, cast
from phi4mm_export.spec.contract import FloatType
from phi4mm_export.spec.model import IMAGE_SIZE, PATCH_SIZE, PATCHES_PER_SIDE, ModelConfig, VisionDims
from phi4mm_export.spec.recipe import Dense

SIDE = PATCHES_PER_SIDE
PATCHES = SIDE * SIDE
CELLS = SIDE // 2
"""Pooled cells per side of a crop: 2 x 2 patches each."""
MASKED = {FloatType.FLOAT32: -3.4e38, FloatType.FLOAT16: -65504.0}
"""Added to the scores of padded patches: finite, so that a crop without any real patch gives no NaN."""
INT64 = int(ir.DataType.INT64)


class Embeddings(nn.Module):
    """Patches plus NaViT positions.  pixels [G, 3, 448, 448], position ids [G, 1024] -> [G, 1024, D]."""

    def __init__(self, dims: VisionDims, compute: FloatType) -> None:
        super().__init__()
        kind = ONNX_FLOAT[compute]
        self.width = dims.hidden_size
        self.kernel = nn.Parameter([dims.hidden_size, 3, PATCH_SIZE, PATCH_SIZE], kind, "patch_embedding.weight")
        self.kernel_bias = nn.Parameter([dims.hidden_size], kind, "patch_embedding.bias")
        self.positions = nn.Parameter([PATCHES, dims.hidden_size], kind, "position_embedding.weight")

    def forward(self, op: OpBuilder, pixels: ir.Value, position_ids: ir.Value) -> ir.Value:
        patches = op.Conv(pixels, self.kernel, self.kernel_bias, strides=[PATCH_SIZE, PATCH_SIZE])
        rows = op.Transpose(op.Reshape(patches, [0, self.width, PATCHES]), perm=[0, 2, 1])
        return op.Add(rows, op.Gather(self.positions, position_ids, axis=0))


class SelfAttention(nn.Module):
    """Attention among the patches of one crop.  x [G, 1024, D], bias [G, 1, 1024, 1024] -> [G, 1024, D]."""

    def __init__(self, dims: VisionDims, compute: FloatType) -> None:
        super().__init__()
        self.num_heads = dims.num_heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, tower_linear(dims.hidden_size, dims.hidden_size, compute))

    def forward(self, op: OpBuilder, x: ir.Value, bias: ir.Value) -> ir.Value:
        q, k, v = self.q_proj(op, x), self.k_proj(op, x), self.v_proj(op, x)
        return self.out_proj(op, fused.multi_head_attention(op, q, k, v, bias, num_heads=self.num_heads))


class Mlp(nn.Module):
    """fc2(gelu_tanh(fc1(x))).  [G, 1024, D] -> [G, 1024, D]."""

    def __init__(self, dims: VisionDims, compute: FloatType) -> None:
        super().__init__()
        self.fc1 = tower_linear(dims.hidden_size, dims.intermediate_size, compute)
        self.fc2 = tower_linear(dims.intermediate_size, dims.hidden_size, compute)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return self.fc2(op, op.Gelu(self.fc1(op, x), approximate="tanh"))


class EncoderLayer(nn.Module):
    """Pre-norm transformer layer.  [G, 1024, D] -> [G, 1024, D]."""

    def __init__(self, dims: VisionDims, compute: FloatType) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(dims.hidden_size, dims.eps, compute)
        self.self_attn = SelfAttention(dims, compute)
        self.layer_norm2 = LayerNorm(dims.hidden_size, dims.eps, compute)
        self.mlp = Mlp(dims, compute)

    def forward(self, op: OpBuilder, x: ir.Value, bias: ir.Value) -> ir.Value:
        x = op.Add(x, self.self_attn(op, self.layer_norm1(op, x), bias))
        return op.Add(x, self.mlp(op, self.layer_norm2(op, x)))


class Encoder(nn.Module):
    """All layers but the last: the original reads feature layer -2."""

    def __init__(self, dims: VisionDims, compute: FloatType) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EncoderLayer(dims, compute) for _ in range(dims.used_layers)])

    def forward(self, op: OpBuilder, x: ir.Value, bias: ir.Value) -> ir.Value:
        for layer in self.layers:
            x = layer(op, x, bias)
        return x


class Siglip(nn.Module):
    """pixels [G, 3, 448, 448], real patches bool [G, 32, 32] -> pooled cells [G * 256, D]."""

    def __init__(self, dims: VisionDims, compute: FloatType) -> None:
        super().__init__()
        self.width, self.compute = dims.hidden_size, compute
        self.embeddings = Embeddings(dims, compute)
        self.encoder = Encoder(dims, compute)

    def forward(self, op: OpBuilder, pixels: ir.Value, real: ir.Value) -> ir.Value:
        x = self.embeddings(op, pixels, navit_positions(op, real))
        x = self.encoder(op, x, self._key_bias(op, real))
        grid = op.Reshape(x, [-1, CELLS, 2, CELLS, 2, self.width])
        return op.Reshape(op.ReduceMean(grid, [2, 4], keepdims=0), [-1, self.width])

    def _key_bias(self, op: OpBuilder, real: ir.Value) -> ir.Value:
        """0 for real keys, a large negative number for padded ones, [G, 1, 1024, 1024]."""
        keys = op.Reshape(real, [-1, 1, 1, PATCHES])
        kind = ONNX_FLOAT[self.compute]
        bias = op.Mul(op.Cast(op.Not(keys), to=int(kind)), MASKED[self.compute])
        return fused.set_type(op.Expand(bias, [1, 1, PATCHES, 1]), kind, [None, 1, PATCHES, PATCHES])


class ImageEmbed(nn.Module):
    """pixel_values [N, C, 3, 448, 448], image_attention_mask [N, C, 32, 32], image_sizes [N, 2] -> [tokens, H]."""

    def __init__(self, config: ModelConfig, compute: FloatType) -> None:
        super().__init__("model.embed_tokens_extend.image_embed")
        width, kind = config.vision.hidden_size, ONNX_FLOAT[compute]
        self.compute = kind
        self.img_processor = Siglip(config.vision, compute)
        self.glb_gn = nn.Parameter([1, width], kind, "glb_GN")
        self.sub_gn = nn.Parameter([1, width], kind, "sub_GN")
        self.up = tower_linear(width, config.hidden_size, compute, "img_projection.0")
        self.down = tower_linear(config.hidden_size, config.hidden_size, compute, "img_projection.2")

    def forward(self, op: OpBuilder, pixels: ir.Value, mask: ir.Value, sizes: ir.Value) -> ir.Value:
        grid = CropGrid.of(op, sizes, mask)
        real_crops = op.Compress(
            op.Reshape(cast(op, pixels, self.compute), [-1, 3, IMAGE_SIZE, IMAGE_SIZE]), grid.is_real, axis=0
        )
        real_patches = op.Compress(op.Reshape(op.Greater(mask, 0.0), [-1, SIDE, SIDE]), grid.is_real, axis=0)
        cells = self.img_processor(op, real_crops, real_patches)
        separator = op.Size(op.Slice(cells, [0], [1], [1]))  # rows of cells: where the two separators follow
        table = op.Concat(cells, self.sub_gn, self.glb_gn, axis=0)
        tokens = op.Gather(table, arrange(op, grid, real_patches, separator), axis=0)
        return self.down(op, op.Gelu(self.up(op, tokens)))


@dataclass(frozen=True)
class CropGrid:
    """Where the crops of every image lie.  All int64 unless said."""

    rows: ir.Value
    """h of every image, [N, 1, 1]."""
    columns: ir.Value
    """w of every image, [N, 1, 1]."""
    is_real: ir.Value
    """bool [N * C]: the global crop and the h * w sub-crops, not the padding crops."""
    first: ir.Value
    """Index of every image's global crop among the real crops, [N, 1, 1]."""

    @classmethod
    def of(cls, op: OpBuilder, sizes: ir.Value, mask: ir.Value) -> CropGrid:
        """sizes int64 [N, 2]: height and width in pixels of the padded image; mask [N, C, 32, 32]."""
        crops = op.Div(sizes, IMAGE_SIZE)
        rows, columns = op.Split(crops, num_outputs=2, axis=1, _outputs=["crop_rows", "crop_columns"])
        count = op.Add(op.Mul(rows, columns), 1)
        slots = op.Range(0, op.Squeeze(op.Shape(mask, start=1, end=2), [0]), 1)
        is_real = op.Reshape(op.Less(op.Unsqueeze(slots, [0]), count), [-1])
        first = op.CumSum(count, 0, exclusive=1)
        return cls(op.Unsqueeze(rows, [2]), op.Unsqueeze(columns, [2]), is_real, op.Unsqueeze(first, [2]))


def navit_positions(op: OpBuilder, real: ir.Value) -> ir.Value:
    """Real patches bool [G, 32, 32] -> position ids int64 [G, 1024].

    With nh, nw real rows and columns: floor(r * 32 / nh) * 32 + floor(c * 32 / nw) for real patches, 0 for padded.
    Source: NaViT, arXiv 2307.06304, section 2.1, as the original buckets fractional coordinates.
    """
    ones = op.Cast(real, to=INT64)
    rows = op.Max(op.ReduceSum(op.Slice(ones, [0], [1], [2]), [1], keepdims=1), op.Constant(value_ints=[1]))
    columns = op.Max(op.ReduceSum(op.Slice(ones, [0], [1], [1]), [2], keepdims=1), op.Constant(value_ints=[1]))
    steps = [i * SIDE for i in range(SIDE)]
    down = op.Div(op.Reshape(op.Constant(value_ints=steps), [1, SIDE, 1]), rows)
    across = op.Div(op.Reshape(op.Constant(value_ints=steps), [1, 1, SIDE]), columns)
    return op.Reshape(op.Mul(op.Add(op.Mul(down, SIDE), across), ones), [-1, PATCHES])


def arrange(op: OpBuilder, grid: CropGrid, real_patches: ir.Value, separator: ir.Value) -> ir.Value:
    """Which row of the table of cells every token is, int64 [tokens].

    Per image: the sub-image cut to its real cells, each row closed by sub_GN; glb_GN; the 16 x 16 cells of the global
    crop, each row closed by sub_GN ("sub_glb"). `separator` is the row of sub_GN, the next one that of glb_GN.
    """
    down = _count_up_to(op, op.Mul(op.ReduceMax(grid.rows, keepdims=0), CELLS), [1, -1, 1])
    across = _count_up_to(op, op.Mul(op.ReduceMax(grid.columns, keepdims=0), CELLS), [1, 1, -1])
    inside_rows, inside_columns = op.Less(down, op.Mul(grid.rows, CELLS)), op.Less(across, op.Mul(grid.columns, CELLS))
    inside = op.And(inside_rows, inside_columns)
    crop = op.Add(op.Add(op.Mul(op.Div(down, CELLS), grid.columns), op.Div(across, CELLS)), 1)
    cell = op.Add(op.Mul(op.Mod(down, CELLS), CELLS), op.Mod(across, CELLS))
    source = op.Add(op.Mul(op.Add(grid.first, crop), CELLS * CELLS), cell)
    source = op.Where(inside, source, 0)

    every_other = op.Slice(real_patches, [0, 0], [SIDE, SIDE], [1, 2], [2, 2])
    real = op.Gather(op.Reshape(op.Cast(every_other, to=INT64), [-1]), source, axis=0)
    real = op.Where(inside, real, 0)
    used_rows = op.ReduceSum(op.Slice(real, [0], [1], [2]), [1], keepdims=1)
    used_columns = op.ReduceSum(op.Slice(real, [0], [1], [1]), [2], keepdims=1)

    row_wanted = op.Less(down, used_rows)
    sub_rows = op.Where(op.Less(across, used_columns), source, -1)
    sub_rows = op.Where(row_wanted, sub_rows, -1)
    row_ends = op.Where(row_wanted, separator, -1)
    sub = _rows_of(op, grid, op.Concat(sub_rows, row_ends, axis=2))

    of_global = op.Constant(value_ints=[CELLS * r + c for r in range(CELLS) for c in range(CELLS)])
    cells = op.Add(op.Mul(grid.first, CELLS * CELLS), op.Reshape(of_global, [1, CELLS, CELLS]))
    ends = op.Expand(separator, op.Concat(op.Shape(grid.first, start=0, end=1), [CELLS, 1], axis=0))
    whole = _rows_of(op, grid, op.Concat(cells, ends, axis=2))
    between = op.Expand(op.Add(separator, 1), op.Concat(op.Shape(grid.first, start=0, end=1), [1], axis=0))

    flat = op.Reshape(op.Concat(sub, between, whole, axis=1), [-1])
    return op.Compress(flat, op.GreaterOrEqual(flat, 0), axis=0)


def _rows_of(op: OpBuilder, grid: CropGrid, indices: ir.Value) -> ir.Value:
    """[N, rows, columns] -> [N, rows * columns]."""
    return op.Reshape(indices, op.Concat(op.Shape(grid.first, start=0, end=1), [-1], axis=0))


def _count_up_to(op: OpBuilder, limit: ir.Value, shape: list[int]) -> ir.Value:
    return op.Reshape(op.Range(0, limit, 1), shape)


def tower_linear(width_in: int, width_out: int, compute: FloatType, name: str | None = None) -> Linear:
    """A Linear of the encoders."""
    return Linear(tower_affine(width_in, width_out, compute), name)


def tower_affine(width_in: int, width_out: int, compute: FloatType) -> Affine:
    """Float weights with bias, stored [in, out] for a plain MatMul: the form every quantizer knows."""
    return Affine(width_in, width_out, Dense(compute), compute, bias=True, transposed=True)
