"""Feed damaged files to every reader of foreign files; print counts, the slowest, and the memory each kind took.

A reader may accept a file or refuse it with one of our own errors; anything else, more than --max-seconds of processor
time for one file, or more than --max-mib above the process before (and above what a picture of the stated size needs)
is a fault. Each kind runs in a child process.

Example: python scripts/fuzz.py --count 20000 --seed 1
         python scripts/fuzz.py --count 1000 --kind header --kind onnx
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import random
import resource
import sys
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from PIL import Image
from support.fuzzing import KINDS, attempt, damaged, scratch

from phi4mm_export.runtime.images import MAX_PIXELS

SHARES = {
    "header": 6,
    "index": 4,
    "config": 2,
    "manifest": 6,
    "json": 4,
    "genai_config": 1,
    "recipe": 6,
    "recorded-recipe": 4,
}
"""How often a kind is tried, compared with the others (1): the cheap ones, and those that decide trust."""
KEEP = Path("fuzz-faults")


@dataclass
class Result:
    """What one kind's run found."""

    kind: str
    tried: int = 0
    accepted: int = 0
    slowest_s: float = 0.0
    memory_mib: float = 0.0
    faults: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20000, help="damaged files in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only this kind; repeatable")
    parser.add_argument("--max-seconds", type=float, default=2.0)
    parser.add_argument("--max-mib", type=float, default=64.0)
    parser.add_argument("--jobs", type=int, default=1, help="kinds at a time; never changes a file")
    options = parser.parse_args()
    kinds = options.kind or list(KINDS)
    shares = {kind: SHARES.get(kind, 1) for kind in kinds}
    started, results = time.monotonic(), list[Result]()
    counts = {kind: -(-options.count * share // sum(shares.values())) for kind, share in shares.items()}
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(
            lambda kind: in_child(kind, counts[kind], options.seed, options.max_seconds, options.max_mib), kinds
        ):
            results.append(result)
            show(result)
    faults = sum(len(result.faults) for result in results)
    tried = sum(result.tried for result in results)
    slowest = max(result.slowest_s for result in results)
    memory = max(result.memory_mib for result in results)
    print(f"{tried:,} files of {len(kinds)} kinds in {time.monotonic() - started:.0f} s: {faults} faults")
    print(f"slowest {slowest:.2f} s, most memory {memory:.0f} MiB above the process before")
    return 1 if faults else 0


def in_child(kind: str, count: int, seed: int, max_s: float, max_mib: float) -> Result:
    """Run one kind in a process of its own; a process that dies is a fault."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=run_kind, args=(kind, count, seed, max_s, max_mib, send))
    child.start()
    send.close()
    try:
        result = receive.recv()
    except EOFError:
        result = Result(kind)
    child.join()
    if child.exitcode:
        result.faults.append(f"the process ended with {child.exitcode}")
    return Result(**vars(result)) if isinstance(result, Result) else result


def run_kind(kind: str, count: int, seed: int, max_s: float, max_mib: float, send: object) -> None:
    """The child's work: `count` damaged files from one seed."""
    warnings.simplefilter("error")  # what a library only prints is not our sentence
    result, rng, made = Result(kind), random.Random(f"{kind} {seed}"), KINDS[kind]
    with scratch() as folder:
        path = made.prepare(Path(folder))
        valid = path.read_bytes()
        if not attempt(made, path, valid):
            raise SystemExit(f"{kind}: the file is refused before it is damaged")
        before = _peak_mib()
        for number in range(count):
            data = damaged(made, valid, rng)
            started, memory = time.process_time(), _peak_mib()
            try:
                result.accepted += attempt(made, path, data)
            except BaseException:  # noqa: BLE001 - whatever it is, it is the finding
                _fault(result, number, data, traceback.format_exc(limit=-3))
            spent = time.process_time() - started
            result.tried += 1
            result.slowest_s = max(result.slowest_s, spent)
            if spent > max_s:
                _fault(result, number, data, f"took {spent:.1f} s")
            allowed = max_mib + stated_mib(kind, data)
            if memory - before <= allowed < _peak_mib() - before:
                _fault(result, number, data, f"took {_peak_mib() - before:.0f} MiB")
        result.memory_mib = _peak_mib() - before
    send.send(result)  # type: ignore[attr-defined]


def stated_mib(kind: str, data: bytes) -> float:
    """What a picture of the size that its header states takes decoded, 4 bytes a pixel: before it is decoded, nobody
    can tell it from a real one of that size. 0 for what is refused for its size, and for what is no picture."""
    if not kind.startswith("image-"):
        return 0.0
    try:
        with Image.open(io.BytesIO(data)) as picture:
            pixels = picture.width * picture.height
    except Exception:  # noqa: BLE001 - Pillow raises whatever its decoders do
        return 0.0
    return 4 * pixels / (1 << 20) if pixels <= MAX_PIXELS else 0.0


def show(result: Result) -> None:
    """One line per kind, and its faults."""
    print(
        f"{result.kind:<18} {result.tried:>8,} tried {result.accepted:>8,} accepted "
        f"{result.slowest_s:>7.3f} s slowest {result.memory_mib:>6.1f} MiB {len(result.faults):>4} faults",
        flush=True,
    )
    for fault in result.faults[:5]:
        print(fault, flush=True)


def _fault(result: Result, number: int, data: bytes, what: str) -> None:
    if len(result.faults) < 20:
        KEEP.mkdir(exist_ok=True)
        (KEEP / f"{result.kind}-{number}").write_bytes(data)
    result.faults.append(f"  fault at {number} (kept in {KEEP}/{result.kind}-{number}): {what}")


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


if __name__ == "__main__":
    sys.exit(main())
