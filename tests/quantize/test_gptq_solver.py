"""The solver against the published algorithm, written column by column."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from phi4mm_export.quant import arithmetic, gptq
from phi4mm_export.quant.arithmetic import (
    EXACT,
    PLAIN,
    NotPositiveDefiniteError,
    solve_upper,
    solve_upper_transposed,
    two_slice_product,
    upper_factor,
)
from phi4mm_export.quant.codes import Codes, Grid
from phi4mm_export.quant.gptq import Solver, channel_order
from phi4mm_export.quant.settings import Order
from phi4mm_export.quant.weight import TILE_OUTPUTS, tiles_of

F64 = NDArray[np.float64]


def problem(channels: int, outputs: int, seed: int = 0) -> tuple[F64, F64]:
    """A damped Hessian of correlated inputs and a weight."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * channels, 8)) @ rng.standard_normal((8, channels))
    x += 0.3 * rng.standard_normal(x.shape)
    hessian = x.T @ x
    hessian[np.diag_indices(channels)] += 0.01 * np.diag(hessian).mean()
    return hessian, rng.standard_normal((channels, outputs))


def published(weight: F64, hessian: F64, scales: F64, zeros: F64, block: int, top: int) -> NDArray[np.int64]:
    """GPTQ as in the paper: one column at a time, all later columns updated at once, no batches (section 3.3)."""
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    rest, codes = weight.copy(), np.empty(weight.shape, np.int64)
    for i in range(len(weight)):
        scale, zero = scales[i // block], zeros[i // block]
        codes[i] = np.clip(np.rint(rest[i] / scale) + zero, 0, top)
        error = (rest[i] - (codes[i] - zero) * scale) / upper[i, i]
        rest[i:] -= np.outer(upper[i, i:], error)
    return codes


def solve(weight: F64, hessian: F64, grid: Grid, order: Order = Order.NATURAL, math: object = PLAIN) -> Codes:
    turn = channel_order(np.diagonal(hessian), grid.block_size, order)
    kind = EXACT if math is EXACT else PLAIN
    v = upper_factor(hessian[np.ix_(turn, turn)], kind)
    return Solver(grid.block_size, kind, turn, v).quantize(weight, grid)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "block", "channels"), [(4, 16, 64), (4, 32, 96), (4, 64, 176), (8, 32, 64)])
def test_codes_equal_those_of_the_algorithm_column_by_column(
    symmetric: bool, bits: int, block: int, channels: int
) -> None:
    hessian, weight = problem(channels, 24)
    grid = Grid(bits, block, symmetric, np.dtype(np.float32))
    found = solve(weight, hessian, grid)
    zeros = np.full(found.scales.shape, grid.half) if found.zeros is None else found.zeros
    expected = published(weight, hessian, found.scales.astype(np.float64), zeros.astype(np.float64), block, grid.top)
    assert (found.codes == expected).mean() > 0.999
    assert np.abs(found.codes - expected).max() <= 1


def test_batches_of_columns_do_not_change_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    hessian, weight = problem(96, 40)
    grid = Grid(4, 32, True, np.dtype(np.float32))
    whole = solve(weight, hessian, grid)
    monkeypatch.setattr(gptq, "PANEL", 1)
    for start in range(0, 40, 7):
        part = solve(weight[:, start : start + 7], hessian, grid)
        np.testing.assert_array_equal(whole.codes[:, start : start + 7], part.codes)
        np.testing.assert_array_equal(whole.scales[:, start : start + 7], part.scales)


@pytest.mark.parametrize("math", [PLAIN, EXACT])
def test_any_number_of_workers_gives_the_same_factor(monkeypatch: pytest.MonkeyPatch, math: object) -> None:
    monkeypatch.setattr(arithmetic, "ROWS", 8)
    hessian, _ = problem(300, 1)
    kind = EXACT if math is EXACT else PLAIN
    np.testing.assert_array_equal(upper_factor(hessian, kind, jobs=1), upper_factor(hessian, kind, jobs=2))


def test_activation_order_visits_blocks_and_channels_by_falling_energy() -> None:
    diagonal = np.array([1.0, 4.0, 9.0, 2.0, 3.0])
    assert channel_order(diagonal, 2, Order.ACT).tolist() == [2, 3, 1, 0, 4]
    assert channel_order(diagonal, 2, Order.NATURAL).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("order", list(Order))
def test_compensation_makes_the_output_error_smaller_than_rounding_to_nearest(order: Order) -> None:
    hessian, weight = problem(128, 32)
    grid = Grid(4, 32, True, np.dtype(np.float32))
    found = solve(weight, hessian, grid, order).values()
    scales = np.abs(weight).reshape(4, 32, 32).max(axis=1) / 7
    nearest = np.repeat(scales, 32, axis=0) * np.rint(weight / np.repeat(scales, 32, axis=0))

    def error(values: F64) -> float:
        gap = values - weight
        return float(np.sum(gap * (hessian @ gap)))

    assert error(found) < 0.3 * error(nearest)


def test_exact_arithmetic_finds_the_codes_of_plain_arithmetic() -> None:
    hessian, weight = problem(96, 32)
    grid = Grid(4, 32, True, np.dtype(np.float32))
    plain, exact = solve(weight, hessian, grid), solve(weight, hessian, grid, math=EXACT)
    assert (plain.codes == exact.codes).mean() > 0.999


@pytest.mark.parametrize("math", [PLAIN, EXACT])
@pytest.mark.parametrize("channels", [1, 31, 32, 33, 100])
def test_the_factor_and_its_solutions_reproduce_the_matrix(channels: int, math: object) -> None:
    kind = EXACT if math is EXACT else PLAIN
    hessian, right = problem(channels, 5)
    v = upper_factor(hessian, kind)
    assert np.array_equal(v, np.triu(v))
    np.testing.assert_allclose(v @ v.T, hessian, rtol=0, atol=1e-9 * np.abs(hessian).max())
    x = solve_upper_transposed(v, solve_upper(v, right, kind.fine), kind.fine)
    np.testing.assert_allclose(hessian @ x, right, rtol=0, atol=1e-7)


def test_a_matrix_without_a_factor_is_refused() -> None:
    with pytest.raises(NotPositiveDefiniteError, match="pivot"):
        upper_factor(np.array([[1.0, 2.0], [2.0, 1.0]]), PLAIN)
    with pytest.raises(NotPositiveDefiniteError, match="nan"):
        upper_factor(np.array([[np.nan]]), PLAIN)


def test_two_slices_multiply_to_twelve_digits() -> None:
    rng = np.random.default_rng(4)
    left, right = rng.standard_normal((20, 300)), rng.standard_normal((300, 30))
    np.testing.assert_allclose(two_slice_product(left, right), left @ right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("width", [1, 640, 641, 1152, 4304, 200_064])
def test_a_wide_weight_is_cut_into_an_even_number_of_tiles(width: int) -> None:
    tiles = list(tiles_of(width))
    covered = [output for tile in tiles for output in range(tile.start, tile.stop)]
    assert covered == list(range(width))
    assert max(tile.stop - tile.start for tile in tiles) <= TILE_OUTPUTS
    assert len(tiles) == 1 or len(tiles) % 2 == 0
