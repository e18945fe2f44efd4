"""Mutation testing of the modules on which trust rests: how many small faults do their own tests notice?

Works on a copy of the repository (cosmic-ray changes files in place). cosmic-ray is no dependency: give the folder of
a virtual environment that has it. The tests run in forks of one process (`mutation_server.py`; Linux only). Type
annotations are not mutated; a mutant that does not end in time counts as noticed.

Example: python -m venv /tmp/mut && /tmp/mut/bin/pip install cosmic-ray
         python scripts/mutation.py --tools /tmp/mut/bin --module packing --module publish
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutation_server import ASK

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800
"""For a mutant that waits for ever; one that computes for ever meets the server's limit of processor time."""
NEEDED = 0.9


@dataclass(frozen=True)
class Target:
    """A module and the tests that must notice its faults."""

    module: str
    tests: tuple[str, ...]


TARGETS = {
    "packing": Target("weights/packing.py", ("tests/unit/test_packing.py",)),
    "publish": Target(
        "package/publish.py",
        ("tests/package/test_publish.py", "tests/package/test_claim.py", "tests/faults/test_crash_states.py"),
    ),
    "claim": Target("package/claim.py", ("tests/package/test_publish.py", "tests/package/test_claim.py")),
    "resume": Target("package/resume.py", ("tests/package/test_resume.py",)),
    "manifest": Target("package/manifest.py", ("tests/unit/test_manifest.py",)),
    "manifest_read": Target(
        "package/manifest_read.py", ("tests/unit/test_manifest.py", "tests/unit/test_manifest_hostile.py")
    ),
    "shards": Target("checkpoint/shards.py", ("tests/unit/test_shards.py", "tests/faults/test_checkpoint_folder.py")),
    "gptq": Target("quant/gptq.py", ("tests/quantize/test_gptq_solver.py",)),
    "arithmetic": Target("quant/arithmetic.py", ("tests/quantize/test_gptq_solver.py",)),
    "hessian": Target("quant/hessian.py", ("tests/quantize/test_moments.py", "tests/quantize/test_rotation.py")),
    "layer": Target("quant/layer.py", ("tests/quantize/test_stage.py",)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True, help="folder of the cosmic-ray program")
    parser.add_argument("--module", action="append", choices=list(TARGETS), help="only this one; repeatable")
    parser.add_argument("--numbers", action="store_true", help="mutate numbers too")
    options = parser.parse_args()
    weak = 0
    for name in options.module or list(TARGETS):
        started = time.monotonic()
        noticed, survivors = run_target(TARGETS[name], options.tools, numbers=options.numbers)
        total = noticed + len(survivors)
        share = noticed / total if total else 1.0
        weak += share < NEEDED
        print(f"{name}: {noticed} of {total} mutants noticed ({share:.0%}) in {time.monotonic() - started:.0f} s")
        for survivor in survivors:
            print(survivor)
        sys.stdout.flush()
    return 1 if weak else 0


def run_target(target: Target, tools: Path, *, numbers: bool) -> tuple[int, list[str]]:
    """The number of mutants noticed, and the survivors as changed lines."""
    with tempfile.TemporaryDirectory(prefix="phi4mm-mutation-") as folder:
        copy = Path(folder)
        for name in ("phi4mm_export", "tests", "scripts"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(ROOT / "pyproject.toml", copy / "pyproject.toml")
        mutated = copy / "phi4mm_export" / target.module
        compileall.compile_dir(copy, quiet=1)
        for compiled in mutated.parent.glob(f"__pycache__/{mutated.stem}.*"):
            compiled.unlink()  # its time stamp has whole seconds: it would pass for the mutant's
        (copy / "mutation.toml").write_text(configuration(target, copy / "server"), encoding="utf-8")
        _tool(tools, copy, "init", "mutation.toml", "session.sqlite")
        thin(copy / "session.sqlite", mutated.read_text(encoding="utf-8"), numbers=numbers)
        with serving(copy):
            if ask(copy, target.tests):
                raise SystemExit(f"the tests of {target.module} fail without a mutant")
            _tool(tools, copy, "exec", "mutation.toml", "session.sqlite")
        lines = _tool(tools, copy, "dump", "session.sqlite").splitlines()
    return judge([json.loads(line) for line in lines])


@contextlib.contextmanager
def serving(copy: Path) -> Iterator[None]:
    """The test server, in the copy, while the block runs."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, "scripts/mutation_server.py", "server"], cwd=copy, env=environment)
    try:
        while not (copy / "server").exists():
            time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait()


def ask(copy: Path, tests: tuple[str, ...]) -> int:
    """pytest's exit code for the tests as they stand."""
    return subprocess.run([sys.executable, "-c", ASK, "server", *tests], cwd=copy, check=False).returncode


def configuration(target: Target, address: Path) -> str:
    """cosmic-ray's settings: the tests run in forks of the server."""
    command = shlex.join([sys.executable, "-S", "-I", "-c", ASK, str(address), *target.tests])
    return "\n".join(
        (
            "[cosmic-ray]",
            f'module-path = "phi4mm_export/{target.module}"',
            f"timeout = {TIMEOUT_S}.0",
            "excluded-modules = []",
            f"test-command = {json.dumps(command)}",
            "[cosmic-ray.distributor]",
            'name = "local"',
            "",
        )
    )


def thin(session: Path, source: str, *, numbers: bool) -> None:
    """Leave one mutant per place and kind of change, and none inside annotations, which nothing evaluates."""
    annotations = list(_annotations(source))
    with contextlib.closing(sqlite3.connect(session)) as database:
        seen, surplus = set(), []
        query = "SELECT job_id, operator_name, start_pos_row, start_pos_col FROM mutation_specs ORDER BY 3, 4, 2"
        for job, operator, row, column in database.execute(query).fetchall():
            family = re.sub(r"(Operator_[A-Za-z]+)_[A-Za-z]+$", r"\1", operator)
            annotated = any(start <= (row, column) < end for start, end in annotations)
            if (family, row, column) in seen or annotated or ("Number" in operator and not numbers):
                surplus.append((job,))
            seen.add((family, row, column))
        for table in ("work_items", "mutation_specs"):
            database.executemany(f"DELETE FROM {table} WHERE job_id = ?", surplus)
        database.commit()


def _annotations(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Start and end (line, column) of every annotation."""
    for node in ast.walk(ast.parse(source)):
        for name in ("annotation", "returns"):
            found = getattr(node, name, None)
            if isinstance(found, ast.expr):
                end = (found.end_lineno or 0, found.end_col_offset or 0)
                yield (found.lineno, found.col_offset), end


def judge(entries: list[list[dict[str, object]]]) -> tuple[int, list[str]]:
    """Count what was noticed; survivors as their diff's changed lines."""
    noticed, survivors = 0, []
    for _work, result in entries:
        if not result or result.get("test_outcome") != "survived":
            noticed += 1
            continue
        changed = [
            line for line in str(result.get("diff")).splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")
        ]
        survivors.append("  survived: " + " => ".join(line.strip("+- ") for line in changed))
    return noticed, survivors


def _tool(tools: Path, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [tools / "cosmic-ray", *arguments], cwd=folder, check=True, capture_output=True, encoding="utf-8"
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
