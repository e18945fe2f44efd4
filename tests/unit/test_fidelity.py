"""Measures of arrays and of next-token distributions, against numbers worked out by hand or by plain numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phi4mm_export.checks.fidelity import (
    RowComparison,
    TokenComparison,
    common_prefix,
    fidelity,
    log_softmax,
    pooled,
)


def test_the_three_measures_of_a_small_array_are_those_worked_out_by_hand() -> None:
    expected = np.array([[3.0, 4.0], [0.0, 5.0]], np.float32)
    found = np.array([[3.0, 4.0], [3.0, 1.0]], np.float32)
    result = fidelity(found, expected)
    assert result.relative_l2 == pytest.approx(5 / math.sqrt(50))
    assert result.cosine == pytest.approx((25 + 5) / math.sqrt(50 * 35))
    assert (result.max_abs, result.positions, result.worst_position) == (4.0, 2, 1)
    assert result.worst_position_l2 == pytest.approx(1.0)


def test_pieces_give_the_same_figures_as_the_whole() -> None:
    rng = np.random.default_rng(0)
    expected, found = rng.standard_normal((2, 10, 7))
    rows = RowComparison()
    rows.add(found[:4], expected[:4])
    rows.add(found[4:], expected[4:])
    assert rows.result() == fidelity(found, expected)


def test_equal_arrays_have_no_error_and_a_silent_one_does_not_divide_by_zero() -> None:
    equal, silent = np.ones((2, 3)), np.zeros((2, 3))
    assert (fidelity(equal, equal).relative_l2, fidelity(equal, equal).cosine) == (0.0, 1.0)
    assert (fidelity(silent, silent).relative_l2, fidelity(silent, silent).cosine) == (0.0, 1.0)
    assert fidelity(equal, silent).relative_l2 == pytest.approx(math.sqrt(6))


def test_a_nearly_silent_position_does_not_become_the_worst_by_its_silence() -> None:
    expected = np.array([[1.0, 1.0], [1e-9, 0.0]])
    found = np.array([[1.0, 1.5], [2e-9, 0.0]])
    assert fidelity(found, expected).worst_position == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_a_fault_without_figures(bad: float) -> None:
    found = np.array([[1.0, bad]], np.float16)
    result = fidelity(found, np.ones((1, 2), np.float16))
    assert (result.relative_l2, result.cosine, result.max_abs) == (None, None, None)
    assert "1 of 2 values" in result.fault


def test_another_shape_is_a_fault_that_names_both() -> None:
    assert fidelity(np.ones((2, 3)), np.ones((3, 3))).fault == "shape [2, 3], expected [3, 3]"


def test_nothing_compared_is_a_fault() -> None:
    assert fidelity(np.ones((0, 3)), np.ones((0, 3))).fault == "nothing was compared"


def test_divergence_top_token_and_likelihood_follow_their_definitions() -> None:
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.5, 0.3])
    comparison = TokenComparison()
    comparison.add(np.log(q) + 3.0, np.log(p) - 1.0, target=2)  # logits are free to shift
    comparison.add(np.log(p), np.log(p), target=0)
    figures = comparison.result()
    divergence = float(np.sum(p * np.log(p / q)))
    assert figures.kl_mean == pytest.approx(divergence / 2)
    assert figures.kl_max == pytest.approx(divergence)
    assert figures.top1 == 0.5
    assert figures.nll == pytest.approx(-(math.log(0.3) + math.log(0.7)) / 2)
    assert figures.nll_float == pytest.approx(-(math.log(0.1) + math.log(0.7)) / 2)
    assert figures.perplexity == pytest.approx(math.exp(figures.nll or 0))


def test_the_divergence_is_taken_from_the_float_model() -> None:
    p, q = np.array([0.98, 0.01, 0.01]), np.array([0.4, 0.3, 0.3])
    one, other = TokenComparison(), TokenComparison()
    one.add(np.log(q), np.log(p))
    other.add(np.log(p), np.log(q))
    assert one.result().kl_mean == pytest.approx(float(np.sum(p * np.log(p / q))))
    assert one.result().kl_mean != pytest.approx(other.result().kl_mean or 0)


def test_logits_that_are_not_finite_or_of_another_vocabulary_are_faults() -> None:
    comparison = TokenComparison()
    comparison.add(np.array([0.0, np.nan]), np.zeros(2))
    assert (comparison.result().kl_mean, comparison.result().fault) == (None, "logits are NaN or infinite")
    comparison = TokenComparison()
    comparison.add(np.zeros(3), np.zeros(2))
    assert comparison.result().fault == "3 logits, expected 2"


def test_pooling_weighs_by_positions_and_keeps_the_largest_divergence() -> None:
    short, long = TokenComparison(), TokenComparison()
    short.add(np.array([0.0, 1.0]), np.array([1.0, 0.0]))
    for _ in range(3):
        long.add(np.zeros(2), np.zeros(2))
    both = pooled([short.result(), long.result()])
    assert both.positions == 4
    assert both.kl_mean == pytest.approx((short.result().kl_mean or 0) / 4)
    assert both.kl_max == short.result().kl_max
    assert pooled([]).fault == "nothing was compared"


def test_log_softmax_does_not_overflow() -> None:
    assert log_softmax(np.array([1e4, 0.0], np.float32)).tolist() == pytest.approx([0.0, -1e4])


def test_answers_agree_up_to_their_first_difference() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 3]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0
