"""The report of an evaluation on disk: `evaluation.json` and `index.html`, one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from phi4mm_export.checks.evaluation import Evaluation
from phi4mm_export.checks.report_html import report_html
from phi4mm_export.package.publish import staged
from phi4mm_export.package.write import write_file
from phi4mm_export.spec.json_text import json_bytes

JSON_FILE, HTML_FILE = "evaluation.json", "index.html"
REPORT_MARKERS = (JSON_FILE,)
"""A folder with this file is a report, and may be replaced with --overwrite."""


def write_report(evaluation: Evaluation, target: Path, *, overwrite: bool) -> None:
    """Both files in a new folder that appears in one step. Raises UsageError for a target that must not be replaced."""
    with staged(target, overwrite=overwrite, markers=REPORT_MARKERS) as folder:
        write_file(folder, JSON_FILE, json_bytes(evaluation.as_json(), indent=2))
        write_file(folder, HTML_FILE, report_html(evaluation))
