"""LongRoPE cosine and sine tables, computed the same way on every machine.

inv_i = 1 / (factor_i * theta ** (2 i / rotary_dim)), angle = position * inv_i, both in float32 as the original
computes them; the table holds scale * cos(angle) and scale * sin(angle) with
scale = sqrt(1 + ln(max / original) / ln(original)).  Source: LongRoPE, arXiv 2402.13753; Phi-3 modelling code.
"""

from __future__ import annotations

from decimal import Context, Decimal

import numpy as np

from phi4mm_export.spec.model import LongRope
from phi4mm_export.weights.exact import F32, cos_sin

_DIGITS = Context(prec=40)


def attention_scale(rope: LongRope) -> float:
    """The factor on both tables: 1.19023807 for 131072 / 4096, 1 where the context was never extended."""
    if rope.max_positions <= rope.original_max_positions:
        return 1.0
    ratio = _DIGITS.divide(Decimal(rope.max_positions), Decimal(rope.original_max_positions))
    grown = _DIGITS.divide(_DIGITS.ln(ratio), _DIGITS.ln(Decimal(rope.original_max_positions)))
    return float(_DIGITS.sqrt(1 + grown))


def inverse_frequencies(rope: LongRope, factors: tuple[float, ...]) -> F32:
    """float32 [rotary_dim / 2], radians per position."""
    exponents = np.arange(0, rope.rotary_dim, 2).astype(np.float32) / np.float32(rope.rotary_dim)
    powers = [float(_DIGITS.power(Decimal(rope.theta), Decimal(float(e)))) for e in exponents]
    return np.float32(1.0) / (np.asarray(factors, np.float32) * np.asarray(powers, np.float32))


def table_rows(rope: LongRope, factors: tuple[float, ...], start: int, stop: int) -> tuple[F32, F32]:
    """Cosine and sine of positions start .. stop-1, float32 [stop - start, rotary_dim / 2], scale inside."""
    positions = np.arange(start, stop, dtype=np.int64).astype(np.float32)
    angles = positions[:, None] * inverse_frequencies(rope, factors)[None, :]
    cosine, sine = cos_sin(angles)
    scale = attention_scale(rope)
    return (cosine * scale).astype(np.float32), (sine * scale).astype(np.float32)
