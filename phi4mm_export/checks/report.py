"""What a check found, and the verdict over all of it.

Codes are stable and grouped by hundreds:
1xx the contract of the graphs, 2xx external data and files, 3xx genai_config.json, 4xx processor files,
5xx tokenizer files, 6xx kernels, 7xx parity.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from phi4mm_export.errors import ExitCode


class Severity(StrEnum):
    """How much a finding weighs: only errors change the exit code."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or worth knowing.

    `where` names the file and the key, node or tensor; `expected` and `found` are short values, empty where the
    sentence in `what` says it all; `fix` says how to go on.
    """

    code: str
    severity: Severity
    where: str
    what: str
    expected: str = ""
    found: str = ""
    fix: str = ""

    def __str__(self) -> str:
        values = []
        if self.expected:
            values.append(f"expected {self.expected}")
        if self.found:
            values.append(f"found {self.found}")
        detail = f" ({', '.join(values)})" if values else ""
        advice = f"; {self.fix}" if self.fix else ""
        return f"{self.where}: {self.what}{detail}{advice}"


@dataclass(frozen=True)
class Row:
    """How one tensor at the border of a graph stands to the contract.

    `status` is one of match, missing, absent (missing and optional), extra, name differs, dtype differs,
    rank differs, dims differ, overridable; `found` is empty for a missing tensor, `expected` for an extra one.
    """

    graph: str
    side: str
    name: str
    status: str
    expected: str = ""
    found: str = ""


@dataclass(frozen=True)
class Report:
    """The verdict on one package. `contract` is the variant it was judged by."""

    package: str
    contract: str
    findings: tuple[Finding, ...]
    rows: tuple[Row, ...] = ()
    facts: tuple[tuple[str, Any], ...] = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        return self.of(Severity.ERROR)

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of one severity, in the order they were made."""
        return tuple(finding for finding in self.findings if finding.severity is severity)

    @property
    def ok(self) -> bool:
        """True if there is no error."""
        return not self.errors

    @property
    def exit_code(self) -> ExitCode:
        """0, or 4 if any error was found."""
        return ExitCode.OK if self.ok else ExitCode.PACKAGE

    def as_json(self) -> dict[str, Any]:
        """The report as plain data with a fixed key order."""
        return {
            "package": self.package,
            "contract": self.contract,
            "ok": self.ok,
            "errors": len(self.errors),
            "warnings": len(self.of(Severity.WARNING)),
            "findings": [asdict(finding) for finding in self.findings],
            "tensors": [asdict(row) for row in self.rows],
            "facts": dict(self.facts),
        }


def error(code: str, where: str, what: str, *, expected: object = "", found: object = "", fix: str = "") -> Finding:
    """A finding that makes the package unusable or breaks its contract."""
    return Finding(code, Severity.ERROR, where, what, str(expected), str(found), fix)


def warning(code: str, where: str, what: str, *, expected: object = "", found: object = "", fix: str = "") -> Finding:
    """A finding that works today and is likely not what was wanted."""
    return Finding(code, Severity.WARNING, where, what, str(expected), str(found), fix)


def note(code: str, where: str, what: str, *, expected: object = "", found: object = "", fix: str = "") -> Finding:
    """Something a user of the package should know."""
    return Finding(code, Severity.NOTE, where, what, str(expected), str(found), fix)


def most_severe_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors, then warnings, then notes; otherwise in the order given."""
    order = list(Severity)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))
