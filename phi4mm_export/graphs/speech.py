"""The speech graph: mean-variance normalisation, strided convolutions, conformer blocks, projection.

N clips, F log-mel frames, t = ceil(F / 8) subsampled frames, D conformer width, H hidden size of the decoder.
Above 500 subsampled frames the clip is cut into chunks that attend only within themselves, M chunks in all of c frames.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from phi4mm_export.graphs import fused
from phi4mm_export.graphs.layers import ONNX_FLOAT, LayerNorm, cast
from phi4mm_export.graphs.vision import MASKED, tower_affine, tower_linear
from phi4mm_export.spec.contract import FloatType
from phi4mm_export.spec.model import CONFORMER_CHUNK, CONFORMER_EPS, AudioDims, ModelConfig

INT64 = int(ir.DataType.INT64)


class Convolution(nn.Module):
    """A 2-d convolution of the front end."""

    def __init__(self, shape: list[int], compute: FloatType, *, stride: int, groups: int = 1) -> None:
        super().__init__()
        self.stride, self.groups, self.kernel = stride, groups, shape[2:]
        self.weight = nn.Parameter(shape, ONNX_FLOAT[compute])
        self.bias = nn.Parameter(shape[:1], ONNX_FLOAT[compute])

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        pad = self.kernel[0] // 2
        return op.Conv(x, self.weight, self.bias, strides=[self.stride] * 2, pads=[pad] * 4, group=self.groups)


class FrontEnd(nn.Module):
    """Three convolutions of stride 2, the last two depthwise with a pointwise one after.  [N, F, 80] -> [N, t, D]."""

    def __init__(self, dims: AudioDims, compute: FloatType) -> None:
        super().__init__()
        ch = dims.conv_channels
        self.conv_0 = self._named("conv.0", Convolution([ch, 1, 3, 3], compute, stride=2))
        self.depthwise = [
            self._named(f"conv.{i}", Convolution([ch, 1, 3, 3], compute, stride=2, groups=ch)) for i in (2, 5)
        ]
        self.pointwise = [self._named(f"conv.{i}", Convolution([ch, ch, 1, 1], compute, stride=1)) for i in (3, 6)]
        self.width = ch * (dims.num_mels // dims.time_reduction)
        self.out = tower_linear(self.width, dims.hidden_size, compute)

    @staticmethod
    def _named(name: str, module: Convolution) -> Convolution:
        module._set_name(name)
        return module

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        x = op.Relu(self.conv_0(op, op.Unsqueeze(x, [1])))
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            x = op.Relu(pointwise(op, depthwise(op, x)))
        rows = op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, self.width])
        return self.out(op, rows)


class FeedForward(nn.Module):
    """net.2(a * silu(b)) with a, b the halves of net.0(norm(x)).  [M, c, D] -> [M, c, D]."""

    def __init__(self, dims: AudioDims, compute: FloatType) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(dims.hidden_size, CONFORMER_EPS, compute)
        self.up = tower_linear(dims.hidden_size, 2 * dims.linear_units, compute, "net.0.linear")
        self.down = tower_linear(dims.linear_units, dims.hidden_size, compute, "net.2")

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        linear, gate = halves(op, self.up(op, self.layer_norm(op, x)))
        return self.down(op, op.Mul(linear, silu(op, gate)))


class SelfAttention(nn.Module):
    """Attention within a chunk with a relative position bias.  x [M, c, D], bias [M, heads, c, c] -> [M, c, D]."""

    def __init__(self, dims: AudioDims, compute: FloatType) -> None:
        super().__init__()
        self.num_heads = dims.num_heads
        for name in ("linear_q", "linear_k", "linear_v", "linear_out"):
            setattr(self, name, tower_linear(dims.hidden_size, dims.hidden_size, compute))

    def forward(self, op: OpBuilder, x: ir.Value, bias: ir.Value) -> ir.Value:
        q, k, v = self.linear_q(op, x), self.linear_k(op, x), self.linear_v(op, x)
        return self.linear_out(op, fused.multi_head_attention(op, q, k, v, bias, num_heads=self.num_heads))


class ConvModule(nn.Module):
    """Gated pointwise, causal depthwise, two pointwise products.  [M, c, D] -> [M, c, D].

    The 1 x 1 convolutions are Linears: their kernels [out, in, 1] hold the same bytes as [out, in].
    """

    def __init__(self, dims: AudioDims, compute: FloatType) -> None:
        super().__init__()
        d, kind = dims.hidden_size, ONNX_FLOAT[compute]
        self.kernel_size, self.width = dims.kernel_size, d
        self.layer_norm = LayerNorm(d, CONFORMER_EPS, compute)
        self.expand = tower_linear(d, 2 * d, compute, "glu.ext_pw_conv_1d")
        self.b1 = nn.Parameter([d], kind, "glu.b1")
        self.b2 = nn.Parameter([d], kind, "glu.b2")
        self.kernel = nn.Parameter([d, 1, dims.kernel_size], kind, "dw_sep_conv_1d.dw_conv.weight")
        self.kernel_bias = nn.Parameter([d], kind, "dw_sep_conv_1d.dw_conv.bias")
        self.pointwise = tower_linear(d, d, compute, "dw_sep_conv_1d.pw_conv")
        self.contract = tower_linear(d, d, compute, "ext_pw_conv_1d")

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        linear, gate = halves(op, self.expand(op, self.layer_norm(op, x)))
        y = op.Mul(op.Add(linear, self.b1), silu(op, op.Add(gate, self.b2)))
        y = op.Transpose(y, perm=[0, 2, 1])
        y = op.Conv(y, self.kernel, self.kernel_bias, group=self.width, pads=[self.kernel_size - 1, 0])
        y = self.pointwise(op, op.Transpose(y, perm=[0, 2, 1]))
        return self.contract(op, silu(op, y))


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, norm.  [M, c, D] -> [M, c, D]."""

    def __init__(self, dims: AudioDims, compute: FloatType) -> None:
        super().__init__()
        self.feed_forward_in = FeedForward(dims, compute)
        self.layer_norm_att = LayerNorm(dims.hidden_size, CONFORMER_EPS, compute)
        self.self_attn = SelfAttention(dims, compute)
        self.conv = ConvModule(dims, compute)
        self.feed_forward_out = FeedForward(dims, compute)
        self.layer_norm = LayerNorm(dims.hidden_size, CONFORMER_EPS, compute)

    def forward(self, op: OpBuilder, x: ir.Value, bias: ir.Value) -> ir.Value:
        x = op.Add(x, op.Mul(self.feed_forward_in(op, x), 0.5))
        x = op.Add(x, self.self_attn(op, self.layer_norm_att(op, x), bias))
        x = op.Add(x, self.conv(op, x))
        x = op.Add(x, op.Mul(self.feed_forward_out(op, x), 0.5))
        return self.layer_norm(op, x)


class Conformer(nn.Module):
    """frames [N, F, 80], mask bool [N, F] -> [N, t', D] with t' = t rounded up to whole chunks."""

    def __init__(self, dims: AudioDims, compute: FloatType) -> None:
        super().__init__()
        kind = ONNX_FLOAT[compute]
        self.dims, self.compute = dims, compute
        self.mean = nn.Parameter([dims.num_mels], kind, "encoder_embedding.global_mean")
        self.invstd = nn.Parameter([dims.num_mels], kind, "encoder_embedding.global_invstd")
        self.embed = FrontEnd(dims, compute)
        self.bias_values = nn.Parameter(
            [2 * dims.bias_max_distance, dims.num_heads], kind, "relative_attention_bias_layer.bias_values.weight"
        )
        self.encoders = nn.ModuleList([ConformerBlock(dims, compute) for _ in range(dims.num_blocks)])

    def forward(self, op: OpBuilder, frames: ir.Value, mask: ir.Value) -> ir.Value:
        x = self.embed(op, op.Mul(op.Sub(frames, self.mean), self.invstd))
        length = op.Shape(x, start=1, end=2)
        chunk = op.Min(length, op.Constant(value_ints=[CONFORMER_CHUNK]))
        padding = op.Mod(op.Sub(chunk, op.Mod(length, chunk)), chunk)
        x = op.Pad(x, op.Concat([0, 0, 0, 0], padding, [0], axis=0))
        x = op.Reshape(x, op.Concat([-1], chunk, [self.dims.hidden_size], axis=0))
        bias = op.Add(self._relative_bias(op, chunk), self._key_bias(op, mask, length, padding, chunk))
        for block in self.encoders:
            x = block(op, x, bias)
        return op.Reshape(x, op.Concat(op.Shape(frames, start=0, end=1), [-1, self.dims.hidden_size], axis=0))

    def _relative_bias(self, op: OpBuilder, chunk: ir.Value) -> ir.Value:
        """bias_values[clamp(j - i, -M, M - 1) + M] per head, [1, heads, c, c].  Source: T5, arXiv 1910.10683, 2.1."""
        most = self.dims.bias_max_distance
        at = op.Range(0, op.Squeeze(chunk, [0]), 1)
        offset = op.Sub(op.Unsqueeze(at, [0]), op.Unsqueeze(at, [1]))
        row = op.Add(op.Max(op.Min(offset, most - 1), -most), most)
        return op.Unsqueeze(op.Transpose(op.Gather(self.bias_values, row, axis=0), perm=[2, 0, 1]), [0])

    def _key_bias(
        self, op: OpBuilder, mask: ir.Value, length: ir.Value, padding: ir.Value, chunk: ir.Value
    ) -> ir.Value:
        """0 for real frames, a large negative number for the others, [M, 1, 1, c]; real: below ceil(ones / 8)."""
        ones = op.ReduceSum(op.Cast(mask, to=INT64), [1], keepdims=1)
        reduction = self.dims.time_reduction
        real = op.Div(op.Add(ones, reduction - 1), reduction)
        at = op.Range(0, op.Squeeze(op.Add(length, padding), [0]), 1)
        is_padding = op.GreaterOrEqual(op.Unsqueeze(at, [0]), real)
        bias = op.Mul(op.Cast(is_padding, to=int(ONNX_FLOAT[self.compute])), MASKED[self.compute] / 2)
        return op.Reshape(bias, op.Concat([-1, 1, 1], chunk, axis=0))


class AudioEmbed(nn.Module):
    """audio_embeds [N, F, 80], mask bool [N, F], sizes [N], mode [1] -> audio_features [sum(sizes), H]."""

    def __init__(self, config: ModelConfig, compute: FloatType) -> None:
        super().__init__("model.embed_tokens_extend.audio_embed")
        d, h = config.audio.hidden_size, config.hidden_size
        self.compute = ONNX_FLOAT[compute]
        self.encoder = Conformer(config.audio, compute)
        self.width, self.hidden_size = d, h
        self.projections = {
            name: tuple(
                tower_affine(width, h, compute).register(self, f"audio_projection.{name}.{i}.")
                for i, width in ((0, d), (2, h))
            )
            for name in ("speech", "vision")
        }

    def forward(self, op: OpBuilder, frames: ir.Value, mask: ir.Value, sizes: ir.Value, mode: ir.Value) -> ir.Value:
        x = self.encoder(op, cast(op, frames, self.compute), mask)
        rows = op.Compress(op.Reshape(x, [-1, self.width]), self._is_wanted(op, x, sizes), axis=0)
        return self._project(op, rows, mode)

    @staticmethod
    def _is_wanted(op: OpBuilder, x: ir.Value, sizes: ir.Value) -> ir.Value:
        """The first sizes[i] rows of every clip, bool [N * t']."""
        at = op.Range(0, op.Squeeze(op.Shape(x, start=1, end=2), [0]), 1)
        return op.Reshape(op.Less(op.Unsqueeze(at, [0]), op.Unsqueeze(sizes, [1])), [-1])

    def _project(self, op: OpBuilder, rows: ir.Value, mode: ir.Value) -> ir.Value:
        """The "vision" projection for modes 1 and 3 (an image is there), else "speech"."""
        with_image = op.Equal(op.Mod(op.Squeeze(mode), 2), 1)
        kind, dims = fused.dtype_of(rows), ("num_audio_tokens", self.hidden_size)

        def branch(name: str) -> ir.Graph:
            up, down = self.projections[name]
            result = ir.Value(name=f"{name}_features", type=ir.TensorType(kind), shape=ir.Shape(list(dims)))
            return op.builder.subgraph(
                lambda sub: down(sub, sub.Gelu(up(sub, rows))), [], [result], name=f"project_{name}"
            )

        out = op.If(with_image, then_branch=branch("vision"), else_branch=branch("speech"))
        return fused.set_type(out, kind, dims)


def halves(op: OpBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """[..., 2D] -> its two halves [..., D]."""
    first, second = op.Split(x, num_outputs=2, axis=-1, _outputs=2)
    return first, second


def silu(op: OpBuilder, x: ir.Value) -> ir.Value:
    """x * sigmoid(x)."""
    return op.Mul(x, op.Sigmoid(x))
