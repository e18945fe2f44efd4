"""The weights of one input: what each falls back to, and what damping, drift, biases and errors really are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from phi4mm_export.quant import layer
from phi4mm_export.quant.arithmetic import PLAIN, upper_factor
from phi4mm_export.quant.codes import Codes, Grid
from phi4mm_export.quant.finished import Solved
from phi4mm_export.quant.gptq import Solver
from phi4mm_export.quant.graph import Graph
from phi4mm_export.quant.hessian import Moments, rotated_moments
from phi4mm_export.quant.layer import SAMPLING_DAMP, TARGET_SHARE, solve_stage
from phi4mm_export.quant.rtn import round_to_nearest
from phi4mm_export.quant.settings import Method, Order, QuantSettings
from phi4mm_export.quant.sites import Site
from phi4mm_export.quant.weight import Weight
from phi4mm_export.weights.exact import F64

F32 = NDArray[np.float32]
SIZE = 64
GRID = Grid(4, 16, True, np.dtype(np.float32))
SETTINGS = QuantSettings(block_size=16, order=Order.NATURAL, exact=False)
MANY = 10**15
"""Tokens, so many that they add nothing to the damping."""


def weight_of(matrix: F32) -> Weight:
    """A weight [K, N] of a graph that is nowhere on disk."""
    graph = Graph(Path("m.onnx"), onnx.ModelProto(), {"w": numpy_helper.from_array(matrix, "w")}, frozenset(), {})
    return Weight(graph, Site("product", 0, "", 0, "w", "x", "y", *matrix.shape, False, "float32"))


def values(width: int, seed: int = 0, size: int = SIZE) -> F32:
    return np.random.default_rng(seed).standard_normal((size, width)).astype(np.float32)


def statistics(size: int = SIZE, *, tokens: int = MANY, paired: int = MANY, drift: bool = False) -> Moments:
    """Moments of correlated inputs; the exact stream is larger by a twentieth."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((4 * size, 8)) @ rng.standard_normal((8, size)) + 0.5 * rng.standard_normal(
        (4 * size, size)
    )
    gram = x.T @ x
    mean = rng.standard_normal(size)
    return Moments(tokens, paired, mean * 1.05, mean, gram, gram * 0.05 if drift else None)


def solved(weight: F32, seen: Moments | None, settings: QuantSettings = SETTINGS, grid: Grid = GRID) -> Solved:
    (one,) = solve_stage([weight_of(weight)], [grid], seen, settings)
    return one


def by_hand(target: F64, hessian: F64, damp: float, grid: Grid = GRID) -> Codes:
    """The solver alone, channels in natural order."""
    size = len(hessian)
    damped = hessian + damp * np.diag(hessian).mean() * np.eye(size)
    return Solver(grid.block_size, PLAIN, np.arange(size), upper_factor(damped, PLAIN)).quantize(target, grid)


def same_codes(found: Codes, expected: Codes) -> None:
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.scales, expected.scales)


def output_error(gap: NDArray[Any], weight: NDArray[Any], hessian: F64) -> float:
    return float(np.sqrt(np.sum(gap * (hessian @ gap)) / np.sum(weight * (hessian @ weight))))


def test_codes_are_the_solvers_for_the_damped_hessian() -> None:
    weight, seen = values(24), statistics()
    found = solved(weight, seen)
    assert (found.outcome.method, found.outcome.reason) == (Method.GPTQ, "")
    assert found.outcome.damp == pytest.approx(SETTINGS.damp)
    same_codes(found.codes, by_hand(weight.astype(np.float64), seen.hessian, SETTINGS.damp))


def test_few_tokens_add_to_the_damping_up_to_its_limit() -> None:
    weight = values(8)
    damps = [solved(weight, statistics(tokens=n, paired=n)).outcome.damp for n in (640, 1)]
    assert damps == [pytest.approx(SETTINGS.damp + SAMPLING_DAMP * SIZE / 640), layer.MAX_DAMP]


def test_damping_rises_tenfold_until_a_factor_exists() -> None:
    hessian = np.eye(SIZE)
    hessian[0, 1] = hessian[1, 0] = 1.05
    seen = replace(statistics(), hessian=hessian)
    found = solved(values(8), seen)
    assert found.outcome.damp == pytest.approx(10 * SETTINGS.damp)
    same_codes(found.codes, by_hand(values(8).astype(np.float64), hessian, 10 * SETTINGS.damp))


def test_full_damping_is_tried_whatever_the_first_was() -> None:
    hessian = np.eye(SIZE)
    hessian[0, 1] = hessian[1, 0] = 1.9
    for first in (0.01, 0.1, 0.15, 0.5):
        found = solved(values(8), replace(statistics(), hessian=hessian), replace(SETTINGS, damp=first))
        assert (found.outcome.method, found.outcome.damp) == (Method.GPTQ, layer.MAX_DAMP)


def test_a_hessian_singular_even_then_falls_back_to_rounding() -> None:
    hessian = np.eye(SIZE)
    hessian[0, 1] = hessian[1, 0] = 3.0
    weight, seen = values(8), replace(statistics(), hessian=hessian)
    found = solved(weight, seen)
    assert found.outcome.method is Method.RTN
    assert found.outcome.reason == "the Hessian is singular even with full damping"
    same_codes(found.codes, round_to_nearest(weight, GRID))
    gap = round_to_nearest(weight, GRID).values() - weight
    expected = pytest.approx(output_error(gap, weight.astype(np.float64), hessian), rel=1e-6)
    assert found.outcome.error_before == found.outcome.error_after == expected


def test_inputs_that_are_always_zero_leave_rounding_in_turn_without_an_error() -> None:
    found = solved(values(8), replace(statistics(), hessian=np.zeros((SIZE, SIZE))))
    assert found.outcome.method is Method.GPTQ
    assert found.outcome.reason == f"{SIZE} of {SIZE} input channels never vary"
    assert (found.outcome.error_before, found.outcome.error_after) == (0.0, 0.0)


def test_channels_that_never_vary_are_counted() -> None:
    seen = statistics()
    seen.hessian[[3, 7]] = 0
    seen.hessian[:, [3, 7]] = 0
    assert solved(values(8), seen).outcome.reason == f"2 of {SIZE} input channels never vary"


@pytest.mark.parametrize("name", ["hessian", "mean", "mean_exact"])
def test_moments_that_are_not_finite_are_not_used(name: str) -> None:
    seen = statistics()
    getattr(seen, name)[2] = np.nan
    found = solved(values(8), seen)
    assert (found.outcome.method, found.outcome.reason) == (Method.RTN, "its calibration inputs are not finite")
    assert (found.outcome.error_before, found.outcome.error_after) == (None, None)


def test_no_sample_means_rounding_to_nearest() -> None:
    found = solved(values(700), None)
    assert (found.outcome.method, found.outcome.reason) == (Method.RTN, "no calibration sample reaches it")
    assert (found.outcome.error_after, found.outcome.damp) == (None, 0.0)
    np.testing.assert_array_equal(found.outcome.bias, np.zeros(700))
    same_codes(found.codes, round_to_nearest(values(700), GRID))


def test_the_method_rtn_uses_no_moments() -> None:
    found = solved(values(8), statistics(), replace(SETTINGS, method=Method.RTN))
    assert (found.outcome.method, found.outcome.reason, found.outcome.error_after) == (Method.RTN, "", None)
    same_codes(found.codes, round_to_nearest(values(8), GRID))


def test_the_bias_makes_the_mean_output_that_of_the_float_graph() -> None:
    weight, seen = values(24), statistics()
    found = solved(weight, seen)
    expected = seen.mean_exact @ weight.astype(np.float64) - seen.mean @ found.codes.values()
    np.testing.assert_allclose(found.outcome.bias, expected, atol=1e-10)
    off = solved(weight, seen, replace(SETTINGS, bias_correction=False))
    np.testing.assert_array_equal(off.outcome.bias, np.zeros(24))
    same_codes(off.codes, found.codes)


@pytest.mark.parametrize("width", [200, 256, 300, 700])
def test_reported_errors_are_those_of_every_nth_output(width: int) -> None:
    weight, seen = values(width), statistics()
    found = solved(weight, seen)
    chosen = slice(None, None, -(-width // layer.JUDGED_OUTPUTS))
    wide = weight.astype(np.float64)
    for codes, error in (
        (round_to_nearest(weight, GRID), found.outcome.error_before),
        (found.codes, found.outcome.error_after),
    ):
        gap = codes.values() - wide
        assert error == pytest.approx(output_error(gap[:, chosen], wide[:, chosen], seen.hessian), rel=1e-6)
    assert found.outcome.error_after is not None
    assert found.outcome.error_before is not None
    assert found.outcome.error_after < found.outcome.error_before


@pytest.mark.parametrize("width", [SIZE // 2, SIZE, 2 * SIZE])
def test_weights_move_by_a_share_of_what_makes_up_for_the_drift(width: int) -> None:
    weight, seen = values(width), statistics(paired=MANY // 2, drift=True)
    assert seen.drift is not None
    damped = seen.hessian + SETTINGS.damp * np.diag(seen.hessian).mean() * np.eye(SIZE)
    wide = weight.astype(np.float64)
    target = wide + 2 * TARGET_SHARE * np.linalg.solve(damped, seen.drift @ wide)
    found, expected = solved(weight, seen), by_hand(target, seen.hessian, SETTINGS.damp)
    assert (found.codes.codes == expected.codes).mean() > 0.999
    assert (found.codes.codes != solved(weight, statistics()).codes.codes).any()


def test_a_drift_behind_the_weights_moves_each_of_them_alike() -> None:
    weights, seen = [values(24), values(16, 1)], statistics(drift=True)
    assert seen.drift is not None
    behind = replace(seen, drift=seen.drift @ np.concatenate(weights, axis=1))
    together = solve_stage([weight_of(weight) for weight in weights], [GRID, GRID], behind, SETTINGS)
    for one, weight in zip(together, weights, strict=True):
        assert (one.codes.codes == solved(weight, seen).codes.codes).mean() > 0.999


@pytest.mark.parametrize("order", list(Order))
def test_the_drift_is_made_up_for_in_any_order_of_channels(order: Order) -> None:
    weight, seen = values(24), statistics(drift=True)
    assert seen.drift is not None
    settings = replace(SETTINGS, order=order)
    damped = seen.hessian + SETTINGS.damp * np.diag(seen.hessian).mean() * np.eye(SIZE)
    wide = weight.astype(np.float64)
    moved = (wide + TARGET_SHARE * np.linalg.solve(damped, seen.drift @ wide)).astype(np.float32)
    expected = solved(moved, statistics(), settings)
    assert (solved(weight, seen, settings).codes.codes == expected.codes.codes).mean() > 0.99


def test_the_drift_of_fewer_paired_tokens_than_channels_is_noise() -> None:
    weight = values(24)
    tokens = {"tokens": MANY, "drift": True}
    without = solved(weight, statistics())
    same_codes(solved(weight, statistics(paired=SIZE - 1, **tokens)).codes, without.codes)
    assert (solved(weight, statistics(paired=SIZE, **tokens)).codes.codes != without.codes.codes).any()


def test_weights_of_one_input_may_differ_in_blocks_bits_and_rotation() -> None:
    seen = statistics()
    grids = [GRID, replace(GRID, block_size=32), replace(GRID, bits=8), replace(GRID, rotation=16), GRID]
    weights = [values(24, seed) for seed in range(5)]
    together = solve_stage([weight_of(weight) for weight in weights], grids, seen, SETTINGS)
    for one, weight, grid in zip(together, weights, grids, strict=True):
        same_codes(one.codes, solved(weight, seen, SETTINGS, grid).codes)
        assert one.outcome.grid == one.codes.grid == grid


def test_a_rotated_weight_is_solved_for_the_rotated_moments() -> None:
    weight, seen, grid = values(24), statistics(), replace(GRID, rotation=16)
    turned = layer.rotated(weight.astype(np.float64), 16)
    expected = by_hand(turned, rotated_moments(seen, 16).hessian, SETTINGS.damp)
    found = solved(weight, seen, SETTINGS, grid)
    np.testing.assert_array_equal(found.codes.codes, expected.codes)
    wide = weight.astype(np.float64)
    gap = found.codes.values() - wide
    assert found.outcome.error_after == pytest.approx(output_error(gap, wide, seen.hessian), rel=1e-6)
    nearest = round_to_nearest(weight, GRID).values() - wide
    assert found.outcome.error_before == pytest.approx(output_error(nearest, wide, seen.hessian), rel=1e-6)


@pytest.mark.parametrize("exact", [False, True])
def test_jobs_do_not_change_a_bit(exact: bool) -> None:
    weight, seen = values(1200), statistics(drift=True)
    one, three = (solved(weight, seen, replace(SETTINGS, jobs=jobs, exact=exact)) for jobs in (1, 3))
    same_codes(three.codes, one.codes)
    np.testing.assert_array_equal(three.outcome.bias, one.outcome.bias)
    assert three.outcome.error_after == one.outcome.error_after


def test_the_report_holds_the_seconds_a_weight_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "perf_counter", itertools.count(10.0, 2.5).__next__)
    assert solved(values(8), statistics()).outcome.seconds == 2.5
    assert solved(values(8), None).outcome.seconds == 2.5


def test_as_many_grids_as_weights_are_needed() -> None:
    with pytest.raises(ValueError, match="zip"):
        solve_stage([weight_of(values(8))], [GRID, GRID], None, SETTINGS)
