"""Measure an export without a copy of the checkpoint: from a loopback server, killed on the way, and gone on with.

    python scripts/bench_stream.py CHECKPOINT WORK_FOLDER [--recipe int8/int8/fp16/gated] [--kill-at 0.5] [--json FILE]

Three rows: `disk` exports the folder; `stream` the same files over HTTP ranges from 127.0.0.1; `killed` is killed with
SIGKILL once that share of the package is written, and run again. Every file of the three packages must be the same byte
for byte, except phi4mm.json, which names the hub id, and SHA256SUMS, which holds its digest; of these the input
digests must agree. `peak disk` counts what was added below WORK_FOLDER while the export ran (package in work, caches
and temporary files, which are all put there), `beyond the package` without the package itself.

The server is the one of the tests (tests/support/hub_server.py). Disk beside the checkpoint: two packages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench_export import PHI4MM, options_of
from measuring import MIB, Peak, Record, add_report_options

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.hub_server import Hub, serving

MODEL = "someone/phi-4-fine-tune"
NAMED = ("phi4mm.json", "SHA256SUMS")
"""Files that name the model or hold the digest of one that does."""
POLL_S = 0.05


def occupied(folder: Path) -> int:
    """Bytes that the files below a folder take on disk, each inode once."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                status = (Path(root) / name).lstat()
            except FileNotFoundError:  # moved or removed while we look
                continue
            found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


class DiskPeak:
    """A context manager that follows a folder: the most it held while the block ran, above what it held before."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stop, self._before = folder, threading.Event(), occupied(folder)
        self.most = 0
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> DiskPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> int:
        """Bytes above what was there before."""
        return occupied(self._folder) - self._before

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self.most = max(self.most, self.now())


@contextmanager
def started(words: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command of ours with its own environment."""
    with subprocess.Popen([*PHI4MM, *words], stdout=subprocess.DEVNULL, env={**os.environ, **env}) as process:
        yield process


def exported(words: list[str], env: dict[str, str], package: Path, work: Path, kill_at: float | None) -> dict[str, Any]:
    """One export, or one that is killed and run again: seconds of both runs, memory and disk."""
    row: dict[str, Any] = {"seconds": 0.0, "killed after": None}
    with DiskPeak(work) as disk:
        if kill_at is not None:
            began = time.perf_counter()
            with started(words, env) as process:
                while process.poll() is None and disk.now() < kill_at:
                    time.sleep(POLL_S)
                process.send_signal(signal.SIGKILL)
            row["killed after"] = time.perf_counter() - began
        began = time.perf_counter()
        with started(words, env) as process, Peak(process.pid) as peak:
            process.wait()
        row["seconds"] = time.perf_counter() - began
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    nbytes = occupied(package)
    row |= {
        "anonymous MiB": peak.most["anonymous"] / MIB,
        "peak MiB": peak.most["peak"] / MIB,
        "package MiB": nbytes / MIB,
        "peak disk MiB": disk.most / MIB,
        "beyond the package MiB": (disk.most - nbytes) / MIB,
    }
    return row


def same(one: Path, other: Path) -> bool:
    """Whether two packages hold the same bytes and state the same inputs."""
    names = sorted(path.name for path in one.iterdir())
    if names != sorted(path.name for path in other.iterdir()):
        return False
    inputs = [json.loads((folder / NAMED[0]).read_text())["source"]["files"] for folder in (one, other)]
    compared = [name for name in names if name not in NAMED]
    equal = all(
        subprocess.run(["cmp", "-s", one / name, other / name], check=False).returncode == 0 for name in compared
    )
    return equal and inputs[0] == inputs[1]


def way(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One of the three ways."""
    plain, streamed = args.work / "disk", args.work / "stream"
    options = [*options_of(args.recipe), "--jobs", str(args.jobs), "--overwrite", "-q"]
    if name == "disk" or not plain.exists():
        row = exported(["export", str(args.checkpoint), "-o", str(plain), *options], {}, plain, args.work, None)
        if name == "disk":
            return {**row, "requests": 0, "same bytes": None}
    shutil.rmtree(streamed, ignore_errors=True)
    home = args.work / "home"
    (home / "tmp").mkdir(parents=True)
    kill_at = args.kill_at * occupied(plain) if name == "killed" else None
    with serving(Hub(MODEL, args.checkpoint)) as hub:
        env = {
            "HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1",
            "TMPDIR": str(home / "tmp"),
        }  # fmt: skip
        for file in hub.files().values():
            hub.tag(file)  # the real hub knows its digests
        words = ["export", MODEL, "-o", str(streamed), "--stream", *options]
        row = exported(words, env, streamed, args.work, kill_at)
        row["requests"] = len(hub.range_requests)
    row["same bytes"] = same(plain, streamed)
    shutil.rmtree(home)
    shutil.rmtree(streamed)
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="export without a copy of the checkpoint")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--recipe", default="int8/int8/fp16/gated", metavar="DECODER/TABLE/ENCODERS/ADAPTERS")
    parser.add_argument("--kill-at", type=float, default=0.5, help="share of the package after which it is killed")
    parser.add_argument("--jobs", type=int, default=2)
    add_report_options(parser)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    facts = {"recipe": args.recipe, "jobs": args.jobs, "kill_at": args.kill_at}
    record = Record(facts, json_file=args.json, markdown=args.markdown)
    ways: tuple[str, ...] = ("disk", "stream", "killed")
    for name in ways:
        measure: Callable[[], dict[str, Any]] = partial(way, name, args)
        record.row({"way": name}, measure)


if __name__ == "__main__":
    main()
