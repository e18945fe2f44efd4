"""ModelConfig: one checkpoint's dimensions and constants, whichever layout it came in.

Letters used for shapes everywhere: B batch, S new tokens, P past tokens, T = P + S, H hidden size, V vocabulary,
N images or clips, C crops, F frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

IMAGE_TOKEN_ID = 200010
"""`<|endoftext10|>`: og 0.18 hard-codes it (its image_token_id key is read and ignored)."""
AUDIO_TOKEN_ID = 200011
"""`<|endoftext11|>`: hard-coded likewise."""
SIGLIP_HEADS = 16
"""Hard-coded in the original modelling code; the tensors do not show it."""
SIGLIP_EPS = 1e-6
IMAGE_SIZE, PATCH_SIZE = 448, 14
PATCHES_PER_SIDE = IMAGE_SIZE // PATCH_SIZE
CONFORMER_EPS = 1e-5
CONFORMER_CHUNK = 500
"""Subsampled frames per attention chunk of the original's long-audio path."""


class Layout(StrEnum):
    """How a checkpoint spells the model: Microsoft's remote code, or the classes built into transformers."""

    ORIGINAL = "original"
    NATIVE = "native"


class Role(StrEnum):
    """The two built-in adapters, named by what they serve."""

    VISION = "vision"
    SPEECH = "speech"


@dataclass(frozen=True)
class LongRope:
    """Rotary embedding with two sets of divisors (LongRoPE, arXiv 2402.13753, as Phi-3 uses it).

    The long set applies when the total length T exceeds `original_max_positions`; `scale` multiplies both
    the cosine and the sine tables.
    """

    theta: float
    rotary_dim: int
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    max_positions: int
    original_max_positions: int


@dataclass(frozen=True)
class VisionDims:
    """SigLIP tower: width, MLP width, number of stored layers (the last one is never run)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int = SIGLIP_HEADS
    eps: float = SIGLIP_EPS

    @property
    def used_layers(self) -> int:
        """Feature layer -2: every layer but the last runs."""
        return self.num_layers - 1


@dataclass(frozen=True)
class AudioDims:
    """Conformer encoder."""

    hidden_size: int
    num_heads: int
    linear_units: int
    num_blocks: int
    kernel_size: int
    conv_channels: int
    bias_max_distance: int
    num_mels: int = 80
    time_reduction: int = 8


@dataclass(frozen=True)
class ModelConfig:
    """Everything the graphs and the configs need to know about one model."""

    layout: Layout
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    rms_norm_eps: float
    tied_head: bool
    rope: LongRope
    vision: VisionDims
    audio: AudioDims
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    lora: dict[Role, tuple[int, float]] = field(default_factory=dict)
    """Rank and alpha that config.json states for the built-in adapters (original layout only)."""
    dynamic_hd: int = 36
    """Most sub-crops of one image, from preprocessor_config.json."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def qkv_size(self) -> int:
        """Rows of the packed q, k, v projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
