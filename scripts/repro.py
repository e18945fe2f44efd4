"""Build one package under many conditions and compare every byte.

A synthetic checkpoint (or --checkpoint) is exported to INT8 with gated adapters, and its vision encoder is quantized by
GPTQ from statistics that were saved once: everything that is promised to be the same on every machine. The conditions:
BLAS kernels x threads x numpy's vector instructions x those of libm; user, path, locale, clock and the like, one by one
and all at once; runs killed at every stage and run again. Runs that calibrate anew are compared on this machine only.

Example: python scripts/repro.py
         python scripts/repro.py --short
         python scripts/repro.py --checkpoint MODEL --folder /scratch/repro --jobs 1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_matrix import ODD_NAME, OTHER_DISK, Variation, plain_environment, processors, surroundings

CHAIN = Path(__file__).resolve().parent / "repro_chain.py"
SIGKILLED = -9
CHUNK = 1 << 20
REPORT_EVERY = 10
RECIPE = "int8-gptq"
"""The named recipe that is built too: the published build."""
Digests = Mapping[str, str]


class ReproError(Exception):
    """A build failed, or its bytes are not those of the first."""


@dataclass(frozen=True)
class Bench:
    """What every build starts from. samples: as `phi4mm quantize --num-samples`."""

    scratch: Path
    checkpoint: Path
    samples: int

    @property
    def statistics(self) -> Path:
        """Calibration statistics that were saved once."""
        return self.scratch / "statistics"

    def commands(self, model: Path, out: Path, variation: Variation, *, calibrate: bool = False) -> list[list[str]]:
        """The command lines of one build below `out`."""
        jobs = ["--jobs", str(variation.jobs)] if variation.jobs else []
        work = ["--work-dir", str(OTHER_DISK / f"repro-{out.name}")] if variation.other_disk else []
        export = ["export", str(model), "-o", str(out / "exported"), "--precision", "int8", "--lora", "gated"]
        quantize = ["quantize", str(out / "exported"), "-o", str(out / "quantized"), "--method", "gptq"]
        if calibrate:
            quantize += ["--calibration", "builtin", "--num-samples", str(self.samples), "--no-quality-gate"]
        else:
            quantize += ["--statistics", str(self.statistics)]
        return [[*export, *jobs, *work, "--quiet"], [*quantize, *jobs, *work, "--quiet"]]


@dataclass
class Tally:
    """What was compared so far. canaries: the different results of arithmetic that nobody promises; factors:
    those of GPTQ's exact factor, which must be one."""

    runs: int = 0
    kernels: set[str] = field(default_factory=set)
    canaries: dict[str, set[str]] = field(default_factory=dict)
    factors: set[str] = field(default_factory=set)

    def note(self, said: Mapping[str, Any]) -> None:
        """What a child reported."""
        self.runs += 1
        self.kernels.add(said["kernel"])
        self.factors.add(said["factor"])
        for name, digest in said["canaries"].items():
            self.canaries.setdefault(name, set()).add(digest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="default: a synthetic one (oracle size; tiny with --short)")
    parser.add_argument("--folder", type=Path, help="scratch below this folder instead of the system's")
    parser.add_argument(
        "--short", action="store_true", help="threads, numpy, libm, all surroundings at once, two kills"
    )
    parser.add_argument("--jobs", type=int, default=2, help="builds at a time")
    parser.add_argument("--samples", type=int, default=2, help="calibration samples")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="repro-", dir=options.folder) as name:
        scratch = Path(name).resolve()
        try:
            compare_all(scratch, options)
        except ReproError as err:
            print(f"NOT REPRODUCIBLE: {err}")
            return 1
    print(f"{time.monotonic() - started:.0f} s in all")
    return 0


def compare_all(scratch: Path, options: argparse.Namespace) -> None:
    """Everything, in the order of the report. Raises ReproError at the first difference."""
    bench = Bench(scratch, (options.checkpoint or scratch / "checkpoint").resolve(), options.samples)
    if options.checkpoint is None:
        size = "tiny" if options.short else "oracle"
        run(bench, [["synth", str(bench.checkpoint), "--size", size, "--quiet"]], Variation("synth"))
    tally = Tally()
    plain = calibrated(bench)
    first, said = build(bench, scratch / "first", Variation("first"))
    calls = said["calls"]
    print(f"the first build: {len(first)} files, {classes(scratch / 'first')}", flush=True)
    around = surroundings(scratch)
    matrix = [*processors(short=options.short), *(around[-1:] if options.short else around)]
    for variation in matrix:
        if variation.skipped or variation.note:
            print(f"{'skipped: ' if variation.skipped else ''}{variation.name}: {variation.skipped or variation.note}")
    live = [(v, False) for v in matrix if not v.skipped]
    count_same(bench, live, first, options.jobs, tally)
    print(f"{len(live)} variations, one digest: {digest_of(first)}")
    print(f"BLAS kernels: {', '.join(sorted(tally.kernels))}")
    if len(tally.factors) != 1:
        raise ReproError(f"the exact factor of one matrix has {len(tally.factors)} results")
    found = ", ".join(f"{name} {len(digests)}" for name, digests in sorted(tally.canaries.items()))
    print(f"different results of arithmetic that the tool avoids: {found}", flush=True)
    if not options.short:
        again = [
            Variation("again"),
            *processors(short=True)[1:3],
            *(v for v in around if v.name.endswith(("job", "jobs"))),
        ]
        count_same(bench, [(v, True) for v in again], plain, options.jobs, tally)
        print(f"{len(again)} runs that calibrate anew on this machine, one digest: {digest_of(plain)}", flush=True)
        around = [Variation("plain"), *processors(short=True)[-1:], *surroundings(scratch)[-1:]]
        built = count_built(bench, around, options.jobs)
        print(f"{len(around)} packages of the recipe {RECIPE}, one digest: {digest_of(built)}", flush=True)
    kills = kill_points(calls, short=options.short)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda kill: killed_and_resumed(bench, first, kill), kills))
    print(f"{len(kills)} runs killed and run again, the same digest")


def calibrated(bench: Bench) -> Digests:
    """Save the statistics that all builds use; the digests of the build that made them."""
    out = bench.scratch / "calibrated"
    export, quantize = bench.commands(bench.checkpoint, out, Variation("plain"), calibrate=True)
    out.mkdir()
    run(bench, [export, [*quantize, "--save-statistics", str(bench.statistics)]], Variation("plain"))
    found = digests(out)
    shutil.rmtree(out)
    return found


def count_same(
    bench: Bench, matrix: Sequence[tuple[Variation, bool]], expected: Digests, jobs: int, tally: Tally
) -> None:
    """Build once per variation; every byte must be as expected."""

    def one(numbered: tuple[int, tuple[Variation, bool]]) -> Mapping[str, Any]:
        number, (variation, calibrate) = numbered
        out = bench.scratch / f"build-{calibrate:d}-{number}"
        found, said = build(bench, out, variation, calibrate=calibrate)
        compare(expected, found, bench.scratch / "first", out, variation.name)
        shutil.rmtree(out)
        return said

    with ThreadPoolExecutor(jobs) as pool:
        for said in pool.map(one, enumerate(matrix)):
            tally.note(said)
            if tally.runs % REPORT_EVERY == 0:
                print(f"  {tally.runs} builds are the same", flush=True)


def count_built(bench: Bench, variations: Sequence[Variation], jobs: int) -> Digests:
    """Build the named recipe from saved statistics under a few variations; every byte must be as in the first."""
    statistics = bench.scratch / "statistics-build"
    saving, words = bench.scratch / "saving", ["build", RECIPE, "--model", str(bench.checkpoint), "--quiet"]
    words += ["-o", str(saving), "--calibration", "builtin", "--save-statistics", str(statistics)]
    words += ["--set", f"quantize.vision.num_samples={bench.samples}"]
    run(bench, [words], Variation("build"))
    shutil.rmtree(saving)

    def one(numbered: tuple[int, Variation]) -> Path:
        number, variation = numbered
        out = bench.scratch / f"recipe-{number}"
        with placed(bench, out, variation) as (model, place):
            words = ["build", RECIPE, "--model", str(model), "-o", str(place / "built"), "--quiet"]
            run(bench, [[*words, "--statistics", str(statistics)]], variation, place)
            if place != out:
                place.rename(out)
        return out

    with ThreadPoolExecutor(jobs) as pool:
        outs = list(pool.map(one, enumerate(variations)))
    found = [digests(out, "built") for out in outs]
    for number, variation in enumerate(variations):
        compare(found[0], found[number], outs[0], outs[number], f"{RECIPE}, {variation.name}")
    return found[0]


def build(
    bench: Bench, out: Path, variation: Variation, *, calibrate: bool = False
) -> tuple[Digests, Mapping[str, Any]]:
    """Export and quantize in one fresh process: digests of every file, and what the process said."""
    with placed(bench, out, variation) as (model, place):
        said = run(bench, bench.commands(model, place, variation, calibrate=calibrate), variation, place)
        if place != out:
            place.rename(out)
    return digests(out), said


@contextmanager
def placed(bench: Bench, out: Path, variation: Variation) -> Iterator[tuple[Path, Path]]:
    """Where a build reads and writes."""
    if not variation.odd_place:
        out.mkdir()
        yield bench.checkpoint, out
        return
    odd = bench.scratch / f"{ODD_NAME} {out.name}"
    shutil.copytree(bench.checkpoint, odd / "a model")
    (odd / out.name).mkdir()
    yield odd / "a model", odd / out.name
    shutil.rmtree(odd)


def run(
    bench: Bench, commands: Sequence[Sequence[str]], variation: Variation, out: Path | None = None, **order: Any
) -> Mapping[str, Any]:
    """Run commands under a variation. Raises ReproError with what the process wrote when it fails."""
    code, said, complaint = attempt(bench, commands, variation, out, **order)
    if code:
        raise ReproError(f"{variation.name}: the build ended with {code}: {complaint.strip()[-2000:]}")
    return said


def attempt(
    bench: Bench, commands: Sequence[Sequence[str]], variation: Variation, out: Path | None = None, **order: Any
) -> tuple[int, Mapping[str, Any], str]:
    """Exit code (minus the signal), what the process said, and its standard error."""
    environment = plain_environment() | dict(variation.environment)
    if variation.other_disk:
        environment["TMPDIR"] = str(OTHER_DISK)
    cwd = (out or bench.scratch) if variation.elsewhere else bench.scratch
    with tempfile.NamedTemporaryFile("w", suffix=".json", dir=bench.scratch, encoding="utf-8") as file:
        json.dump({"commands": commands, **variation.order, **order}, file)
        file.flush()
        done = subprocess.run(
            [*variation.prefix, sys.executable, str(CHAIN), file.name],
            cwd=cwd,
            env=environment,
            umask=variation.umask,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
    if out is not None:
        shutil.rmtree(OTHER_DISK / f"repro-{out.name}", ignore_errors=True)
    said = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    return done.returncode, said, done.stderr


@dataclass(frozen=True)
class Kill:
    """A command that dies just before a call. number: which call of this point."""

    command: str
    point: str
    number: int
    with_work: bool

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.command} killed at {self.point} {self.number}, {'with' if self.with_work else 'no'} work folder"


def kill_points(calls: Mapping[str, Mapping[str, int]], *, short: bool) -> list[Kill]:
    """Of every command and point the first, a middle and the last call, with and without a work folder."""
    if short:
        middle = calls["export"]["a tensor"] // 2
        return [Kill("export", "a tensor", middle, True), Kill("quantize", "a layer", 2, True)]
    return [
        Kill(command, point, number, with_work)
        for command, points in calls.items()
        for point, count in points.items()
        for number in sorted({1, -(-count // 2), count})
        for with_work in (True, False)
    ]


def killed_and_resumed(bench: Bench, first: Digests, kill: Kill) -> None:
    """Kill a command at one call and run it again. Raises ReproError unless the bytes are the same."""
    variation = Variation(kill.name)
    out = Path(tempfile.mkdtemp(prefix="killed-", dir=bench.scratch))
    number, part = {"export": (0, "exported"), "quantize": (1, "quantized")}[kill.command]
    command = bench.commands(bench.checkpoint, out, variation)[number]
    if kill.command == "quantize":
        command[1] = str(bench.scratch / "first" / "exported")
    if kill.with_work:
        command += ["--work-dir", str(out / "work")]
    order = {"point": kill.point, "number": kill.number}
    code, _, complaint = attempt(bench, [command], variation, out, kill=order)
    if code != SIGKILLED:
        raise ReproError(f"{kill.name}: it was not killed, it ended with {code}: {complaint.strip()[-2000:]}")
    expected = {path: digest for path, digest in first.items() if path.startswith(part)}
    if (out / part).exists():
        compare(expected, digests(out, part), bench.scratch / "first", out, kill.name)
    run(bench, [[*command, "--overwrite"]], variation, out)
    compare(expected, digests(out, part), bench.scratch / "first", out, kill.name)
    left = [path.name for path in out.iterdir() if path.name.startswith(".")]
    if left:
        raise ReproError(f"{kill.name}: the second run left {', '.join(left)}")
    shutil.rmtree(out)


def digests(out: Path, *parts: str) -> Digests:
    """Name -> sha256 of every file of the packages below a folder."""
    found = {}
    for part in parts or ("exported", "quantized"):
        for path in sorted((out / part).rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    found[path.relative_to(out).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def digest_of(found: Digests) -> str:
    """One digest of all files."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(found.items()))
    return hashlib.sha256(lines.encode("utf-8")).hexdigest()


def compare(expected: Digests, found: Digests, first: Path, other: Path, name: str) -> None:
    """Raise ReproError that names the first file that differs, and where."""
    for path in sorted({*expected, *found}):
        if expected.get(path) == found.get(path):
            continue
        if path not in expected or path not in found:
            raise ReproError(f"{name}: {path} is {'missing' if path in expected else 'extra'}")
        raise ReproError(f"{name}: {path} differs{_where(first / path, other / path)}")


def _where(one: Path, other: Path) -> str:
    if not one.exists():
        return ""
    if one.stat().st_size != other.stat().st_size:
        return f": {one.stat().st_size:,} bytes against {other.stat().st_size:,}"
    with one.open("rb") as a, other.open("rb") as b:
        at = 0
        while (left := a.read(CHUNK)) == (right := b.read(CHUNK)):
            at += len(left)
        at += next(i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
    return f" from byte {at:,} on"


def classes(out: Path) -> str:
    """The classes that the quantized package's manifest states, with their files counted."""
    manifest = json.loads((out / "quantized" / "phi4mm.json").read_text("utf-8"))
    stated = [entry["reproducibility"] for entry in manifest["files"]]
    return ", ".join(f"{stated.count(kind)} {kind}" for kind in sorted(set(stated)))


if __name__ == "__main__":
    sys.exit(main())
