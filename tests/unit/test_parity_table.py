"""The parity table: verdicts, findings and the text that people read."""

from __future__ import annotations

import dataclasses

from phi4mm_export.checks.numerics import Errors, Measure, Precision, Tolerance
from phi4mm_export.checks.parity_table import ParityRow, ParityTable
from phi4mm_export.checks.report import Severity

GOOD = ParityRow(
    graph="decoder",
    mode="image",
    case="8 steps",
    precision=Precision.FP32,
    errors=Errors(1e-5, 2e-6, 1.0),
    tolerance=Tolerance(Measure.PEAK, 2e-4),
    clear_tokens=9,
)
FAR = dataclasses.replace(GOOD, errors=Errors(5.0, 1.0, 0.1))


def table(*rows: ParityRow) -> ParityTable:
    return ParityTable(rows, "the original")


def test_a_row_within_its_tolerance_passes_and_is_a_note_with_its_figure() -> None:
    (finding,) = table(GOOD).findings()
    assert finding.severity is Severity.NOTE
    assert finding.found == "largest difference / rms 1e-05"
    assert table(GOOD).ok


def test_a_row_beyond_its_tolerance_is_an_error_that_says_where_expected_and_found() -> None:
    (finding,) = table(FAR).findings()
    assert finding.severity is Severity.ERROR
    assert (finding.where, finding.expected) == ("decoder, image: 8 steps", "largest difference / rms at most 0.0002")
    assert not table(GOOD, FAR).ok


def test_a_mode_the_package_cannot_run_is_a_warning_with_the_way_out() -> None:
    row = dataclasses.replace(FAR, held=False)
    (finding,) = table(row).findings()
    assert finding.severity is Severity.WARNING
    assert "--lora gated" in finding.fix
    assert row.verdict == "differs"
    assert table(row).ok


def test_close_numbers_with_a_wrong_clear_token_fail() -> None:
    row = dataclasses.replace(GOOD, wrong_tokens=1)
    (finding,) = table(row).findings()
    assert finding.severity is Severity.ERROR
    assert finding.found == "1 different"
    assert row.verdict == "FAIL"


def test_an_output_with_nan_fails_and_the_finding_says_so() -> None:
    row = dataclasses.replace(
        GOOD, errors=Errors(float("inf"), float("inf"), -1.0, "3 of 9 values are NaN or infinite")
    )
    (finding,) = table(row).findings()
    assert finding.severity is Severity.ERROR
    assert finding.found == "3 of 9 values are NaN or infinite"


def test_no_rows_at_all_is_an_error() -> None:
    (finding,) = table().findings()
    assert finding.severity is Severity.ERROR
    assert not table().ok


def test_the_text_has_a_header_and_one_aligned_line_a_row() -> None:
    head, first, second = table(GOOD, dataclasses.replace(FAR, held=False)).lines()
    assert head.split()[:3] == ["graph", "mode", "case"]
    assert first.endswith("pass, 9/9 tokens")
    assert second.endswith("differs, 9/9 tokens")
    assert head.index("verdict") == first.index("pass") == second.index("differs")


def test_json_rows_hold_figures_tolerance_and_verdict() -> None:
    (row,) = table(GOOD).as_json()
    assert (row["max_over_rms"], row["verdict"], row["clear_tokens"]) == (1e-5, "pass", 9)
