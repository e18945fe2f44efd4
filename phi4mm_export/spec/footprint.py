"""What a package takes at run time beside its weights: cache, logits, activations, by tokens, crops and seconds.

Terms are named after the tensors that they count; the few factors that are measured say so. Activations are float32
on the CPU whatever the weights are: ONNX Runtime has few float16 kernels there and casts. Measured with
`scripts/bench_memory.py` on ONNX Runtime 1.32 (docs/plan.md has the table).
"""

from __future__ import annotations

from dataclasses import dataclass

from phi4mm_export.spec.contract import FloatType, Provider
from phi4mm_export.spec.model import CONFORMER_CHUNK, IMAGE_SIZE, PATCHES_PER_SIDE, AudioDims, ModelConfig, VisionDims
from phi4mm_export.spec.phi4mm_config import ITEM_NBYTES

MIB = 1 << 20
FRAMES_PER_SECOND = 100
"""Log-mel frames: one every 10 ms."""
RUNTIME_NBYTES = 60 * MIB
"""ONNX Runtime GenAI loaded with four graphs, without their weights (measured)."""
TOKENIZER_NBYTES = 47 * MIB
"""The tokenizer and the processors, 200,064 tokens (measured)."""
FIRST_RUN_NBYTES = 33 * MIB
"""Threads, kernels' own workspaces, pages of code that a first run touches (measured)."""
UNSHARED = 1.8
"""The MLP's buffers find almost no freed memory of the right size: the arena grows by regions (measured)."""
SHARED_WITH_SCORES = 0.7
"""Share of the freed attention scores that the MLP's buffers then reuse (measured)."""


@dataclass(frozen=True)
class DecoderDims:
    """The decoder's sizes, from a checkpoint's config or from a package's graph."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int

    @staticmethod
    def of(config: ModelConfig) -> DecoderDims:
        """The sizes of a checkpoint."""
        return DecoderDims(
            config.hidden_size,
            config.intermediate_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            config.rope.max_positions,
        )

    @property
    def qkv_size(self) -> int:
        """Rows of the packed projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def kv_nbytes_per_token(dims: DecoderDims, float_type: FloatType) -> int:
    """Key and value cache per token of max_length: 131,072 B in float16 on the real model."""
    return 2 * dims.num_layers * dims.num_kv_heads * dims.head_dim * ITEM_NBYTES[float_type]


def logits_nbytes(dims: DecoderDims, float_type: FloatType, positions: int) -> int:
    """Logits of that many positions: 1,338,028,032 B for 3,344 in float16 on the real model."""
    return positions * dims.vocab_size * ITEM_NBYTES[float_type]


def scores_nbytes(dims: DecoderDims, tokens: int) -> int:
    """Attention scores that a prompt of `tokens` touches on the CPU, float32 [heads, S, S]; one layer at a time."""
    return 4 * dims.num_heads * tokens * tokens


def scores_reserved_nbytes(dims: DecoderDims, tokens: int, max_length: int) -> int:
    """Address space that the CPU operator reserves for the scores: its rows are as long as the cache, max_length."""
    return 4 * dims.num_heads * tokens * max_length


def prompt_nbytes(dims: DecoderDims, provider: Provider, float_type: FloatType, tokens: int) -> int:
    """Activations of a prompt: what attention holds, and the MLP's buffers beyond what they reuse of it.

    On CUDA no scores are stored (flash attention); that figure is not measured.
    """
    item = 4 if provider is Provider.CPU else ITEM_NBYTES[float_type]
    streams = 3 * dims.hidden_size
    mlp = item * tokens * (4 * dims.intermediate_size + streams)
    attention = item * tokens * (dims.qkv_size + streams)
    if provider is Provider.CUDA:
        return max(mlp, attention)
    scores = scores_nbytes(dims, tokens)
    return attention + scores + max(0, round(UNSHARED * mlp - SHARED_WITH_SCORES * scores))


def vision_nbytes(vision: VisionDims, provider: Provider, float_type: FloatType, crops: int) -> int:
    """Widest activations of the vision encoder; `crops` counts the global one. Scores are the largest part.

    Per crop: scores [heads, 1024, 1024], the bias [1024, 1024] twice, two MLP widths, six model widths, pixels twice.
    On CUDA the scores stay inside the kernel, the bias does not (not measured).
    """
    item = 4 if provider is Provider.CPU else ITEM_NBYTES[float_type]
    patches = PATCHES_PER_SIDE * PATCHES_PER_SIDE
    scores = vision.num_heads * patches * patches if provider is Provider.CPU else 0
    wide = patches * (2 * vision.intermediate_size + 6 * vision.hidden_size)
    return item * crops * (scores + 2 * patches * patches + wide + 2 * 3 * IMAGE_SIZE * IMAGE_SIZE)


def speech_nbytes(audio: AudioDims, provider: Provider, float_type: FloatType, seconds: float) -> int:
    """Widest activations of the speech encoder: the first convolution's output, and the chunk's position bias.

    The first convolution makes [channels, F / 2, mels / 2], the second a quarter of it; the relative bias
    [heads, c, c] is alive in five forms while it is built, with c at most 500 subsampled frames.
    """
    item = 4 if provider is Provider.CPU else ITEM_NBYTES[float_type]
    frames = round(seconds * FRAMES_PER_SECOND)
    front = audio.conv_channels * -(-frames // 2) * (audio.num_mels // 2)
    chunk = min(CONFORMER_CHUNK, -(-frames // audio.time_reduction))
    return item * (front + front // 4 + 5 * audio.num_heads * chunk * chunk)
