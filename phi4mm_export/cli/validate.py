"""Judge a package: the contract of its graphs, its configuration, kernels, and parity with the original.

Example: phi4mm validate ./package --contract official --ep cuda
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phi4mm_export.checks.report import Finding, Report, Severity
from phi4mm_export.cli import github, render
from phi4mm_export.cli.choices import adapter_paths
from phi4mm_export.cli.options import Format, JsonFlag, ReportFormat, chosen_format
from phi4mm_export.errors import counted

LEVELS = {
    Severity.ERROR: github.Level.ERROR,
    Severity.WARNING: github.Level.WARNING,
    Severity.NOTE: github.Level.NOTICE,
}


def command(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE", help="Folder with genai_config.json and the graphs.")],
    contract: Annotated[
        str, typer.Option(help="auto, official, gated, mobius, or the path of a contract file.", metavar="NAME|FILE")
    ] = "auto",
    reference: Annotated[
        str | None,
        typer.Option(help="Folder or hub id: compare every graph with PyTorch, mode by mode.", metavar="CHECKPOINT"),
    ] = None,
    adapter_path: Annotated[
        list[str] | None,
        typer.Option(metavar="[ROLE=]DIR", help="PEFT folder the package was exported with; repeatable."),
    ] = None,
    provider: Annotated[
        str | None,
        typer.Option(
            "--ep", metavar="cpu|cuda", help="Whose kernels are looked for; default: what the config asks for."
        ),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor of the contract, not only the faults.")
    ] = False,
    report_format: Format = None,
    json_output: JsonFlag = False,
) -> None:
    chosen = chosen_format(report_format, json=json_output)
    from phi4mm_export.pipeline.validate import validate
    from phi4mm_export.spec.phi4mm_config import parse_provider

    report = validate(
        package,
        contract,
        reference=reference,
        provider=None if provider is None else parse_provider(provider),
        adapter_paths=adapter_paths(adapter_path, None),
    )
    if chosen is ReportFormat.GITHUB:
        github.present(outcome(report, package))
    elif chosen is ReportFormat.JSON:
        render.document(report.as_json())
    else:
        for line in report_lines(report, tensors=tensors):
            render.text(line)
    if not report.ok:
        raise typer.Exit(int(report.exit_code))


def report_lines(report: Report, *, tensors: bool) -> list[str]:
    """The report as text: findings, then the contract's rows (all, or a count), then the verdict."""
    lines = []
    for finding in report.findings:
        lines.append(f"{finding.severity} {finding.code} {finding.where}: {finding.what}")
        for label, value in (("expected", finding.expected), ("found", finding.found), ("fix", finding.fix)):
            if value:
                lines.append(f"    {label}: {value}")
    if tensors:
        lines += [f"{row.status:13} {row.graph} {row.side} {row.found or row.expected}" for row in report.rows]
    lines.append(f"contract {report.contract}: {_matches(report)}")
    return [*lines, _verdict(report)]


def _matches(report: Report) -> str:
    matched = sum(row.status == "match" for row in report.rows)
    judged = sum(row.status not in ("absent", "overridable") for row in report.rows)
    return f"{matched} of {judged} tensors match"


def _verdict(report: Report) -> str:
    errors, warnings, notes = (len(report.of(severity)) for severity in Severity)
    verdict = "ok" if report.ok else "not ok"
    return f"{verdict}: {counted(errors, 'error')}, {counted(warnings, 'warning')}, {counted(notes, 'note')}"


def outcome(report: Report, package: Path) -> github.Outcome:
    """The report as annotations and a summary."""
    facts = (
        (f"contract {report.contract}", _matches(report)),
        *((key, str(value)) for key, value in report.facts if value),
    )
    remarks = tuple(remark(finding) for finding in report.findings)
    return github.Outcome("validate", package, report.ok, _verdict(report), remarks, facts)


def remark(finding: Finding) -> github.Remark:
    """A finding as an annotation."""
    values = [f"{word} {value}" for word, value in (("expected", finding.expected), ("found", finding.found)) if value]
    detail = f" ({', '.join(values)})" if values else ""
    return github.Remark(LEVELS[finding.severity], finding.code, finding.where, finding.what + detail, finding.fix)
