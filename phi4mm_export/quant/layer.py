"""One stage's weights: from second moments to codes and biases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.quant.algebra import Algebra, Factor, Rounding, algebra_of
from phi4mm_export.quant.arithmetic import PLAIN, Arithmetic, NotPositiveDefiniteError, in_parts
from phi4mm_export.quant.codes import Codes, Grid, joined
from phi4mm_export.quant.finished import Outcome, Solved
from phi4mm_export.quant.gptq import channel_order
from phi4mm_export.quant.hessian import Moments, rotated_moments
from phi4mm_export.quant.rtn import round_to_nearest
from phi4mm_export.quant.settings import Method, QuantSettings
from phi4mm_export.quant.weight import Weight, tiles_of
from phi4mm_export.weights.exact import F64
from phi4mm_export.weights.rotation import rotated

MAX_DAMP = 1.0
SAMPLING_DAMP = 0.3
"""Damping added per channel and token, K / T of it: few tokens say little about how channels go together."""
TARGET_SHARE = 0.25
"""Share of the drift between the streams that the weights make up for; more of it fits the calibration set only."""
JUDGED_OUTPUTS = 128
"""Outputs of a weight, evenly spread, whose errors stand for all in the report."""
MIN_TOKENS_PER_CHANNEL = 1
"""With fewer paired tokens the drift is noise, and no share of it is used."""


@dataclass(frozen=True)
class _Factor:
    """What all weights of an input share: the damped Hessian's factor, and what follows from it."""

    damp: float
    solver: Rounding
    drift: _Drift
    algebra: Algebra


def solve_stage(
    weights: Sequence[Weight], grids: Sequence[Grid], seen: Moments | None, settings: QuantSettings
) -> list[Solved]:
    """weights: of the products that share one input, with the grid of each.

    Raises CheckpointError for a weight that is not finite, or of which nothing is left.
    """
    solved = _solved(list(zip(weights, grids, strict=True)), seen, settings)
    for weight, one in zip(weights, solved, strict=True):
        weight.refuse_scales_of_zero(one.codes.scales)
    return solved


def _solved(both: Sequence[tuple[Weight, Grid]], seen: Moments | None, settings: QuantSettings) -> list[Solved]:
    if settings.method is not Method.GPTQ:
        return [_nearest(weight, grid, None, "") for weight, grid in both]
    if seen is None:
        return [_nearest(weight, grid, None, "no calibration sample reaches it") for weight, grid in both]
    if not (np.isfinite(seen.hessian).all() and np.isfinite(seen.mean).all() and np.isfinite(seen.mean_exact).all()):
        return [_nearest(weight, grid, None, "its calibration inputs are not finite") for weight, grid in both]
    sizes = {grid.rotation for _, grid in both}
    inputs = {size: rotated_moments(seen, size, jobs=settings.jobs) if size else seen for size in sizes}
    kinds = {(grid.block_size, grid.rotation) for _, grid in both}
    algebra = algebra_of(settings)
    factors = {kind: _factor(inputs[kind[1]], kind[0], algebra, settings) for kind in sorted(kinds)}
    solved: list[Solved] = []
    first = 0
    for weight, grid in both:
        factor = factors[grid.block_size, grid.rotation]
        if factor is None:
            solved.append(_nearest(weight, grid, seen, "the Hessian is singular even with full damping"))
        else:
            solved.append(_calibrated(weight, first, grid, seen, factor, settings))
        first += weight.width
    return solved


def _factor(seen: Moments, block_size: int, algebra: Algebra, settings: QuantSettings) -> _Factor | None:
    """Raise the damping tenfold, up to `MAX_DAMP`, until the factor exists."""
    diagonal = np.diagonal(seen.hessian)
    mean = float(np.add.reduce(diagonal)) / len(diagonal)
    order = channel_order(diagonal, block_size, settings.order)
    damp = min(settings.damp + SAMPLING_DAMP * len(diagonal) / seen.tokens, MAX_DAMP)
    while True:
        damped = seen.hessian[np.ix_(order, order)]
        damped[np.diag_indices(len(damped))] += damp * mean if mean > 0 else 1.0
        try:
            v = algebra.factor(damped)
        except NotPositiveDefiniteError:
            if damp == MAX_DAMP:
                return None
            damp = min(10 * damp, MAX_DAMP)
            continue
        solver = algebra.solver(block_size, order, v)
        return _Factor(damp, solver, _Drift.of(seen, order, v, algebra, settings.jobs), algebra)


@dataclass(frozen=True)
class _Drift:
    """How weights are moved towards making up for the drift of the inputs.

    W + share * inv(H) X'(X_exact - X) W. Source: GPTAQ (arXiv 2504.02692), with a share because the full correction
    fits the calibration set.
    """

    moving: Callable[[F64, slice], F64]
    """From some outputs of the weights, side by side as they are, and which these are."""

    @staticmethod
    def of(seen: Moments, order: NDArray[np.int64], v: Factor, algebra: Algebra, jobs: int) -> _Drift:
        """With more outputs than channels the system is solved once for all of them, else for some at a time."""
        drift, size = seen.drift, len(order)
        if drift is None or seen.paired < MIN_TOKENS_PER_CHANNEL * size:
            return _Drift(lambda weight, _: weight)
        share = TARGET_SHARE * seen.tokens / seen.paired

        def solved(outputs: slice) -> F64:
            found = algebra.solve(v, drift[order, outputs])
            x = np.empty_like(found)
            x[order] = found
            return share * x

        if drift.shape[1] < size:
            return _Drift(lambda weight, outputs: weight + solved(outputs))
        with ThreadPoolExecutor(jobs) as pool:
            parts = list(pool.map(solved, tiles_of(size, algebra.tile_outputs)))
        times = algebra.math.times(np.concatenate(parts, axis=1))
        return _Drift(lambda weight, _: weight + times(weight))


def _calibrated(
    weight: Weight, first: int, grid: Grid, seen: Moments, factor: _Factor, settings: QuantSettings
) -> Solved:
    """first: the outputs of the stage's weights before this one."""
    started, algebra = perf_counter(), factor.algebra
    math = algebra.math

    def one(outputs: slice) -> tuple[Codes, F64, F64]:
        wide = weight.columns(outputs).astype(np.float64)
        among = slice(first + outputs.start, first + outputs.stop)
        target = factor.drift.moving(rotated(wide, grid.rotation) if grid.rotation else wide, among)
        codes = factor.solver.quantize(target, grid)
        values = codes.values()
        bias = np.zeros(wide.shape[1])
        if settings.bias_correction:
            bias = math.fine(seen.mean_exact[None], wide)[0] - math.fine(seen.mean[None], values)[0]
        return codes, bias, _judged(weight, outputs, wide, values, replace(grid, rotation=0))

    with ThreadPoolExecutor(settings.jobs) as pool:
        parts, biases, judged = zip(*pool.map(one, weight.tiles(algebra.tile_outputs)), strict=True)
    before, after = _relative(np.concatenate(judged, axis=2), seen, math, settings.jobs)
    dead = int(np.count_nonzero(np.diagonal(seen.hessian) <= 0))
    reason = f"{dead} of {weight.size} input channels never vary" if dead else ""
    bias, seconds = np.concatenate(biases), perf_counter() - started
    return Solved(joined(parts), Outcome(grid, bias, Method.GPTQ, reason, factor.damp, before, after, seconds))


def _nearest(weight: Weight, grid: Grid, seen: Moments | None, reason: str) -> Solved:
    started = perf_counter()
    parts, judged, error = [], [], None
    for outputs in weight.tiles():
        given = weight.columns(outputs)
        codes = round_to_nearest(given, grid)
        if seen is not None:
            judged.append(_judged(weight, outputs, given.astype(np.float64), codes.values(), grid))
        parts.append(codes)
    if seen is not None:
        _, error = _relative(np.concatenate(judged, axis=2), seen, PLAIN, jobs=1)
    seconds = perf_counter() - started
    return Solved(joined(parts), Outcome(grid, np.zeros(weight.width), Method.RTN, reason, 0.0, error, error, seconds))


def _judged(weight: Weight, outputs: slice, wide: F64, values: F64, grid: Grid) -> F64:
    """Of every n-th output the weight, the error of rounding it to nearest, and that of `values`, [3, K, n]."""
    step = -(-weight.width // JUDGED_OUTPUTS)
    chosen = slice(-outputs.start % step, None, step)
    given = wide[:, chosen]
    if not given.shape[1]:  # of very many outputs some tiles hold none that is judged
        return np.zeros((3, *given.shape))
    nearest = round_to_nearest(np.ascontiguousarray(given, np.float32), grid).values()
    return np.stack([given, nearest - given, values[:, chosen] - given])


def _relative(judged: F64, seen: Moments, math: Arithmetic, jobs: int) -> list[float]:
    """|X error| / |X weight| over the centred calibration inputs, for each error in `judged`."""
    count, size, width = judged.shape
    stack = np.ascontiguousarray(judged.transpose(1, 0, 2)).reshape(size, count * width)
    terms = np.add.reduce(stack * in_parts(math.coarsely(stack), jobs, seen.hessian), axis=0)
    whole, *energies = (float(energy) for energy in np.add.reduce(terms.reshape(count, width), axis=1))
    return [float(np.sqrt(max(energy, 0.0) / whole)) if whole > 0 else 0.0 for energy in energies]
