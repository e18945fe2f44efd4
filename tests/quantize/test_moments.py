"""Second moments against their definition; inputs are small integers, so that sums are exact and equal to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from phi4mm_export.errors import UsageError
from phi4mm_export.quant import hessian
from phi4mm_export.quant.hessian import PARTS, ROWS, Moments, Pairs, moments

F32 = NDArray[np.float32]
CHANNELS = 5


def tokens(count: int, seed: int = 0, channels: int = CHANNELS) -> F32:
    """Integers up to 64: the products of 256 tokens are below 2**24, those of ten thousand are not."""
    return np.random.default_rng(seed).integers(-64, 65, (count, channels)).astype(np.float32)


def gaussian(seed: int) -> F32:
    """700 tokens whose sums are rounded."""
    return np.random.default_rng(seed).standard_normal((700, CHANNELS)).astype(np.float32)


def centred(left: F32, right: F32) -> NDArray[np.float64]:
    """Sum of left' right less the product of left's sums and right's means, rounded as files hold it."""
    sums, mean = left.sum(axis=0, dtype=np.float64), right.sum(axis=0, dtype=np.float64) / len(right)
    whole = left.astype(np.float64).T @ right.astype(np.float64)
    return (whole - np.multiply.outer(sums, mean)).astype(np.float32).astype(np.float64)


def seen(pairs: Pairs, *, flip: bool = False, jobs: int = 1) -> Moments:
    found = moments(pairs, CHANNELS, flip=flip, jobs=jobs)
    assert found is not None
    return found


def symmetric(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """As computed: the upper triangle twice."""
    return np.triu(values) + np.triu(values, 1).T


@pytest.mark.parametrize("count", [1, ROWS, ROWS + 1, PARTS * ROWS, 40 * ROWS + 7])
def test_one_stream_gives_its_mean_and_its_centred_second_moments(count: int) -> None:
    x = tokens(count)
    found = seen([(x, x)])
    assert (found.tokens, found.paired) == (count, count)
    np.testing.assert_array_equal(found.hessian, symmetric(centred(x, x)))
    np.testing.assert_array_equal(found.mean, x.mean(axis=0, dtype=np.float64))
    np.testing.assert_array_equal(found.mean_exact, found.mean)
    assert found.drift is None


@pytest.mark.parametrize("count", [3, 2 * ROWS, 40 * ROWS + 7])
def test_two_streams_give_both_means_and_the_drift_between_them(count: int) -> None:
    exact, x = tokens(count), tokens(count, 1)
    found = seen([(exact, x)])
    np.testing.assert_array_equal(found.hessian, symmetric(centred(x, x)))
    np.testing.assert_array_equal(found.mean, x.mean(axis=0, dtype=np.float64))
    np.testing.assert_array_equal(found.mean_exact, exact.mean(axis=0, dtype=np.float64))
    assert found.drift is not None
    np.testing.assert_allclose(found.drift, centred(x, exact - x), rtol=1e-7)


@pytest.mark.parametrize("count", [3, 2 * ROWS, 40 * ROWS + 7])
def test_the_drift_can_be_summed_behind_the_weights(count: int) -> None:
    exact, x, w = tokens(count), tokens(count, 1), np.array([[1, 0], [-2, 1], [0, 3], [1, 1], [2, -1]], np.float32)
    behind, plain = moments([(exact, x)], CHANNELS, flip=False, weights=w), seen([(exact, x)])
    assert behind is not None
    assert behind.drift is not None
    assert plain.drift is not None
    expected = plain.drift @ w
    np.testing.assert_allclose(behind.drift, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    for name in ("hessian", "mean", "mean_exact", "tokens", "paired"):
        np.testing.assert_array_equal(getattr(behind, name), getattr(plain, name))
    same = moments([(x, x)], CHANNELS, flip=False, weights=w)
    assert same is not None
    assert same.drift is None


def test_tokens_without_an_exact_counterpart_count_for_the_hessian_alone() -> None:
    exact, x, more = tokens(300), tokens(300, 1), tokens(500, 2)
    found = seen([(exact, x), (None, more)])
    assert (found.tokens, found.paired) == (800, 300)
    both = np.concatenate([x, more])
    np.testing.assert_array_equal(found.hessian, symmetric(centred(both, both)))
    alone = seen([(exact, x)])
    np.testing.assert_array_equal(found.mean, alone.mean)
    np.testing.assert_array_equal(found.mean_exact, alone.mean_exact)
    np.testing.assert_array_equal(found.drift, alone.drift)


def test_tokens_without_any_counterpart_take_their_own_mean_for_both() -> None:
    x = tokens(300)
    found = seen([(None, x)])
    assert (found.tokens, found.paired, found.drift) == (300, 0, None)
    np.testing.assert_array_equal(found.hessian, symmetric(centred(x, x)))
    for mean in (found.mean, found.mean_exact):
        np.testing.assert_array_equal(mean, x.mean(axis=0, dtype=np.float64))


def test_streams_that_part_only_later_have_the_drift_of_the_whole() -> None:
    first, exact, x = tokens(100), tokens(300, 1), tokens(300, 2)
    found = seen([(first, first), (exact, x)])
    whole_exact, whole = np.concatenate([first, exact]), np.concatenate([first, x])
    np.testing.assert_array_equal(found.mean_exact, whole_exact.mean(axis=0, dtype=np.float64))
    np.testing.assert_allclose(found.drift, centred(whole, whole_exact - whole), rtol=1e-7)


def test_no_token_gives_no_moments() -> None:
    assert moments([], CHANNELS, flip=False) is None
    empty = np.zeros((0, CHANNELS), np.float32)
    assert moments([(empty, empty)], CHANNELS, flip=False) is None


def test_an_empty_sample_changes_nothing() -> None:
    x, empty = tokens(40), np.zeros((0, 3), np.float32)
    np.testing.assert_array_equal(seen([(empty, empty), (x, x)]).hessian, seen([(x, x)]).hessian)


def test_flipped_arrays_hold_tokens_as_columns() -> None:
    exact, x = tokens(40), tokens(40, 1)
    plain, flipped = seen([(exact, x)]), seen([(exact.T, x.T)], flip=True)
    np.testing.assert_array_equal(plain.hessian, flipped.hessian)
    np.testing.assert_array_equal(plain.drift, flipped.drift)


def test_leading_dimensions_are_tokens() -> None:
    x = tokens(60)
    found = seen([(x.reshape(3, 20, CHANNELS),) * 2])
    np.testing.assert_array_equal(found.hessian, seen([(x, x)]).hessian)


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 700), max_size=6), jobs=st.integers(1, 3))
def test_neither_the_cut_into_samples_nor_jobs_change_a_bit(cuts: list[int], jobs: int) -> None:
    exact, x = gaussian(0), gaussian(1)
    edges = [0, *sorted(cuts), 700]
    pairs = [(exact[a:b], x[a:b]) for a, b in itertools.pairwise(edges)]
    parts, whole = seen(pairs, jobs=jobs), seen([(exact, x)])
    for name in ("hessian", "drift", "mean", "mean_exact"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


@pytest.mark.parametrize("stripe", [1, 2, 3, 4, 5])
def test_sums_computed_in_stripes_are_those_of_the_whole(stripe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, x = tokens(700), tokens(700, 1)
    whole = seen([(exact, x)])
    monkeypatch.setattr(hessian, "STRIPE", stripe)
    parts = seen([(exact, x)], jobs=2)
    np.testing.assert_array_equal(parts.hessian, whole.hessian)
    np.testing.assert_array_equal(parts.drift, whole.drift)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("jobs", [1, 2])
def test_values_that_are_not_finite_show_without_a_warning(value: float, jobs: int) -> None:
    x = tokens(10)
    x[3, 2] = value
    found = seen([(x, x)], jobs=jobs)
    assert not np.isfinite(found.hessian[2]).any()
    assert np.isfinite(found.mean[:2]).all()


def test_products_beyond_float32_show_without_a_warning() -> None:
    x = np.full((10, CHANNELS), 3e38, np.float32)
    assert not np.isfinite(seen([(x, -x)]).hessian).any()


@pytest.mark.parametrize(("shape", "flip"), [((4, 6), False), ((6, 4), True)])
def test_an_input_of_another_width_is_refused(shape: tuple[int, int], flip: bool) -> None:
    x: NDArray[Any] = np.ones(shape, np.float32)
    with pytest.raises(UsageError, match=r"an input of shape \[4, 6\], expected 5 in the last dim"):
        moments([(x, x)], CHANNELS, flip=flip)


def test_samples_are_read_once_and_in_order() -> None:
    order: list[int] = []

    def stream(parts: Sequence[F32]) -> Pairs:
        for number, part in enumerate(parts):
            order.append(number)
            yield part, part

    moments(stream([tokens(200, n) for n in range(4)]), CHANNELS, flip=False)
    assert order == [0, 1, 2, 3]
