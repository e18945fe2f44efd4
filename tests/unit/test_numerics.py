"""Error measures and tolerances: each measure sees what it is meant to see, and a fault never passes."""

from __future__ import annotations

import numpy as np
import pytest

from phi4mm_export.checks.cases import Group
from phi4mm_export.checks.numerics import (
    Errors,
    Measure,
    Precision,
    Tolerance,
    clear_margin,
    errors,
    tolerance_of,
    worst,
)

ANY = Tolerance(Measure.PEAK, np.inf)


def test_equal_arrays_have_no_error() -> None:
    a = np.arange(1.0, 7.0).reshape(2, 3)
    assert errors(a, a) == Errors(0.0, 0.0, pytest.approx(1.0))


def test_the_measures_are_those_of_their_definitions() -> None:
    found, expected = np.array([3.0, 0.0, 0.0, 0.0]), np.array([0.0, 4.0, 0.0, 0.0])
    measured = errors(found, expected)
    assert measured.peak == pytest.approx(4.0 / 2.0)
    assert measured.relative_l2 == pytest.approx(5.0 / 4.0)
    assert measured.cosine == pytest.approx(0.0)


def test_the_peak_sees_one_wrong_value_that_relative_l2_hardly_sees() -> None:
    expected = np.ones(10_000)
    found = expected.copy()
    found[17] = 1.5
    measured = errors(found, expected)
    assert measured.peak == pytest.approx(0.5)
    assert measured.relative_l2 == pytest.approx(0.005)


def test_cosine_is_blind_to_scale_and_the_others_are_not() -> None:
    expected = np.linspace(-1, 1, 50)
    measured = errors(2 * expected, expected)
    assert measured.cosine == pytest.approx(1.0)
    assert measured.relative_l2 == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_a_fault_whatever_the_tolerance(bad: float) -> None:
    measured = errors(np.array([1.0, bad, 3.0]), np.ones(3))
    assert measured.fault == "1 of 3 values are NaN or infinite"
    assert not ANY.holds(measured)


def test_another_shape_is_a_fault() -> None:
    measured = errors(np.ones((2, 3)), np.ones((3, 2)))
    assert measured.fault == "shape [2, 3], expected [3, 2]"
    assert not ANY.holds(measured)


def test_an_empty_output_is_a_fault() -> None:
    assert errors(np.zeros((0, 4)), np.zeros((0, 4))).fault == "the output is empty"


def test_comparing_nothing_is_a_fault() -> None:
    assert not ANY.holds(worst([]))


def test_the_worst_takes_each_measure_s_worst_and_keeps_a_fault() -> None:
    both = worst([Errors(1.0, 0.1, 0.9), Errors(0.5, 0.2, 0.99, "broken")])
    assert both == Errors(1.0, 0.2, 0.9, "broken")


def test_zeros_expected_are_compared_by_distance() -> None:
    assert errors(np.zeros(3), np.zeros(3)) == Errors(0.0, 0.0, 1.0)
    assert errors(np.full(3, 0.5), np.zeros(3)).peak == 0.5


def test_half_precision_is_measured_in_double() -> None:
    big = np.full(4, 60000, np.float16)
    assert errors(big, big).peak == 0.0


def test_a_cosine_tolerance_is_a_lower_bound() -> None:
    tolerance = Tolerance(Measure.COSINE, 0.99)
    assert tolerance.holds(Errors(1, 1, 0.995))
    assert not tolerance.holds(Errors(0, 0, 0.98))
    assert str(tolerance) == "cosine at least 0.99"


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("graph", Group)
def test_every_graph_has_a_tolerance_in_every_format(precision: Precision, graph: Group) -> None:
    assert np.isfinite(tolerance_of(precision, graph.value).limit)


def test_coarser_formats_need_a_larger_lead_before_a_token_is_clear() -> None:
    margins = [clear_margin(precision) for precision in Precision]
    assert margins == sorted(margins)


def test_long_prompts_have_a_wider_float32_tolerance_only() -> None:
    wide = tolerance_of(Precision.FP32, "decoder", long=True)
    assert wide.limit > tolerance_of(Precision.FP32, "decoder").limit
    assert tolerance_of(Precision.FP16, "decoder", long=True) == tolerance_of(Precision.FP16, "decoder")
