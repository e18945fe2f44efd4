"""Results as GitHub's workflow commands, and as a table in the step's summary.

Every line printed is a command with everything escaped, so that no name inside a package can start another one.
Source: GitHub's page "Workflow commands for GitHub Actions"; the runner shows ten annotations of a kind per step and
cuts messages at 4,096 characters.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from phi4mm_export.cli import render
from phi4mm_export.errors import Phi4mmError
from phi4mm_export.spec.json_lines import line_of
from phi4mm_export.spec.on_disk import is_file, is_link, real_path

SHOWN = 10
"""Annotations of one kind that GitHub shows per step."""
MOST_LETTERS = 4000
"""The runner cuts at 4,096, of which escapes are not counted."""
MOST_ROWS = 200
"""A step's summary may have 1 MiB."""
MOST_NBYTES = 4 << 20
"""Larger JSON files are not searched for the line of a key: only tokenizer.json is that large."""
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
WORKSPACE_VARIABLE = "GITHUB_WORKSPACE"

_CONTROL = re.compile(r"[\x00-\x09\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]")
_AT_LINE = re.compile(r"\bat line (\d+), column \d+")
_MARKDOWN = re.compile(r"[&<>|`*_\[\]\\~#@]")


class Level(StrEnum):
    """GitHub's kinds of annotation."""

    ERROR = "error"
    WARNING = "warning"
    NOTICE = "notice"


@dataclass(frozen=True)
class Remark:
    """One thing to annotate. `where` is a file of the package, or `FILE: KEY`; `code` groups remarks of a kind."""

    level: Level
    code: str
    where: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a command found. `verdict` is one sentence; `facts` are the rows of the summary's first table."""

    command: str
    package: Path
    ok: bool
    verdict: str
    remarks: tuple[Remark, ...]
    facts: tuple[tuple[str, str], ...] = ()


def present(outcome: Outcome) -> None:
    """Print the annotations, and append the table to the step's summary where there is one."""
    for line in annotation_lines(outcome, os.environ):
        render.text(line)
    summary = os.environ.get(SUMMARY_VARIABLE)
    if summary:
        with Path(summary).open("a", encoding="utf-8", newline="\n") as file:
            file.write(summary_table(outcome))


def error_line(err: BaseException) -> str:
    """The command that annotates an error which ended the program."""
    return _command(Level.ERROR, str(err) if isinstance(err, Phi4mmError) else f"{type(err).__name__}: {err}", "phi4mm")


def annotation_lines(outcome: Outcome, environment: Mapping[str, str]) -> list[str]:
    """One command per remark, most severe first, and the verdict as the last one.

    Where a kind has more than GitHub shows, the last one that it shows says how many there are.
    """
    lines = []
    for level in Level:
        remarks = [remark for remark in outcome.remarks if remark.level is level]
        room = SHOWN - (level is Level.NOTICE)
        for number, remark in enumerate(remarks):
            if number == room - 1 and len(remarks) > room:
                lines.append(_command(level, _rest(remarks[number:], level), f"phi4mm {outcome.command}"))
            lines.append(_annotation(remark, outcome, environment))
    verdict = f"{outcome.package.name}: {outcome.verdict}"
    return [*lines, _command(Level.NOTICE, verdict, f"phi4mm {outcome.command}")]


def summary_table(outcome: Outcome) -> str:
    """The outcome in Markdown: a heading, the facts, and every remark."""
    lines = [f"### {_cell(f'phi4mm {outcome.command} {outcome.package.name}')}", "", _cell(outcome.verdict), ""]
    lines += _rows(("", ""), outcome.facts)
    found = [(remark.level, remark.code, remark.where, remark.what, remark.fix) for remark in outcome.remarks]
    lines += _rows(("", "code", "where", "what", "how to go on"), found[:MOST_ROWS])
    if len(found) > MOST_ROWS:
        lines += [f"and {len(found) - MOST_ROWS:,} more", ""]
    return "\n".join(lines) + "\n"


def _annotation(remark: Remark, outcome: Outcome, environment: Mapping[str, str]) -> str:
    advice = f"; {remark.fix}" if remark.fix else ""
    message = f"{remark.where}: {remark.what}{advice}"
    file, line = _place(remark, outcome.package, environment)
    return _command(remark.level, message, f"phi4mm {outcome.command}: {remark.code}", file=file, line=line)


def _command(level: Level, message: str, title: str, *, file: str = "", line: int | None = None) -> str:
    properties = {"file": file, "line": "" if line is None else str(line), "title": title}
    given = ",".join(f"{name}={escape_property(value)}" for name, value in properties.items() if value)
    return f"::{level} {given}::{escape_data(message[:MOST_LETTERS])}"


def escape_data(text: str) -> str:
    """A message as workflow commands want it; control characters that a terminal would obey become question marks."""
    return _CONTROL.sub("?", text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """The value of a property: what `escape_data` does, and colons and commas."""
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def _rest(remarks: list[Remark], level: Level) -> str:
    counts = Counter(remark.code for remark in remarks)
    kinds = ", ".join(f"{code} x {count}" for code, count in counts.items())
    return f"{len(remarks):,} more of kind {level}: {kinds}; the log and the summary list them"


def _place(remark: Remark, package: Path, environment: Mapping[str, str]) -> tuple[str, int | None]:
    """The file below the workspace that a remark is about, and the line of its key; ("", None) where there is none."""
    name, _, key = remark.where.partition(": ")
    path = package / name
    if is_link(path) or not is_file(path):
        return "", None
    root = real_path(Path(environment.get(WORKSPACE_VARIABLE) or Path.cwd()))
    real = real_path(path)
    if not real.is_relative_to(real_path(package)) or not real.is_relative_to(root):
        return "", None
    return real.relative_to(root).as_posix(), _line(real, key, remark.what)


def _line(path: Path, key: str, what: str) -> int | None:
    if path.suffix != ".json" or path.stat().st_size > MOST_NBYTES:
        return None
    stated = _AT_LINE.search(what)
    if stated:
        return int(stated.group(1))
    return line_of(path.read_text("utf-8-sig", errors="replace"), key) if key else None


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    cells = [[_cell(value) for value in row] for row in rows]
    if cells:
        for row in (head, ["---"] * len(head), *cells):
            yield f"| {' | '.join(row)} |"
        yield ""


def _cell(text: str) -> str:
    """Text in a cell of a Markdown table, on one line, with nothing in it that Markdown or HTML would act on."""
    plain = _CONTROL.sub("?", " ".join(text.split()))
    return _MARKDOWN.sub(lambda found: f"&#{ord(found.group())};", plain)
