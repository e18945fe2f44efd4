"""What the bench scripts share: resident memory by kind, medians of alternating runs, tables.

Linux only: memory comes from /proc.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

POLL_S = 0.01
MIB = 1 << 20


def resident(pid: int | str = "self") -> dict[str, int]:
    """Bytes resident now: anonymous, file-backed, both, and the high-water mark of both."""
    names = {"RssAnon": "anonymous", "RssFile": "file", "VmRSS": "resident", "VmHWM": "peak"}
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in names:
            found[names[key]] = int(value.split()[0]) * 1024
    return found


def smaps_rollup(pid: int | str = "self") -> dict[str, int]:
    """Proportional set size by kind, bytes: what is truly this process's share."""
    names = {"Pss": "pss", "Pss_Anon": "pss_anonymous", "Pss_File": "pss_file"}
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in names:
            found[names[key]] = int(value.split()[0]) * 1024
    return found


class Peak:
    """A context manager that follows a process: the largest of each kind of memory while the block ran."""

    def __init__(self, pid: int | str = "self") -> None:
        self._pid, self._stop = pid, threading.Event()
        self.most: dict[str, int] = {}
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        if self._pid == "self":
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        try:
            now = resident(self._pid)
        except OSError:
            return
        for name, value in now.items():
            self.most[name] = max(value, self.most.get(name, 0))


@dataclass(frozen=True)
class Ran:
    """A finished command: seconds, peak memory by kind, and what it printed."""

    seconds: float
    peak: Mapping[str, int]
    output: str


def run_measured(words: Sequence[str | Path]) -> Ran:
    """Run a command and follow its memory; what it prints to stderr goes through. Raises CalledProcessError."""
    started = time.perf_counter()
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, text=True)
    with process, Peak(process.pid) as peak:
        output, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, output)
    return Ran(time.perf_counter() - started, dict(peak.most), output)


def alternating(
    candidates: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of every candidate in every round; they take turns, and the order turns too."""
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            started = time.perf_counter()
            candidates[name]()
            if number >= 0:
                times[name].append(time.perf_counter() - started)
    return times


def paired_ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """Median over rounds of base / other: how many times faster `other` is."""
    return statistics.median(a / b for a, b in zip(base, other, strict=True))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the same keys as a Markdown table."""
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---:" for _ in heads) + " |"]
    lines += ["| " + " | ".join(shown(row[head]) for head in heads) + " |" for row in rows]
    return "\n".join(lines)


def shown(value: object) -> str:
    """A cell: three digits of a float, groups of an integer."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def report(
    rows: Sequence[Mapping[str, Any]], *, json_file: Path | None, markdown: bool, facts: Mapping[str, Any]
) -> None:
    """Print the rows, as a table or line by line, and write them with `facts` to a JSON file."""
    if json_file is not None:
        json_file.write_text(json.dumps({**facts, "rows": list(rows)}, indent=2) + "\n")
    if markdown and rows:
        print(table(rows))
    else:
        for row in rows:
            print("  ".join(f"{key} {shown(value)}" for key, value in row.items()))
    sys.stdout.flush()
