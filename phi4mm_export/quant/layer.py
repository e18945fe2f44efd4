"""One stage's weights: from second moments to codes and biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from phi4mm_export.quant.hessian import Moments, rotated_moments
from phi4mm_export.quant.rotation import rotated
from phi4mm_export.quant.rtn import round_to_nearest
from phi4mm_export.quant.settings import Method, QuantSettings
from phi4mm_export.weights.exact import F32, F64

MAX_DAMP = 1.0
SAMPLING_DAMP = 0.3
"""Damping added per channel and token, K / T of it: few tokens say little about how channels go together."""
TARGET_SHARE = 0.25
"""Share of the drift between the streams that the weights make up for; more of it fits the calibration set only."""
MIN_TOKENS_PER_CHANNEL = 1
"""With fewer paired tokens the drift is noise, and no share of it is used."""


@dataclass(frozen=True)
class _Factor:
    """The damped Hessian's factor in the order of rounding."""

    order: NDArray[np.int64]
    v: F64
    damp: float
    solver: Solver


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
    inputs = {grid.rotation: rotated_moments(seen, grid.rotation) if grid.rotation else seen for grid in grids}
    factors: dict[tuple[int, int], _Factor | None] = {}
    solved = []
    for weight, grid in zip(weights, grids, strict=True):
        started = perf_counter()
        turned, key = inputs[grid.rotation], (grid.block_size, grid.rotation)
        if key not in factors:
            factors[key] = _factor(turned, grid.block_size, settings, math)
        factor = factors[key]
        if factor is None:
            solved.append(_nearest(weight, grid, seen, "the Hessian is singular even with full damping"))
        else:
            solved.append(_calibrated(weight, grid, seen, turned, factor, settings, math, started))
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
            v = upper_factor(damped, math)
        except NotPositiveDefiniteError:
            damp *= 10
            continue
        return _Factor(order, v, damp, Solver(block_size, math, order, v))
    return None


def _calibrated(
    weight: F32,
    grid: Grid,
    seen: Moments,
    turned: Moments,
    factor: _Factor,
    settings: QuantSettings,
    math: Arithmetic,
    started: float,
) -> Solved:
    """turned: the moments of the inputs as the rounded weight meets them, `seen` before their rotation."""
    wide = weight.astype(np.float64)
    target = _target(rotated(wide, grid.rotation) if grid.rotation else wide, turned, factor, math)
    codes = factor.solver.quantize(target, grid, jobs=settings.jobs)
    values = codes.values()
    bias = np.zeros(wide.shape[1])
    if settings.bias_correction:
        bias = math.fine(seen.mean_exact[None], wide)[0] - math.fine(seen.mean[None], values)[0]
    before, after = _relative(wide, [round_to_nearest(weight, replace(grid, rotation=0)).values(), values], seen, math)
    dead = int(np.count_nonzero(np.diagonal(seen.hessian) <= 0))
    reason = f"{dead} of {len(wide)} input channels never vary" if dead else ""
    seconds = perf_counter() - started
    return Solved(codes, Outcome(grid, bias, Method.GPTQ, reason, factor.damp, before, after, seconds))


def _target(weight: F64, seen: Moments, factor: _Factor, math: Arithmetic) -> F64:
    """The weights to approximate: moved towards making up for the drift of the inputs.

    W + share * inv(H) X'(X_exact - X) W. Source: GPTAQ (arXiv 2504.02692), with a share because the full correction
    fits the calibration set.
    """
    if seen.drift is None or seen.paired < MIN_TOKENS_PER_CHANNEL * len(weight):
        return weight
    narrow = len(weight) <= weight.shape[1]
    right = seen.drift if narrow else math.coarse(seen.drift, weight)
    solution = solve_upper(factor.v, right[factor.order], math.coarse)
    moved = np.empty_like(solution)
    moved[factor.order] = solve_upper_transposed(factor.v, solution, math.coarse)
    share = TARGET_SHARE * seen.tokens / seen.paired
    return weight + share * (math.coarse(moved, weight) if narrow else moved)


def _relative(weight: F64, candidates: Sequence[F64], seen: Moments, math: Arithmetic) -> list[float]:
    """|X (values - weight)| / |X weight| over the centred calibration inputs, for each of the candidates."""
    stack = np.concatenate([weight, *(values - weight for values in candidates)], axis=1)
    terms = np.add.reduce(stack * math.coarse(seen.hessian, stack), axis=0).reshape(-1, weight.shape[1])
    whole, *energies = (float(np.add.reduce(row)) for row in terms)
    return [float(np.sqrt(max(energy, 0.0) / whole)) if whole > 0 else 0.0 for energy in energies]


def _nearest(weight: F32, grid: Grid, seen: Moments | None, reason: str) -> Solved:
    started = perf_counter()
    codes = round_to_nearest(weight, grid)
    error = _relative(weight.astype(np.float64), [codes.values()], seen, PLAIN)[0] if seen is not None else None
    zero = np.zeros(weight.shape[1])
    return Solved(codes, Outcome(grid, zero, Method.RTN, reason, 0.0, error, error, perf_counter() - started))
