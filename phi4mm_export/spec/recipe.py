"""What the user chose, resolved: formats of weights, the LoRA form, the float type.

`Recipe.resolve` fills every default; graphs, configs and the plan read only the resolved values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from phi4mm_export.errors import UsageError
from phi4mm_export.spec.contract import Component, FloatType, PackageLayout, Provider
from phi4mm_export.spec.model import Role

INT8_BLOCK = 128
"""Default block of INT8 weights: fastest measured on CPU, its error far below INT4's (docs/export.md)."""
INT4_BLOCK = 32
"""Default block of INT4 weights rounded to nearest: 128 is faster, but loses a quarter more signal without GPTQ."""
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""What MatMulNBits and GatherBlockQuantized take on both providers."""
CPU_ACCURACY_LEVEL = 4
"""int8 activations on CPU: 13 to 20 times faster for INT8 weights, relative error 6e-3 per product (docs/export.md)."""


class Precision(StrEnum):
    """How weights are stored."""

    INT8 = "int8"
    INT4 = "int4"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def bits(self) -> int | None:
        """Bits of an integer format, None for a float format."""
        return {"int8": 8, "int4": 4}.get(self.value)

    @property
    def float_type(self) -> FloatType | None:
        """The float type of a float format, None for an integer format."""
        return {"fp16": FloatType.FLOAT16, "fp32": FloatType.FLOAT32}.get(self.value)


class LoraForm(StrEnum):
    """How the adapters reach the decoder (docs/export.md compares them)."""

    GATED = "gated"
    MERGED = "merged"
    BRANCH = "branch"
    ADAPTERS = "adapters"


@dataclass(frozen=True)
class Dense:
    """Float weights, stored as `storage`; the graph casts them when it computes in another type."""

    storage: FloatType


@dataclass(frozen=True)
class Blockwise:
    """Integer codes with one scale per `block_size` inputs of a row (MatMulNBits), symmetric."""

    bits: int
    block_size: int
    accuracy_level: int = 0
    rotate: bool = False
    """Whether inputs are mixed in groups of channels, and rows of weights alike (weights/rotation.py)."""

    def block_for(self, width: int) -> int:
        """The block for rows of `width` values: `block_size`, or a smaller one (at least 32) that divides the row
        where `block_size` does not; never larger than the row rounded up to a power of two."""
        block = self.block_size
        while block > 16 and block >= 2 * width:
            block //= 2
        smaller = block
        while smaller >= 32:
            if width % smaller == 0:
                return smaller
            smaller //= 2
        return block


WeightFormat = Dense | Blockwise


@dataclass(frozen=True)
class Recipe:
    """Every choice of an export, resolved."""

    provider: Provider = Provider.CPU
    precision: Precision = Precision.INT8
    encoder_precision: Precision = Precision.FP32
    embedding_precision: Precision = Precision.FP32
    lora_precision: Precision = Precision.INT8
    block_size: int = INT8_BLOCK
    accuracy_level: int = CPU_ACCURACY_LEVEL
    rotate: bool = True
    """Whether the decoder's layers mix the channels of their inputs before integer products."""
    lora: LoraForm = LoraForm.GATED
    adapter: Role | None = Role.VISION
    """The adapter of the merged and branch forms; None bakes none."""
    layout: PackageLayout = PackageLayout.FLAT
    full_logits: bool = False
    float_type: FloatType = FloatType.FLOAT32
    components: tuple[Component, ...] = field(default=tuple(Component))
    table_is_shared: bool = False
    """Whether the embedding graph reads the decoder's head as its table (decided with the checkpoint at hand)."""

    @staticmethod
    def resolve(
        *,
        provider: Provider = Provider.CPU,
        precision: Precision = Precision.INT8,
        encoder_precision: Precision | None = None,
        embedding_precision: Precision | None = None,
        lora_precision: Precision | None = None,
        block_size: int | None = None,
        accuracy_level: int | None = None,
        rotate: bool | None = None,
        lora: LoraForm = LoraForm.GATED,
        adapter: Role | None = Role.VISION,
        layout: PackageLayout = PackageLayout.FLAT,
        full_logits: bool = False,
        components: tuple[Component, ...] = (),
    ) -> Recipe:
        """Fill the defaults: float type by provider, LoRA as the base, block and accuracy level as measured best.

        Raises UsageError for combinations that no runtime can serve.
        """
        float_type = precision.float_type or provider.float_type
        if provider is Provider.CUDA and float_type is FloatType.FLOAT32:
            raise UsageError(
                "an fp32 decoder cannot run on CUDA: GroupQueryAttention has no float32 kernel there",
                where="--precision fp32 --ep cuda",
                fix="choose --precision fp16, int8 or int4, or --ep cpu",
            )
        plain = Precision.FP16 if float_type is FloatType.FLOAT16 else Precision.FP32
        encoder = encoder_precision or plain
        if encoder.bits is not None:
            raise UsageError(
                f"the encoders are exported as fp16 or fp32, found {encoder}",
                where="--encoder-precision",
                fix="export them in float, then run phi4mm quantize",
            )
        chosen_lora = lora_precision or precision
        if lora is LoraForm.ADAPTERS:
            if chosen_lora.bits is not None and lora_precision is not None:
                raise UsageError(
                    f"adapter files hold float weights, found {chosen_lora}",
                    where="--lora-precision",
                    fix="leave it out with --lora adapters",
                )
            chosen_lora = plain
        if block_size is not None and block_size not in BLOCK_SIZES:
            raise UsageError(
                f"the block size must be one of {', '.join(map(str, BLOCK_SIZES))}, found {block_size}",
                where="--block-size",
            )
        if accuracy_level is not None and accuracy_level not in range(5):
            raise UsageError(f"the accuracy level must be 0 to 4, found {accuracy_level}", where="--accuracy-level")
        level = accuracy_level
        if level is None:
            level = CPU_ACCURACY_LEVEL if provider is Provider.CPU else 0
        has_codes = precision.bits is not None
        if rotate and not has_codes:
            raise UsageError(
                f"only integer weights are rotated, the decoder's are {precision}",
                where="--rotate",
                fix="leave it out, or choose --precision int8 or int4",
            )
        return Recipe(
            provider=provider,
            precision=precision,
            encoder_precision=encoder,
            embedding_precision=embedding_precision or plain,
            lora_precision=chosen_lora,
            block_size=block_size or (INT4_BLOCK if precision is Precision.INT4 else INT8_BLOCK),
            accuracy_level=level,
            rotate=has_codes and level == CPU_ACCURACY_LEVEL if rotate is None else rotate,
            lora=lora,
            adapter=adapter,
            layout=layout,
            full_logits=full_logits,
            float_type=float_type,
            components=components or tuple(Component),
        )

    def format_of(self, precision: Precision, *, rotate: bool = False) -> WeightFormat:
        """The weight format that a precision means under this recipe."""
        if precision.bits is None:
            return Dense(precision.float_type or self.float_type)
        return Blockwise(precision.bits, self.block_size, self.accuracy_level, rotate)

    @property
    def decoder_format(self) -> WeightFormat:
        """Of the layers' products."""
        return self.format_of(self.precision, rotate=self.rotate)

    @property
    def head_format(self) -> WeightFormat:
        """Of the output head, which is never rotated: its rows can be the token table's."""
        return self.format_of(self.precision)

    @property
    def lora_format(self) -> WeightFormat:
        return self.format_of(self.lora_precision, rotate=self.rotate)

    @property
    def embedding_format(self) -> WeightFormat:
        return self.format_of(self.embedding_precision)

    @property
    def encoder_float(self) -> FloatType:
        """The type the encoders store and compute in."""
        return self.encoder_precision.float_type or self.float_type

    @property
    def shares_table(self) -> bool:
        """Whether head and table could be one stretch of bytes: same stored form, one folder, both written."""
        return (
            self.layout is PackageLayout.FLAT
            and self.embedding_precision is self.precision
            and {Component.DECODER, Component.EMBEDDING} <= set(self.components)
        )
