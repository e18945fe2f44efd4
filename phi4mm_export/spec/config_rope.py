"""The rotary embedding's keys of config.json: `rope_scaling` (original, transformers 4) or `rope_parameters`."""

from __future__ import annotations

import math

from phi4mm_export.errors import CheckpointError, some
from phi4mm_export.spec.json_fields import Fields, shown
from phi4mm_export.spec.model import LongRope

LONGROPE_NAMES = ("longrope", "su")
"""`su` is the older name of the same arithmetic."""
ROTARY_MULTIPLE = 16
"""GroupQueryAttention rotates half of it at a time, in steps of 8."""
DEFAULT_THETA = 10_000.0
DEFAULT_ORIGINAL_MAX = 4096

_FREE_KEYS = ("original_max_position_embeddings", "partial_rotary_factor", "rope_theta")
"""May stand at the top level, inside the rope section, or both."""
_KNOWN = {"type", "rope_type", "short_factor", "long_factor", "factor", "attention_factor", *_FREE_KEYS}


def parse_rope(config: Fields, *, head_dim: int, max_positions: int) -> LongRope:
    """The rotary embedding of the decoder.

    Raises CheckpointError for another rope type, for keys that would change the arithmetic, and where two
    spellings of one value differ.
    """
    rope = _section(config)
    unknown = sorted(key for key in rope if key not in _KNOWN and rope.get(key) is not None)
    if unknown:
        raise CheckpointError(
            f"{rope.path.rstrip('.')} holds {some(unknown)}, which no supported rotary embedding has",
            where=rope.where(unknown[0]),
            fix="remove the key if the model was trained without it",
        )
    _check_type(rope)
    partial = _free_number(config, rope, "partial_rotary_factor", 1.0)
    if partial > 1:
        _holder(config, rope, "partial_rotary_factor").refuse("partial_rotary_factor", "at most 1")
    rotary_dim = int(head_dim * partial)
    if rotary_dim == 0 or rotary_dim % ROTARY_MULTIPLE:
        raise CheckpointError(
            f"partial_rotary_factor {partial:g} of head dimension {head_dim} rotates {rotary_dim} values, "
            f"supported are multiples of {ROTARY_MULTIPLE}",
            where=_holder(config, rope, "partial_rotary_factor").where("partial_rotary_factor"),
            fix="no ONNX Runtime attention kernel rotates that many; this model cannot be exported",
        )
    original_max = _original_max(config, rope)
    _check_scale(rope, max_positions, original_max)
    return LongRope(
        theta=_free_number(config, rope, "rope_theta", DEFAULT_THETA),
        rotary_dim=rotary_dim,
        short_factor=rope.numbers("short_factor", rotary_dim // 2),
        long_factor=rope.numbers("long_factor", rotary_dim // 2),
        max_positions=max_positions,
        original_max_positions=original_max,
    )


def _section(config: Fields) -> Fields:
    """The one rope section; if both spellings are present, they must agree key by key."""
    scaling, parameters = config.section("rope_scaling"), config.section("rope_parameters")
    if scaling.raw and parameters.raw:
        for key in sorted(set(scaling) & set(parameters)):
            if scaling.get(key) != parameters.get(key):
                raise CheckpointError(
                    f"rope_scaling.{key} is {shown(scaling.get(key))}, rope_parameters.{key} is "
                    f"{shown(parameters.get(key))}",
                    where=scaling.where(key),
                    fix="keep one of the two sections",
                )
        return Fields({**parameters.raw, **scaling.raw}, config.file, "rope_scaling.")
    if not scaling.raw and not parameters.raw:
        key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
        config.refuse(key, "an object of type longrope", fix="a model without LongRoPE is not supported")
    return scaling if scaling.raw else parameters


def _check_type(rope: Fields) -> None:
    keys = [key for key in ("rope_type", "type") if rope.get(key) is not None]
    if not keys:
        rope.refuse("type", '"longrope"', fix="an unnamed rotary embedding is not supported")
    for key in keys:
        if rope.get(key) not in LONGROPE_NAMES:
            rope.refuse(key, '"longrope"', fix="other rotary embeddings are not supported")


def _holder(config: Fields, rope: Fields, key: str) -> Fields:
    return rope if rope.get(key) is not None else config


def _free_number(config: Fields, rope: Fields, key: str, default: float) -> float:
    """A number that may stand at the top level or in the rope section."""
    inside, outside = rope.get(key) is not None, config.get(key) is not None
    if inside and outside and rope.number(key) != config.number(key):
        raise CheckpointError(
            f"{key} is {shown(config.get(key))} at the top level and {shown(rope.get(key))} in {rope.path.rstrip('.')}",
            where=rope.where(key),
            fix=f"keep one {key}",
        )
    if inside:
        return rope.number(key)
    return config.number(key) if outside else default


def _original_max(config: Fields, rope: Fields) -> int:
    key = "original_max_position_embeddings"
    value = _free_number(config, rope, key, DEFAULT_ORIGINAL_MAX)
    holder = _holder(config, rope, key)
    return holder.integer(key, DEFAULT_ORIGINAL_MAX, minimum=2) if holder.get(key) is not None else int(value)


def _check_scale(rope: Fields, max_positions: int, original_max: int) -> None:
    """`factor` and `attention_factor`, if stated, must be the values that follow from the lengths."""
    factor = max_positions / original_max
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max))
    for key, value in (("factor", factor), ("attention_factor", scale)):
        if rope.get(key) is not None and not math.isclose(rope.number(key), value, rel_tol=1e-6):
            rope.refuse(
                key,
                f"{value:.6g}, which follows from max_position_embeddings {max_positions} and "
                f"original_max_position_embeddings {original_max}",
            )
