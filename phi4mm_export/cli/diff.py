"""Say what differs between two packages or ONNX files: files, contract, nodes, attributes, constants, values, codes.

With one path, print it as canonical text (git's textconv).

Example: phi4mm diff ./old ./new --tolerance 1e-3
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phi4mm_export.cli import render
from phi4mm_export.cli.options import JsonFlag

if TYPE_CHECKING:
    from phi4mm_export.package.diff import Difference
    from phi4mm_export.pipeline.diff import DiffReport

SHOWN = 5
"""Differences of one kind that are listed without --all."""

MOST_SHOWN = 100
"""Characters of either side in one line."""


def command(
    a: Annotated[Path, typer.Argument(help="Package folder, ONNX file or JSON file.", metavar="A")],
    b: Annotated[
        Path | None, typer.Argument(help="What to compare it with; without it A is printed.", metavar="B")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(metavar="X", help="Relative L2 distance up to which values count as equal.")
    ] = 0.0,
    every: Annotated[bool, typer.Option("--all", help="List every difference, not the first few of a kind.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 5 when anything differs (beyond --tolerance).")
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    from phi4mm_export.errors import ExitCode
    from phi4mm_export.pipeline.diff import canonical_text, diff

    if b is None:
        for line in canonical_text(a):
            render.text(line)
        return
    report = diff(a, b, tolerance=tolerance)
    if json_output:
        render.document(report.as_json())
    else:
        for line in report_lines(report, every=every):
            render.text(line)
    if exit_code and not report.equal:
        raise typer.Exit(int(ExitCode.QUALITY))


def report_lines(report: DiffReport, *, every: bool) -> list[str]:
    """The report as text: differences by level and kind, then the counts."""
    from phi4mm_export.package.diff import Level

    lines: list[str] = []
    order = list(Level)

    def kind(item: Difference) -> tuple[int, str]:
        return order.index(item.level), "" if item.level is Level.VALUE else item.what

    for _, group in groupby(sorted(report.differences, key=kind), key=kind):
        items = list(group)
        shown: Sequence[Difference] = items if every else items[:SHOWN]
        lines += [_line(item) for item in shown]
        if len(items) > len(shown):
            lines.append(f"{items[0].level}: {len(items) - len(shown):,} more of this kind (--all lists them)")
    counts = ", ".join(f"{count:,} {level}" for level, count in report.count().items())
    within = sum(item.within for item in report.differences)
    remark = f", {within:,} within {report.tolerance:g}" if within else ""
    lines.append(f"{'equal' if report.equal else 'different'}: {counts or 'no differences'}{remark}")
    return lines


def _line(item: Difference) -> str:
    sides = f" ({_short(item.a)} -> {_short(item.b)})" if item.a or item.b else ""
    return f"{item.level} {item.where}: {item.what}{sides}" + (" [within tolerance]" if item.within else "")


def _short(text: str) -> str:
    """A side's text, cut to what a line can show; --json has all of it."""
    return (text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}...") or "nothing"
