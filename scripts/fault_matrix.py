"""Make every file operation of export, quantize and build fail, and kill the run at every one; print what was left.

For each operation below the target's folder: ENOSPC, EIO, EINTR, a short write, each once and from then on, and a
SIGKILL. After each run the target must be absent, old or new, never a mixture; where something was left, the same
command again must give the bytes of an undisturbed run. Everything runs in forked children on a memory file system.

Example: python scripts/fault_matrix.py --folder /dev/shm/faults --stride 1 --job export-speech
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.syscalls import ERRORS, Watch, dying, failing, watched

from phi4mm_export.checkpoint.open import Checkpoint
from phi4mm_export.errors import Phi4mmError
from phi4mm_export.package import resume
from phi4mm_export.pipeline import export as export_module
from phi4mm_export.pipeline import export_source
from phi4mm_export.pipeline.build import BuildSettings, build
from phi4mm_export.pipeline.doctor import doctor
from phi4mm_export.pipeline.export import ExportSettings, export
from phi4mm_export.pipeline.quantize import quantize
from phi4mm_export.pipeline.synth import synth
from phi4mm_export.spec.build_recipe import BuildRecipe, QuantizeChoices
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.genai import CONFIG_FILE
from phi4mm_export.spec.quantization import Method
from phi4mm_export.spec.recipe import Recipe

DONE, REFUSED, BROKEN = 0, 6, 1
OLD = {"genai_config.json": hashlib.sha256(b"old").hexdigest()}


@dataclass(frozen=True)
class Case:
    """One way to disturb a run at one operation."""

    name: str
    on_call: Callable[[int], Callable[[int, str], int]]
    sticky: bool


def _failing(code: int, *, sticky: bool) -> Callable[[int], Callable[[int, str], int]]:
    return lambda number: failing(number, code, sticky=sticky)


CASES = [
    *(Case(f"{name} once", _failing(code, sticky=False), False) for name, code in ERRORS.items()),
    *(Case(f"{name} from then on", _failing(code, sticky=True), True) for name, code in ERRORS.items()),
    Case("SIGKILL", lambda number: dying(number, lambda: os.kill(os.getpid(), signal.SIGKILL)), True),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/phi4mm-faults"), help="scratch, removed first")
    parser.add_argument("--job", choices=[*_jobs(Path()), "all"], default="all")
    parser.add_argument("--stride", type=int, default=1, help="disturb every STRIDE-th operation")
    parser.add_argument("--first", type=int, default=1, help="the first operation to disturb")
    parser.add_argument("--over-old", action="store_true", help="start from an old package instead of nothing")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    synth(options.folder / "checkpoint")
    resume.code_version()
    faults = 0
    for name, job in _jobs(options.folder).items():
        if options.job in (name, "all"):
            chosen = slice(options.first - 1, None, options.stride)
            faults += run_job(name, job, options.folder / "bench", chosen, over_old=options.over_old)
    shutil.rmtree(options.folder)
    return 1 if faults else 0


def _jobs(folder: Path) -> dict[str, Callable[[Path], object]]:
    """What is run, by name: a function of the target."""
    checkpoint, settings = folder / "checkpoint", ExportSettings(overwrite=True, jobs=1)

    def exported(*components: Component) -> Callable[[Path], object]:
        return lambda target: export(
            checkpoint, target, recipe=Recipe.resolve(components=components), settings=settings
        )

    def source() -> Path:
        if not (folder / "source").exists():
            export(checkpoint, folder / "source", settings=ExportSettings(jobs=1))
        return folder / "source"

    def quantized(target: Path) -> object:
        options: dict[str, Any] = {"method": "rtn", "component": "speech", "quality_gate": False, "jobs": 1}
        return quantize(source(), target, overwrite=True, **options)

    def built(target: Path) -> object:
        recipe = BuildRecipe(quantize={Component.SPEECH: QuantizeChoices(Method.RTN, bits=8)})
        return build(recipe, target, model=checkpoint, settings=BuildSettings(overwrite=True, jobs=1))

    def corrected(target: Path) -> object:
        broken = folder / "broken"
        if not broken.exists():
            shutil.copytree(source(), broken)
            config = json.loads((broken / CONFIG_FILE).read_bytes())
            config["model"]["type"] = "phi3v"
            (broken / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        return doctor(broken, fix=target, overwrite=True)

    return {
        "export-speech": exported(Component.SPEECH),
        "export-all": exported(),
        "quantize-speech": quantized,
        "build": built,
        "doctor": corrected,
    }


def run_job(name: str, job: Callable[[Path], object], folder: Path, chosen: slice, *, over_old: bool) -> int:
    """Disturb one job at the `chosen` ones of its operations in every way; returns the number of violations."""
    started, counts, faults = time.monotonic(), Counter[str](), 0
    with decided_once(job, folder.parent / "warm"):
        reset(folder, over_old=False)
        operations = undisturbed(job, folder)
        new = state(folder / "out")
        numbers = range(1, operations + 1)[chosen]
        print(f"{name}: {operations} operations, {len(numbers)} of them in {len(CASES)} ways", flush=True)
        for done, number in enumerate(numbers):
            if done and done % 20 == 0:
                print(f"  {done} operations done in {time.monotonic() - started:.0f} s", flush=True)
            for case in CASES:
                reset(folder, over_old=over_old)
                problem = disturb(job, folder, case, number, new, OLD if over_old else {}, counts)
                if problem:
                    faults += 1
                    print(f"  VIOLATION at operation {number}, {case.name}: {problem}", flush=True)
    total = sum(count for key, count in counts.items() if key.startswith("run"))
    spent = time.monotonic() - started
    print(f"{name}: {total} disturbed runs in {spent:.0f} s, {faults} violations; {dict(sorted(counts.items()))}")
    return faults


@contextmanager
def decided_once(job: Callable[[Path], object], scratch: Path) -> Iterator[None]:
    """Let all runs share what an export decides before its first byte, and its verdict: the same each time, and slow.

    The verdict is no help against a mixture: what is published is compared byte by byte all the same.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Checkpoint, "close"))
        shared = [(export_source, "open_checkpoint")]
        shared += [(export_module, name) for name in ("plan_export", "package_configs", "validate")]
        for module, name in shared:
            stack.enter_context(mock.patch.object(module, name, memory(getattr(module, name))))
        job(scratch)
        shutil.rmtree(scratch)
        gc.collect()
        gc.freeze()
        yield


def memory(real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that works once and then gives the same result."""
    kept: list[Any] = []

    def call(*args: Any, **options: Any) -> Any:
        if not kept:
            kept.append(real(*args, **options))
        return kept[0]

    return call


def undisturbed(job: Callable[[Path], object], folder: Path) -> int:
    """Run in a child; returns the number of operations."""
    counted = folder.parent / "operations"

    def work() -> None:
        with watched(Watch(folder)) as watch:
            job(folder / "out")
        counted.write_text(str(watch.calls))

    code = in_child(work)
    if code != DONE:
        raise SystemExit(f"the undisturbed run failed ({code})")
    return int(counted.read_text())


def disturb(
    job: Callable[[Path], object],
    folder: Path,
    case: Case,
    number: int,
    new: dict[str, str],
    old: dict[str, str],
    counts: Counter[str],
) -> str:
    """One disturbed run and, where something was left, the run that heals; returns what is wrong, or nothing."""

    def work() -> None:
        with watched(Watch(folder, case.on_call(number))):
            job(folder / "out")

    code = in_child(work)
    counts["run, " + {DONE: "finished", REFUSED: "refused", -signal.SIGKILL: "killed"}.get(code, f"exit {code}")] += 1
    found, hidden = state(folder / "out"), [p.name for p in folder.iterdir() if p.name.startswith(".")]
    if code not in (DONE, REFUSED, -signal.SIGKILL):
        return f"ended with {code}"
    if code == DONE and found != new:
        return "reported success, and the package differs"
    if code == REFUSED and not case.sticky and (found != old or hidden):
        return f"refused, and left {sorted(found) if found != old else hidden}"
    aside = bool(hidden) and not (folder / "out").exists()
    if found not in (old, new) and not aside:
        return f"a mixture: {sorted(found)}"
    if hidden:
        counts["healed by the next run"] += 1
        if in_child(lambda: job(folder / "out")) != DONE:
            return "the next run failed"
        left = [p.name for p in folder.iterdir() if p.name.startswith(".")]
        if state(folder / "out") != new or left:
            return f"the next run differs from a clean one, or left {left}"
    return ""


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked child: its exit code, or minus the signal that ended it."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = BROKEN
    try:
        work()
        code = DONE
    except Phi4mmError as err:
        code = int(err.exit_code)
    except BaseException:  # noqa: BLE001 - reported, and counted as a violation by the parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def reset(folder: Path, *, over_old: bool) -> None:
    """An empty folder, or one with an old package in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if over_old:
        (folder / "out").mkdir()
        (folder / "out" / "genai_config.json").write_text("old")


def state(package: Path) -> dict[str, str]:
    """Name -> sha256 of every file of a package; empty when there is none."""
    files = sorted(path for path in package.rglob("*") if path.is_file())
    return {path.relative_to(package).as_posix(): _digest(path) for path in files}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
