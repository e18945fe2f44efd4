"""Parity as a table: one row per comparison, its worst figures, its tolerance and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phi4mm_export.checks.numerics import Errors, Precision, Tolerance
from phi4mm_export.checks.report import Finding, error, note, warning

DIFFERS, CANNOT_SERVE, FIGURE, TOKENS_DIFFER = "C701", "C702", "C703", "C704"


@dataclass(frozen=True)
class ParityRow:
    """One comparison with the original.

    `graph` is vision, speech, embedding, decoder or chain (all of them); `mode` the kinds of request it stands for;
    `held` tells whether the package claims to run this mode: one with an adapter merged in cannot run the others,
    whose distance is then shown, not judged. `tokens` are wrong greedy tokens of clear ones, by count.
    """

    graph: str
    mode: str
    case: str
    precision: Precision
    errors: Errors
    tolerance: Tolerance
    held: bool = True
    wrong_tokens: int = 0
    clear_tokens: int = 0

    @property
    def ok(self) -> bool:
        """Close enough, with every clear greedy token equal."""
        return self.tolerance.holds(self.errors) and not self.wrong_tokens

    @property
    def verdict(self) -> str:
        """pass, FAIL, or differs (a mode this package cannot run)."""
        return "pass" if self.ok else "FAIL" if self.held else "differs"


@dataclass(frozen=True)
class ParityTable:
    """All comparisons of one package with one source of truth."""

    rows: tuple[ParityRow, ...]
    against: str
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Something was compared, and every mode the package claims is right."""
        return bool(self.rows) and all(row.ok or not row.held for row in self.rows)

    def findings(self) -> list[Finding]:
        """Errors for what differs, warnings for modes the package cannot run, and every figure as a note."""
        if not self.rows:
            return [error(DIFFERS, "package", "nothing was compared with the original")]
        return [_finding(row, self.against) for row in self.rows]

    def lines(self) -> list[str]:
        """The table as text, a header first."""
        head = ["graph", "mode", "case", "format", "max/rms", "rel. L2", "cosine", "tolerance", "verdict"]
        body = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in body) for column in range(len(head))]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in body
        ]

    def as_json(self) -> list[dict[str, Any]]:
        """The rows as plain data."""
        return [
            {
                "graph": row.graph,
                "mode": row.mode,
                "case": row.case,
                "precision": row.precision.value,
                "max_over_rms": row.errors.peak,
                "relative_l2": row.errors.relative_l2,
                "cosine": row.errors.cosine,
                "fault": row.errors.fault,
                "tolerance": str(row.tolerance),
                "wrong_tokens": row.wrong_tokens,
                "clear_tokens": row.clear_tokens,
                "verdict": row.verdict,
            }
            for row in self.rows
        ]


def _cells(row: ParityRow) -> list[str]:
    figures = (
        [row.errors.fault, "", ""]
        if row.errors.fault
        else [f"{row.errors.peak:.1e}", f"{row.errors.relative_l2:.1e}", f"{row.errors.cosine:.7f}"]
    )
    tokens = f", {row.clear_tokens - row.wrong_tokens}/{row.clear_tokens} tokens" if row.clear_tokens else ""
    return [row.graph, row.mode, row.case, row.precision.value, *figures, str(row.tolerance), row.verdict + tokens]


def _finding(row: ParityRow, against: str) -> Finding:
    where = f"{row.graph}, {row.mode}: {row.case}"
    figure = row.errors.fault or f"{row.tolerance.measure} {row.errors.of(row.tolerance.measure):.3g}"
    expected = str(row.tolerance)
    if row.ok:
        return note(FIGURE, where, f"agrees with {against}", expected=expected, found=figure)
    if not row.held:
        return warning(
            CANNOT_SERVE,
            where,
            "this package runs such requests with other weights than the original",
            expected=expected,
            found=figure,
            fix="export with --lora gated for all modes",
        )
    if row.tolerance.holds(row.errors):
        return error(
            TOKENS_DIFFER,
            where,
            f"greedy tokens differ from {against}",
            expected=f"{row.clear_tokens} clear tokens equal",
            found=f"{row.wrong_tokens} different",
        )
    return error(DIFFERS, where, f"differs from {against}", expected=expected, found=figure)
