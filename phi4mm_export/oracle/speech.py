"""The original's audio path: normalisation, subsampling, conformer with 500-frame chunks, projection.

Letters: N clips, F log-mel frames, T = ceil(F / 8) subsampled frames, D the encoder's width, H the decoder's width.
Each step is a method, so that a test can replace one by a deliberate mistake.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from phi4mm_export.oracle.weights import Weights, lowest, softmax
from phi4mm_export.spec.model import CONFORMER_CHUNK, CONFORMER_EPS, AudioDims

PREFIX = "model.embed_tokens_extend.audio_embed."
ENCODER = f"{PREFIX}encoder."
VISION_MODES = (1, 3)
"""`audio_projection_mode` values that select the projection trained beside images."""


class Speech:
    """log-mel frames -> audio features."""

    def __init__(self, dims: AudioDims, weights: Weights) -> None:
        self.dims, self.weights = dims, weights

    def __call__(self, audio_embeds: Tensor, audio_attention_mask: Tensor, audio_sizes: Tensor, mode: int) -> Tensor:
        """Features of all clips, one clip after another.

        audio_embeds [N, F, 80] float; audio_attention_mask bool [N, F]; audio_sizes int64 [N], rows each clip keeps;
        mode 0..3.  Returns [sum(audio_sizes), H].
        """
        x = self.encode(audio_embeds, audio_attention_mask)
        x = torch.cat([x[clip, : int(size)] for clip, size in enumerate(audio_sizes)])
        kind = "vision" if mode in VISION_MODES else "speech"
        x = self.projection_activation(self.weights.linear(x, f"{PREFIX}audio_projection.{kind}.0"))
        return self.weights.linear(x, f"{PREFIX}audio_projection.{kind}.2")

    def projection_activation(self, x: Tensor) -> Tensor:
        """The projections' activation: exact GELU."""
        return functional.gelu(x)

    def encode(self, frames: Tensor, mask: Tensor) -> Tensor:
        """[N, F, 80], bool [N, F] -> [N, T, D]."""
        x = self.subsample(self.normalise(frames.to(self.weights.dtype)))
        clips, length, width = x.shape
        real = torch.arange(length)[None] < torch.ceil(mask.sum(1) / self.dims.time_reduction)[:, None]
        chunk = self.chunk(length)
        padding = -length % chunk
        x = functional.pad(x, (0, 0, 0, padding)).reshape(-1, chunk, width)
        real = functional.pad(real, (0, padding)).reshape(-1, chunk)
        keys = self.attended(torch.arange(chunk)[None] < real.sum(1)[:, None])
        bias = self.bias(chunk)
        for block in range(self.dims.num_blocks):
            x = self.block(x, keys, bias, f"{ENCODER}encoders.{block}.")
        return x.reshape(clips, -1, width)[:, :length]

    def chunk(self, length: int) -> int:
        """Frames that attend to each other: all of them up to 500, else 500."""
        return min(length, CONFORMER_CHUNK)

    def normalise(self, frames: Tensor) -> Tensor:
        """Global mean and variance normalisation, both [80]."""
        mean = self.weights(f"{ENCODER}encoder_embedding.global_mean")
        return (frames - mean) * self.weights(f"{ENCODER}encoder_embedding.global_invstd")

    def subsample(self, x: Tensor) -> Tensor:
        """Three convolutions of stride 2, zero-padded on both sides: [N, F, 80] -> [N, T, D]."""
        x = functional.relu(self.conv2d(x[:, None], "0", stride=2))
        for depthwise, pointwise in (("2", "3"), ("5", "6")):
            x = self.conv2d(x, depthwise, stride=2, groups=x.shape[1])
            x = functional.relu(self.conv2d(x, pointwise))
        return self.weights.linear(x.transpose(1, 2).flatten(2), f"{ENCODER}embed.out")

    def conv2d(self, x: Tensor, step: str, *, stride: int = 1, groups: int = 1) -> Tensor:
        """The convolution `embed.conv.STEP`; one of stride 2 pads one zero on every side."""
        name = f"{ENCODER}embed.conv.{step}"
        weight, bias = self.weights(f"{name}.weight"), self.weights(f"{name}.bias")
        return functional.conv2d(x, weight, bias, stride=stride, padding=stride - 1, groups=groups)

    def attended(self, real: Tensor) -> Tensor:
        """Which frames of a chunk may be attended to: bool [chunks, T]."""
        return real

    def bias(self, length: int) -> Tensor:
        """Relative attention bias [heads, T, T], one table for all blocks, clamped at the greatest distance."""
        distance = self.relative(length)
        far = self.dims.bias_max_distance
        table = self.weights(f"{ENCODER}relative_attention_bias_layer.bias_values.weight")
        return table[distance.clamp(-far, far - 1) + far].permute(2, 0, 1)

    def relative(self, length: int) -> Tensor:
        """Key position minus query position: int64 [T, T]."""
        position = torch.arange(length)
        return position[None] - position[:, None]

    def block(self, x: Tensor, keys: Tensor, bias: Tensor, name: str) -> Tensor:
        """One conformer block: [chunks, T, D] -> the same."""
        x = x + 0.5 * self.feed_forward(x, f"{name}feed_forward_in")
        x = x + self.attention(x, keys, bias, name)
        x = x + self.convolution(x, name)
        x = x + 0.5 * self.feed_forward(x, f"{name}feed_forward_out")
        return self.weights.layer_norm(x, f"{name}layer_norm", CONFORMER_EPS)

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        """Gated linear unit: first half linear, second half through SiLU."""
        y = self.weights.layer_norm(x, f"{name}.layer_norm", CONFORMER_EPS)
        linear, gate = self.halves(self.weights.linear(y, f"{name}.net.0.linear"))
        return self.weights.linear(linear * functional.silu(gate), f"{name}.net.2")

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The linear and the gate half of the last axis."""
        linear, gate = x.chunk(2, -1)
        return linear, gate

    def attention(self, x: Tensor, keys: Tensor, bias: Tensor, name: str) -> Tensor:
        """Self-attention with relative bias; masked keys get weight exactly 0."""
        chunks, length, width = x.shape
        heads = self.dims.num_heads
        y = self.weights.layer_norm(x, f"{name}layer_norm_att", CONFORMER_EPS)
        q, k, v = (
            self.weights.linear(y, f"{name}self_attn.linear_{part}").view(chunks, length, heads, -1).transpose(1, 2)
            for part in "qkv"
        )
        scores = q * (width // heads) ** -0.5 @ k.transpose(-1, -2) + bias
        mixed = self.masked_softmax(scores, keys[:, None, None, :]) @ v
        return self.weights.linear(mixed.transpose(1, 2).reshape(chunks, length, width), f"{name}self_attn.linear_out")

    def masked_softmax(self, scores: Tensor, keys: Tensor) -> Tensor:
        """Softmax over the real keys; a row without any real key becomes zero."""
        return softmax(scores.masked_fill(~keys, lowest(scores.dtype))).masked_fill(~keys, 0.0)

    def convolution(self, x: Tensor, name: str) -> Tensor:
        """Gated pointwise, causal depthwise and two pointwise convolutions over time."""
        y = self.weights.layer_norm(x, f"{name}conv.layer_norm", CONFORMER_EPS).transpose(1, 2)
        y = self.conv1d(y, f"{name}conv.glu.ext_pw_conv_1d")
        linear, gate = y.chunk(2, 1)
        y = (linear + self.weights(f"{name}conv.glu.b1")) * functional.silu(gate + self.weights(f"{name}conv.glu.b2"))
        y = functional.pad(y, self.convolution_padding())
        y = self.conv1d(y, f"{name}conv.dw_sep_conv_1d.dw_conv", groups=y.shape[1])
        y = functional.silu(self.conv1d(y, f"{name}conv.dw_sep_conv_1d.pw_conv"))
        return self.conv1d(y, f"{name}conv.ext_pw_conv_1d").transpose(1, 2)

    def convolution_padding(self) -> tuple[int, int]:
        """Zeros before and after the frames: all before, the convolution is causal."""
        return self.dims.kernel_size - 1, 0

    def conv1d(self, x: Tensor, name: str, *, groups: int = 1) -> Tensor:
        """1-D convolution with `NAME.weight` and `NAME.bias`."""
        return functional.conv1d(x, self.weights(f"{name}.weight"), self.weights(f"{name}.bias"), groups=groups)
