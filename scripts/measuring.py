"""What the bench scripts share: resident memory by kind, medians of alternating runs, tables.

Linux only: memory comes from /proc.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def shown(value: object) -> str:
    """A cell: three digits of a float, groups of an integer, a dash for what was not measured."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def machine() -> dict[str, Any]:
    """What may be said of the machine: cores and memory."""
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    return {"cores": os.cpu_count(), "GiB": math.ceil(int(memory.split()[1]) / (1 << 20))}


def uncached(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, as far as the system does: the next read comes from the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Record:
    """Rows of a bench: each is printed once measured, and kept in a JSON file from which the same command goes on.

    facts: what the rows were measured with; rows of a file with other facts are dropped.
    """

    def __init__(self, facts: Mapping[str, Any], *, json_file: Path | None, markdown: bool) -> None:
        self.facts, self._file, self._markdown = {"machine": machine(), **facts}, json_file, markdown
        self.rows: list[dict[str, Any]] = []
        self._heads: list[str] = []
        if json_file is not None and json_file.exists():
            kept = json.loads(json_file.read_text())
            rows = kept.pop("rows", [])
            self.rows = rows if kept == json.loads(json.dumps(self.facts)) else []

    def row(self, key: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The row with these key columns, from the file or measured now; printed either way."""
        found = next((row for row in self.rows if key.items() <= row.items()), None)
        if found is None:
            found = {**key, **measure()}
            self.rows.append(found)
            if self._file is not None:
                self._file.write_text(json.dumps({**self.facts, "rows": self.rows}, indent=2) + "\n")
        self._print(found)
        return found

    def _print(self, row: Mapping[str, Any]) -> None:
        if not self._markdown:
            print("  ".join(f"{key} {shown(value)}" for key, value in row.items()), flush=True)
            return
        if self._heads != list(row):
            self._heads = list(row)
            print("\n| " + " | ".join(self._heads) + " |\n|" + " ---: |" * len(self._heads))
        print("| " + " | ".join(shown(value) for value in row.values()) + " |", flush=True)


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """`--json FILE` and `--markdown`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the rows there, and go on from what it holds")
    parser.add_argument("--markdown", action="store_true", help="print rows of Markdown tables")
