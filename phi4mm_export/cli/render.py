"""The only place that prints: results to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from phi4mm_export.errors import ExitCode, Phi4mmError

LINE_EVERY_S = 10.0
"""Without a terminal, progress is one line per this many seconds."""


def text(line: str = "") -> None:
    """One line of a result."""
    print(line)


def stream(piece: str) -> None:
    """A piece of a result without a line end, shown at once."""
    print(piece, end="", flush=True)


def document(value: Any) -> None:
    """A result as one JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def note(line: str) -> None:
    """A remark that is not part of the result."""
    print(line, file=sys.stderr)


def warnings(lines: Iterable[str], *, quiet: bool) -> None:
    """What the user should know and the command went on after. quiet: with --quiet, and where a document has them."""
    for line in () if quiet else lines:
        print(f"warning: {line}", file=sys.stderr)


@contextlib.contextmanager
def progress(label: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """A callback for bytes done and in all: a bar with rate and time left on a terminal, else a line every 10 s."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar(label) as report:
            yield report
    else:
        yield _lines(label)


@contextlib.contextmanager
def _bar(label: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(label: str) -> Callable[[int, int], None]:
    started = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < LINE_EVERY_S or not done:
            return
        last = now
        rate = done / (now - started)
        left = (total - done) / rate
        note(f"{label}: {done:,} of {total:,} bytes, {rate / 1e6:,.0f} MB/s, {left:,.0f} s left")

    return report


def hang_up() -> None:
    """Whoever read the output has gone, `| head` for one: what is left to write goes nowhere, without a word."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def error(err: BaseException) -> None:
    """One sentence on stderr; one JSON object with --json, one annotation with --format github."""
    asked = _asked_format(sys.argv)
    if asked == "json":
        print(err.as_json() if isinstance(err, Phi4mmError) else _foreign_json(err), file=sys.stderr)
    elif asked == "github":
        from phi4mm_export.cli.github import error_line

        print(error_line(err), file=sys.stderr)
    elif isinstance(err, Phi4mmError):
        print(f"error: {err}", file=sys.stderr)
    else:
        code, what, where, fix = _foreign(err)
        start = "" if code == ExitCode.INTERRUPTED else "error: "
        print(start + (f"{where}: " if where else "") + what + (f"; {fix}" if fix else ""), file=sys.stderr)


def _foreign(err: BaseException) -> tuple[ExitCode, str, str, str]:
    """Exit code, what, where and how to go on, of an exception that is none of ours."""
    if isinstance(err, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "interrupted: nothing was left under the target name", "", ""
    if isinstance(err, MemoryError):
        return ExitCode.SYSTEM, "the machine ran out of memory", "", "free some, or lower --jobs"
    if isinstance(err, OSError):
        return ExitCode.SYSTEM, str(err.strerror or err), str(err.filename or ""), ""
    advice = "this is a bug of phi4mm: run again with PHI4MM_DEBUG=1 and report it"
    return ExitCode.BUG, f"{type(err).__name__}: {err}", "", advice


def _foreign_json(err: BaseException) -> str:
    """Such an exception in the form of Phi4mmError.as_json."""
    code, what, where, fix = _foreign(err)
    body = {"error": type(err).__name__, "exit_code": int(code), "what": what, "where": where, "fix": fix}
    return json.dumps(body, ensure_ascii=False)


def _asked_format(words: list[str]) -> str:
    """What the command line asks for before it is parsed: an error may come from parsing it."""
    if "--json" in words:
        return "json"
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word == "--format" or word.startswith("--format="):
            return word.partition("=")[2] or value
    return "text"
