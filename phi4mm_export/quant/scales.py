"""The scale (and zero point) of a block by the error it really causes.

The error of a block counts as |V'e|^2 with V the block's part of the Hessian's factor: what is left of it after all
channels that are rounded later have compensated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phi4mm_export.quant.arithmetic import Arithmetic, kept_bits
from phi4mm_export.quant.codes import Grid, inverse_of
from phi4mm_export.weights.exact import F64

SHRINK = (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05)
"""Tried shares of the scale at which nothing is clipped."""
F32_BITS = 24
"""Integers up to 2**24 and their sums are exact in float32."""


@dataclass(frozen=True)
class Choice:
    """A scale as stored and a zero point for each output, [N] or [choices, N]."""

    scale: F64
    zero: F64


@dataclass(frozen=True)
class Corner:
    """V's diagonal block of one quantization block [b, b], transposed."""

    turned: F64
    rough: F64
    """The same over a power of two that makes its largest value 1. With few bits a row, its products with codes are
    exact in float32: on every machine the same choices."""

    @staticmethod
    def of(corner: F64) -> Corner:
        """From V's diagonal block itself."""
        turned = np.ascontiguousarray(corner.T)
        _, exponent = np.frexp(np.abs(turned).max())
        return Corner(turned, np.ldexp(turned, -int(exponent)))

    def rough_for(self, grid: Grid) -> F64:
        """`rough` with the bits that products with this grid's codes leave it."""
        return kept_bits(self.rough, F32_BITS - grid.bits - (len(self.rough) - 1).bit_length())


def best_choices(target: F64, corner: Corner, grid: Grid, math: Arithmetic, count: int) -> Choice:
    """The `count` choices per output with the least error when all rows are rounded at once, best first.

    target [b, N] -> scales and zeros [count, N].
    """
    width = target.shape[1]
    turned = corner.rough_for(grid)
    _, exponent = np.frexp(np.maximum.reduce(np.abs(target), axis=0))
    unit = np.ldexp(1.0, exponent)
    scaled = target / unit
    aim, rows, left = (
        math.coarse(turned, scaled).astype(np.float32),
        scaled.astype(np.float32),
        turned.astype(np.float32),
    )
    all_tried = candidates(np.maximum.reduce(target, axis=0), np.minimum.reduce(target, axis=0), grid)
    scale, zero = all_tried.scale, all_tried.zero
    losses = np.empty((len(scale), width), np.float32)
    q, gap = np.empty_like(rows), np.empty_like(rows)
    for number, (tried, origin) in enumerate(zip(scale, zero, strict=True)):
        step = (tried / unit).astype(np.float32)
        low, high = (-origin).astype(np.float32), (grid.top - origin).astype(np.float32)
        np.multiply(rows, inverse_of(step), out=q)
        np.minimum(np.maximum(np.rint(q, out=q), low, out=q), high, out=q)
        np.subtract(aim, np.multiply(np.matmul(left, q, out=gap), step, out=gap), out=gap)
        losses[number] = np.add.reduce(np.multiply(gap, gap, out=gap), axis=0)
    best = np.argsort(losses, axis=0, kind="stable")[:count]
    return Choice(np.take_along_axis(scale, best, axis=0), np.take_along_axis(zero, best, axis=0))


def candidates(high: F64, low: F64, grid: Grid) -> Choice:
    """What is tried for outputs with these largest and smallest values [N]: scales and zeros [choices, N]."""
    if grid.symmetric:
        peak = np.asarray(np.where(high >= -low, high, low), np.float64) / grid.half
        scales = np.array([sign * share * peak for share in SHRINK for sign in (-1.0, 1.0)])
        return Choice(grid.stored(scales), np.full_like(scales, float(grid.half)))
    high, low = np.maximum(high, 0.0), np.minimum(low, 0.0)
    pairs = [_range(low * share, high * share, grid) for share in SHRINK]
    return Choice(grid.stored(np.array([step for step, _ in pairs])), np.array([zero for _, zero in pairs]))


def _range(low: F64, high: F64, grid: Grid) -> tuple[F64, F64]:
    """Step and zero point of the codes 0 .. top over low .. high."""
    step = (high - low) / grid.top
    zero: F64 = np.clip(np.rint(-low * inverse_of(step)), 0.0, float(grid.top))
    return step, zero
