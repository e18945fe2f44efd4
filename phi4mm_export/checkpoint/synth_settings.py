"""What a synthetic checkpoint can be asked for: the sizes, and every setting that `--set` takes."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from phi4mm_export.errors import UsageError, some
from phi4mm_export.spec.model import SIGLIP_HEADS, AudioDims, Layout, LongRope, ModelConfig, Role, VisionDims

REAL_VOCAB_SIZE = 200064
"""Ids of the real tokenizer, which every synthetic tokenizer holds in full."""
TILE = 16
"""Head size and rotary size are multiples of it (cos/sin caches of GroupQueryAttention)."""


# fmt: off
REAL_LONG_FACTORS: tuple[float, ...] = (
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
    16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
    32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)
# fmt: on
"""`rope_scaling.long_factor` of the real config.json, as spelled there."""


class Size(StrEnum):
    """`tiny` for tests, `oracle` for the stored goldens, `full` for the real dimensions (11 GB)."""

    TINY = "tiny"
    ORACLE = "oracle"
    FULL = "full"


class WeightStyle(StrEnum):
    """`plain`: bell-shaped numbers; `heavy`: Student-t tails and outlier channels, for quantization tests."""

    PLAIN = "plain"
    HEAVY = "heavy"


Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]


class SynthSettings(BaseModel):
    """Every dimension and file option of one synthetic checkpoint; the defaults are those of size `oracle`.

    Real constants are not settings: token ids, 448-pixel crops of 14-pixel patches, 16 SigLIP heads, 80 mel bands,
    8 times subsampling, feature layer -2.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    hidden_size: Count = 256
    intermediate_size: Count = 320
    num_hidden_layers: Count = 3
    num_attention_heads: Count = 4
    num_key_value_heads: Count = 2
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.75
    vocab_size: Annotated[int, Field(ge=REAL_VOCAB_SIZE)] = REAL_VOCAB_SIZE
    tie_word_embeddings: bool = True
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 10000.0
    max_position_embeddings: Count = 131072
    original_max_position_embeddings: Annotated[int, Field(gt=1)] = 4096
    sliding_window: Count = 262144
    short_factor_step: Annotated[float, Field(ge=0)] = 0.01
    """Short LongRoPE factor i is 1 + i * step; the real ones are all 1."""

    vision_lora_r: Count = 16
    vision_lora_alpha: Count = 32
    speech_lora_r: Count = 20
    speech_lora_alpha: Count = 30

    vision_hidden_size: Count = 128
    vision_intermediate_size: Count = 176
    vision_num_hidden_layers: Annotated[int, Field(ge=2)] = 4

    audio_attention_dim: Count = 64
    audio_attention_heads: Count = 4
    audio_linear_units: Count = 96
    audio_num_blocks: Count = 3
    audio_kernel_size: Count = 3
    audio_conv_channels: Count = 32
    t5_bias_max_distance: Count = 500

    shards: Annotated[int, Field(gt=0, le=99999)] = 2
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    fp32_pattern: str = ""
    """Tensors whose original name contains this text are stored as float32 (empty: none)."""
    adapter_prefix: str = ""
    """Native layout: put before every tensor name of the adapter files (PEFT writes `base_model.model.`)."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def lora_rank(self, role: Role) -> int:
        """Rank r of a built-in adapter."""
        return self.vision_lora_r if role is Role.VISION else self.speech_lora_r

    def lora_alpha(self, role: Role) -> int:
        """Alpha of a built-in adapter; its scale is alpha / r."""
        return self.vision_lora_alpha if role is Role.VISION else self.speech_lora_alpha

    @model_validator(mode="after")
    def _dimensions_agree(self) -> SynthSettings:
        faults = [text for bad, text in self._faults() if bad]
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def _faults(self) -> Iterable[tuple[bool, str]]:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        yield (
            self.hidden_size % heads != 0 or self.head_dim % TILE != 0,
            f"hidden_size / num_attention_heads is {self.hidden_size / heads:g}, expected a multiple of {TILE}",
        )
        yield (
            self.rotary_dim % TILE != 0 or self.rotary_dim == 0,
            f"the rotary dimension is {self.rotary_dim}, expected a multiple of {TILE}",
        )
        yield heads % kv_heads != 0, f"{heads} attention heads are no multiple of {kv_heads} key-value heads"
        yield (
            self.vision_hidden_size % SIGLIP_HEADS != 0,
            f"vision_hidden_size is {self.vision_hidden_size}, expected a multiple of its {SIGLIP_HEADS} heads",
        )
        yield (
            self.audio_attention_dim % self.audio_attention_heads != 0,
            f"audio_attention_dim {self.audio_attention_dim} is no multiple of {self.audio_attention_heads} heads",
        )
        yield (
            self.original_max_position_embeddings > self.max_position_embeddings,
            f"original_max_position_embeddings {self.original_max_position_embeddings} exceeds "
            f"max_position_embeddings {self.max_position_embeddings}",
        )


DEFAULTS: dict[Size, SynthSettings] = {
    Size.ORACLE: SynthSettings(),
    Size.TINY: SynthSettings(
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vision_lora_r=8,
        vision_lora_alpha=16,
        speech_lora_r=12,
        speech_lora_alpha=18,
        vision_hidden_size=64,
        vision_intermediate_size=112,
        vision_num_hidden_layers=3,
        audio_num_blocks=2,
        audio_conv_channels=16,
    ),
    Size.FULL: SynthSettings(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=24,
        num_key_value_heads=8,
        short_factor_step=0.0,
        vision_lora_r=256,
        vision_lora_alpha=512,
        speech_lora_r=320,
        speech_lora_alpha=640,
        vision_hidden_size=1152,
        vision_intermediate_size=4304,
        vision_num_hidden_layers=27,
        audio_attention_dim=1024,
        audio_attention_heads=16,
        audio_linear_units=1536,
        audio_num_blocks=24,
        audio_conv_channels=1024,
        shards=3,
    ),
}


def settings_of(size: Size, pairs: Iterable[str] = ()) -> SynthSettings:
    """The settings of `size`, changed by `key=value` pairs; a value is JSON, or text where it is no JSON.

    Raises UsageError for an unknown key (with the nearest one), a value of the wrong type, and dimensions that do not
    go together; all faults of one kind are named together.
    """
    given = dict(_parse(pair) for pair in pairs)
    known = list(SynthSettings.model_fields)
    unknown = [key for key in given if key not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.0)
        raise UsageError(
            f"expected a known setting, found {some(unknown)}",
            where="--set",
            fix=f"the nearest name is {near[0]}; known are: {', '.join(known)}",
        )
    try:
        return SynthSettings.model_validate(DEFAULTS[size].model_dump() | given)
    except ValidationError as err:
        faults = [_sentence(fault["loc"], fault["msg"], fault["input"]) for fault in err.errors()]
        raise UsageError(some(faults), where="--set", fix="change the settings so that they agree") from err


def model_config(settings: SynthSettings, layout: Layout = Layout.ORIGINAL) -> ModelConfig:
    """The dimensions as the rest of the program knows them."""
    short, long = rope_factors(settings)
    return ModelConfig(
        layout=layout,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_hidden_layers,
        num_heads=settings.num_attention_heads,
        num_kv_heads=settings.num_key_value_heads,
        vocab_size=settings.vocab_size,
        rms_norm_eps=settings.rms_norm_eps,
        tied_head=settings.tie_word_embeddings,
        rope=LongRope(
            theta=settings.rope_theta,
            rotary_dim=settings.rotary_dim,
            short_factor=short,
            long_factor=long,
            max_positions=settings.max_position_embeddings,
            original_max_positions=settings.original_max_position_embeddings,
        ),
        vision=VisionDims(
            hidden_size=settings.vision_hidden_size,
            intermediate_size=settings.vision_intermediate_size,
            num_layers=settings.vision_num_hidden_layers,
        ),
        audio=AudioDims(
            hidden_size=settings.audio_attention_dim,
            num_heads=settings.audio_attention_heads,
            linear_units=settings.audio_linear_units,
            num_blocks=settings.audio_num_blocks,
            kernel_size=settings.audio_kernel_size,
            conv_channels=settings.audio_conv_channels,
            bias_max_distance=settings.t5_bias_max_distance,
        ),
        lora={role: (settings.lora_rank(role), float(settings.lora_alpha(role))) for role in Role},
    )


def rope_factors(settings: SynthSettings) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Short and long LongRoPE factors, rotary_dim / 2 of each; the long ones are the real ones, thinned out."""
    half = settings.rotary_dim // 2
    last = len(REAL_LONG_FACTORS) - 1
    short = tuple(round(1.0 + settings.short_factor_step * i, 3) for i in range(half))
    return short, tuple(REAL_LONG_FACTORS[round(i * last / (half - 1))] for i in range(half))


def _parse(pair: str) -> tuple[str, Any]:
    key, sign, text = pair.partition("=")
    if not sign or not key:
        raise UsageError(f"expected key=value, found {pair!r}", where="--set", fix="for example: --set shards=5")
    try:
        return key, json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return key, text


def _sentence(place: tuple[int | str, ...], message: str, found: object) -> str:
    if not place:
        return message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, place))}: {message[0].lower()}{message[1:]}, found {found!r}"
