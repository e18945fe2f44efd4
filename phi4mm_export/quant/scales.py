"""The scale (and zero point) of a block by the error it really causes.

The error of a block counts as |V'e|^2 with V the block's part of the Hessian's factor: what is left of it after all
channels that are rounded later have compensated.
"""

from __future__ import annotations

import numpy as np

from phi4mm_export.quant.arithmetic import Arithmetic
from phi4mm_export.quant.codes import Grid, round_to
from phi4mm_export.weights.exact import F64

SHRINK = (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05)
"""Tried shares of the scale at which nothing is clipped."""


def choose(target: F64, corner: F64, grid: Grid, math: Arithmetic) -> tuple[F64, F64]:
    """target [b, N], corner: V of the block [b, b] -> scale [N] as stored, zero point [N]."""
    turned = np.ascontiguousarray(corner.T)
    aim = math.coarse(turned, target)
    best = np.full(target.shape[1], np.inf)
    scale, zero = np.zeros_like(best), np.full_like(best, float(grid.half))
    for tried_scale, tried_zero in _candidates(target, grid):
        stored = grid.stored(tried_scale)
        q = round_to(target, stored, -tried_zero, grid.top - tried_zero)
        gap = aim - stored * math.coarse(turned, q)
        loss = np.add.reduce(gap * gap, axis=0)
        better = loss < best
        best = np.where(better, loss, best)
        scale = np.where(better, stored, scale)
        zero = np.where(better, tried_zero, zero)
    return scale, zero


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
