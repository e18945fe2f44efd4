"""Say why a package is refused or answers badly, print the patch to its JSON files, write a corrected copy.

Example: phi4mm doctor ./package --fix ./corrected
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phi4mm_export.cli import github, render
from phi4mm_export.cli.options import Format, JsonFlag, Overwrite, ReportFormat, chosen_format
from phi4mm_export.errors import counted

if TYPE_CHECKING:
    from phi4mm_export.checks.diagnosis import Diagnosis
    from phi4mm_export.pipeline.doctor import DoctorReport


def command(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE", help="Folder of anybody's package.")],
    fix: Annotated[
        Path | None,
        typer.Option("--fix", metavar="DIR", help="Write a corrected copy of the package into this folder."),
    ] = None,
    overwrite: Overwrite = False,
    report_format: Format = None,
    json_output: JsonFlag = False,
) -> None:
    chosen = chosen_format(report_format, json=json_output)
    from phi4mm_export.pipeline.doctor import doctor

    report = doctor(package, fix=fix, overwrite=overwrite)
    if chosen is ReportFormat.GITHUB:
        github.present(outcome(report, package))
    elif chosen is ReportFormat.JSON:
        render.document(report.as_json())
    else:
        for line in report_lines(report):
            render.text(line)
    if not report.ok:
        raise typer.Exit(int(report.exit_code))


def report_lines(report: DoctorReport) -> list[str]:
    """The report as text: causes, the patch, what the copy still has, the verdict."""
    lines: list[str] = []
    for item in report.diagnoses:
        lines += _diagnosis(item)
    if report.patch:
        lines += ["", f"patch for {report.package} (patch -p1):", *report.patch.rstrip("\n").split("\n"), ""]
    if report.copied_to:
        lines.append(f"a corrected copy was written to {report.copied_to}")
        for item in report.left:
            if item.finding.severity == "note":
                continue
            lines.append(f"still there: {item.finding.code} {item.finding.where}: {item.cause}")
    return [*lines, _verdict(report)]


def _verdict(report: DoctorReport) -> str:
    counts = [sum(item.finding.severity == kind for item in report.diagnoses) for kind in ("error", "warning", "note")]
    repaired = sum(bool(item.repair) for item in report.diagnoses)
    if counts[0] + counts[1] == 0:
        return f"nothing is wrong; {counted(counts[2], 'remark')}"
    words = (counted(counts[0], "error"), counted(counts[1], "warning"), counted(counts[2], "remark"))
    return f"{', '.join(words)}; --fix repairs {repaired}"


def outcome(report: DoctorReport, package: Path) -> github.Outcome:
    """The report as annotations and a summary: the cause first, then what was found."""
    from phi4mm_export.cli.validate import remark

    remarks = []
    for item in report.diagnoses:
        told = remark(item.finding)
        cause = "" if item.cause == item.finding.what else f"{item.cause}: "
        remarks.append(replace(told, what=cause + told.what, fix=item.repair or told.fix))
    copy = (("corrected copy", report.copied_to),) if report.copied_to else ()
    return github.Outcome("doctor", package, report.ok, _verdict(report), tuple(remarks), copy)


def _diagnosis(item: Diagnosis) -> list[str]:
    finding = item.finding
    lines = [f"{finding.severity} {finding.code} {item.cause}", f"    where: {finding.where}"]
    details = (
        ("what", finding.what if finding.what not in (item.cause, "changed", "missing") else ""),
        ("expected", finding.expected),
        ("found", finding.found),
        ("the runtime shows", item.symptom),
        ("known as", ", ".join(item.upstream)),
        ("--fix", item.repair),
        ("by hand", "" if item.repair else finding.fix),
    )
    return lines + [f"    {label}: {value}" for label, value in details if value]
