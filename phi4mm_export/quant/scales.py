"""The scale (and zero point) of a block by the error it really causes.

The error of a block counts as |V'e|^2 with V the block's part of the Hessian's factor: what is left of it after all
channels that are rounded later have compensated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phi4mm_export.quant.arithmetic import Arithmetic
from phi4mm_export.quant.codes import Grid, round_to
from phi4mm_export.weights.exact import F64

SHRINK = (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05)
"""Tried shares of the scale at which nothing is clipped."""


@dataclass(frozen=True)
class Choice:
    """A scale [N] as stored and a zero point [N] for each output."""

    scale: F64
    zero: F64


def best_choices(target: F64, corner: F64, grid: Grid, math: Arithmetic, count: int) -> list[Choice]:
    """The `count` choices per output with the least error when all rows are rounded at once, best first.

    target [b, N], corner: V of the block [b, b].
    """
    turned = np.ascontiguousarray(corner.T)
    aim = math.coarse(turned, target)
    width = target.shape[1]
    losses = np.full((count, width), np.inf)
    scales, zeros = np.zeros((count, width)), np.full((count, width), float(grid.half))
    for tried_scale, tried_zero in _candidates(target, grid):
        stored = grid.stored(tried_scale)
        q = round_to(target, stored, -tried_zero, grid.top - tried_zero)
        gap = aim - stored * math.coarse(turned, q)
        new = (np.add.reduce(gap * gap, axis=0), stored, tried_zero)
        for rank in range(count):
            old = losses[rank], scales[rank], zeros[rank]
            better = new[0] < old[0]
            kept = [np.where(better, n, o) for n, o in zip(new, old, strict=True)]
            new = (np.where(better, old[0], new[0]), np.where(better, old[1], new[1]), np.where(better, old[2], new[2]))
            losses[rank], scales[rank], zeros[rank] = kept
    return [Choice(scale, zero) for scale, zero in zip(scales, zeros, strict=True)]


def _candidates(target: F64, grid: Grid) -> list[tuple[F64, F64]]:
    high, low = np.maximum.reduce(target, axis=0), np.minimum.reduce(target, axis=0)
    if grid.symmetric:
        peak: F64 = np.asarray(np.where(high >= -low, high, low), np.float64) / grid.half
        middle: F64 = np.full_like(peak, float(grid.half))
        return [(sign * share * peak, middle) for share in SHRINK for sign in (-1.0, 1.0)]
    high, low = np.maximum(high, 0.0), np.minimum(low, 0.0)
    return [_range(low * share, high * share, grid) for share in SHRINK]


def _range(low: F64, high: F64, grid: Grid) -> tuple[F64, F64]:
    """Step and zero point of the codes 0 .. top over low .. high."""
    step = (high - low) / grid.top
    origin = np.divide(-low, step, out=np.zeros_like(step), where=step > 0)
    zero: F64 = np.clip(np.rint(origin), 0.0, float(grid.top))
    return step, zero
