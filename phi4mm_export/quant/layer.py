"""One stage's weights: from second moments to codes and biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.quant.arithmetic import (
    EXACT,
    PLAIN,
    Arithmetic,
    NotPositiveDefiniteError,
    solve_upper,
    solve_upper_transposed,
    upper_factor,
)
from phi4mm_export.quant.codes import Grid
from phi4mm_export.quant.finished import Outcome, Solved
from phi4mm_export.quant.gptq import Solver, channel_order
from phi4mm_export.quant.hessian import Moments
from phi4mm_export.quant.rtn import round_to_nearest
from phi4mm_export.quant.settings import Method, QuantSettings
from phi4mm_export.weights.exact import F32, F64

MAX_DAMP = 1.0
SAMPLING_DAMP = 0.3
"""Damping added per channel and token, K / T of it: few tokens say little about how channels go together."""
TARGET_SHARE = 0.25
"""Share of the drift between the streams that the weights make up for; more of it fits the calibration set only."""
MIN_TOKENS_PER_CHANNEL = 2
"""Below this the drift is noise, and no share of it is used."""


@dataclass(frozen=True)
class _Factor:
    """The damped Hessian's factor in the order of rounding."""

    order: NDArray[np.int64]
    v: F64
    damp: float


def solve_stage(
    weights: Sequence[F32], grids: Sequence[Grid], seen: Moments | None, settings: QuantSettings
) -> list[Solved]:
    """weights: float32 [K, N] of the products that share one input, with the grid of each."""
    if settings.method is not Method.GPTQ:
        return [_nearest(weight, grid, None, "") for weight, grid in zip(weights, grids, strict=True)]
    if seen is None:
        reason = "no calibration sample reaches it"
        return [_nearest(weight, grid, None, reason) for weight, grid in zip(weights, grids, strict=True)]
    if not (np.isfinite(seen.hessian).all() and np.isfinite(seen.mean).all() and np.isfinite(seen.mean_exact).all()):
        reason = "its calibration inputs are not finite"
        return [_nearest(weight, grid, None, reason) for weight, grid in zip(weights, grids, strict=True)]
    math = EXACT if settings.exact else PLAIN
    factors: dict[int, _Factor | None] = {}
    solved = []
    for weight, grid in zip(weights, grids, strict=True):
        started = perf_counter()
        if grid.block_size not in factors:
            factors[grid.block_size] = _factor(seen, grid.block_size, settings, math)
        factor = factors[grid.block_size]
        if factor is None:
            solved.append(_nearest(weight, grid, seen, "the Hessian is singular even with full damping"))
        else:
            solved.append(_calibrated(weight, grid, seen, factor, settings, math, started))
    return solved


def _factor(seen: Moments, block_size: int, settings: QuantSettings, math: Arithmetic) -> _Factor | None:
    """Raise the damping tenfold until the factor exists."""
    diagonal = np.diagonal(seen.hessian)
    mean = float(np.add.reduce(diagonal)) / len(diagonal)
    order = channel_order(diagonal, block_size, settings.order)
    ordered = seen.hessian[np.ix_(order, order)]
    damp = min(settings.damp + SAMPLING_DAMP * len(diagonal) / seen.tokens, MAX_DAMP)
    while damp <= MAX_DAMP:
        damped = ordered.copy()
        damped[np.diag_indices(len(damped))] += damp * mean if mean > 0 else 1.0
        try:
            return _Factor(order, upper_factor(damped, math), damp)
        except NotPositiveDefiniteError:
            damp *= 10
    return None


def _calibrated(
    weight: F32, grid: Grid, seen: Moments, factor: _Factor, settings: QuantSettings, math: Arithmetic, started: float
) -> Solved:
    wide = weight.astype(np.float64)
    target = _target(wide, seen, factor, math)
    codes = Solver(grid, math, factor.order, factor.v).quantize(target, jobs=settings.jobs)
    values = codes.values()
    bias = np.zeros(wide.shape[1])
    if settings.bias_correction:
        bias = math.fine(seen.mean_exact[None], wide)[0] - math.fine(seen.mean[None], values)[0]
    before, after = _relative(wide, [round_to_nearest(weight, grid).values(), values], seen, math)
    dead = int(np.count_nonzero(np.diagonal(seen.hessian) <= 0))
    reason = f"{dead} of {len(wide)} input channels never vary" if dead else ""
    seconds = perf_counter() - started
    return Solved(codes, Outcome(grid, bias, Method.GPTQ, reason, factor.damp, before, after, seconds))


def _target(weight: F64, seen: Moments, factor: _Factor, math: Arithmetic) -> F64:
    """The weights to approximate: moved towards making up for the drift of the inputs.

    W + share * inv(H) X'(X_exact - X) W. Source: GPTAQ (arXiv 2504.02692), with a share because the full correction
    fits the calibration set.
    """
    if seen.drift is None or seen.tokens < MIN_TOKENS_PER_CHANNEL * len(weight):
        return weight
    drift = math.coarse(seen.drift, weight)[factor.order]
    moved = np.empty_like(weight)
    moved[factor.order] = solve_upper_transposed(factor.v, solve_upper(factor.v, drift, math), math)
    return weight + TARGET_SHARE * moved


def _relative(weight: F64, candidates: Sequence[F64], seen: Moments, math: Arithmetic) -> list[float]:
    """|X (values - weight)| / |X weight| over the centred calibration inputs, for each of the candidates."""

    def energy(values: F64) -> float:
        return float(np.add.reduce(values * math.coarse(seen.hessian, values), axis=None))

    whole = energy(weight)
    return [float(np.sqrt(max(energy(values - weight), 0.0) / whole)) if whole > 0 else 0.0 for values in candidates]


def _nearest(weight: F32, grid: Grid, seen: Moments | None, reason: str) -> Solved:
    started = perf_counter()
    codes = round_to_nearest(weight, grid)
    error = _relative(weight.astype(np.float64), [codes.values()], seen, PLAIN)[0] if seen is not None else None
    zero = np.zeros(weight.shape[1])
    return Solved(codes, Outcome(grid, zero, Method.RTN, reason, 0.0, error, error, perf_counter() - started))
