"""Findings and reports: what counts as a failure, and the form in which they are printed."""

from __future__ import annotations

import json

from phi4mm_export.checks.report import Report, error, most_severe_first, note, warning


def _report(*findings: object) -> Report:
    return Report("package", "official", tuple(findings))  # type: ignore[arg-type]


def test_only_an_error_changes_the_exit_code() -> None:
    assert int(_report().exit_code) == 0
    assert int(_report(note("C1", "f", "n"), warning("C2", "f", "w")).exit_code) == 0
    assert int(_report(note("C1", "f", "n"), error("C3", "f", "e")).exit_code) == 4


def test_a_finding_reads_as_one_sentence() -> None:
    finding = error("C1", "file: key", "the value is wrong", expected=4, found=5, fix="write 4")
    assert str(finding) == "file: key: the value is wrong (expected 4, found 5); write 4"


def test_errors_come_first_and_keep_their_order() -> None:
    found = [note("C1", "", ""), error("C2", "", ""), warning("C3", "", ""), error("C4", "", "")]
    assert [finding.code for finding in most_severe_first(found)] == ["C2", "C4", "C3", "C1"]


def test_a_report_is_plain_json_with_the_counts() -> None:
    document = _report(error("C1", "f", "e"), warning("C2", "f", "w")).as_json()
    assert json.loads(json.dumps(document)) == document
    assert (document["ok"], document["errors"], document["warnings"]) == (False, 1, 1)
