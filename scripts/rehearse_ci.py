"""What CI does for a user, done here: the action's own steps in each mode, and the lines of the Dockerfile.

    python scripts/rehearse_ci.py [--short] [--folder DIR] [--no-container]

The steps are those of action.yml, run by a small runner (action_runner.py) on a copy of the files that git knows, with
a synthetic checkpoint; phi4mm is installed once. --short: build, verify, hooks and refusals. Exit code 1 if anything
went otherwise than it should.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from action_runner import JobResult, Machine, base_python, copied, forged_commands, table
from container_rehearsal import carry_out

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "cpu-int8"
STRICT = """name = "strict"
calibration = "builtin"

[export]
ep = "cpu"

[quantize.vision]
method = "rtn"
max_rel_l2 = 1e-9
"""
"""A recipe whose gate no package can pass."""
HOSTILE = "x\"; touch pwned; $(touch pwned) `touch pwned` ' #@main"
"""A model name that any shell which reads it would obey."""


class Rehearsal:
    """Scenes on one machine; each is a list of things that must be so."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows, self.failed = folder, [("scene", "step", "outcome", "seconds")], 0
        action = copied(ROOT, folder / "action")
        self.machine = Machine(folder / "runner", action, base_python())
        self.phi4mm("synth", "checkpoint")

    def phi4mm(self, *words: str) -> None:
        """The command of this environment, in the workspace."""
        command = [sys.executable, "-m", "phi4mm_export", *words]
        subprocess.run(command, cwd=self.machine.workspace, check=True, stdout=subprocess.DEVNULL)

    def scene(self, name: str, job: JobResult, *expected: tuple[str, bool]) -> None:
        """Record a job's steps and whether everything expected of it is so."""
        for step in job.steps:
            if step.outcome != "skipped" and step.name not in self.machine.done:
                self.rows.append((name, step.name, step.outcome, f"{step.seconds:.1f}"))
        wrong = [what for what, so in (*expected, ("no forged command", not forged_commands(job.log))) if not so]
        self.verdict(name, wrong, job.log)

    def verdict(self, name: str, wrong: list[str], log: str) -> None:
        """One row for a scene; the log where it went wrong."""
        self.rows.append((name, "as expected" if not wrong else f"WRONG: {', '.join(wrong)}", "", ""))
        if wrong:
            self.failed += 1
            print(f"----- {name}: {', '.join(wrong)}\n{log}\n-----", flush=True)

    def refusals(self) -> None:
        """Inputs that cannot be used end in the first step, and no input is ever shell code."""
        job = self.machine.use(mode="publish")
        self.scene(
            "unknown mode", job,
            ("the first step fails with exit 2", job.steps[0].code == 2),
            ("says what it expects", "::error title=phi4mm action::expected mode build, verify" in job.log),
            ("nothing was installed", job.step("Install phi4mm").outcome == "skipped"),
        )  # fmt: skip

    def build(self) -> JobResult:
        """Mode build, and a lock of the result."""
        job = self.machine.use(mode="build", model="checkpoint", recipe=RECIPE, output="out/package")
        reports = Path(job.outputs["report"])
        self.scene(
            "build", job,
            ("succeeds", job.ok),
            ("names the package", job.outputs["package"] == "out/package"),
            ("gives a digest", len(job.outputs["digest"]) == 64),
            ("is of class exact", job.outputs["class"] == "exact"),
            ("writes a summary", job.outputs["digest"] in job.summary and "phi4mm validate package" in job.summary),
            ("leaves reports", all((reports / name).is_file() for name in ("plan.txt", "build.txt", "verify.txt"))),
        )  # fmt: skip
        if job.ok:
            self.machine.done.add("Install phi4mm")
            self.phi4mm("verify", "out/package", "--write-lock", "phi4mm.lock", "--quiet")
        return job

    def verify(self, digest: str) -> None:
        """Mode verify, of the package, and of one with a changed byte."""
        job = self.machine.use(mode="verify", package="out/package", expect="phi4mm.lock")
        self.scene("verify", job, ("succeeds", job.ok), ("gives the same digest", job.outputs["digest"] == digest))
        damaged = self.machine.workspace / "out" / "damaged"
        shutil.copytree(self.machine.workspace / "out" / "package", damaged)
        config = damaged / "genai_config.json"
        config.write_bytes(config.read_bytes().replace(b'"max_length"', b'"max_lenght"'))
        job = self.machine.use(mode="verify", package="out/damaged", expect="phi4mm.lock")
        self.scene(
            "verify, damaged", job,
            ("fails with exit 4", job.step("Check").code == 4),
            ("annotates file and line", "::error file=out/damaged/genai_config.json,line=" in job.log),
            ("names the changed file", "title=phi4mm verify%3A changed" in job.log),
            ("has no outputs", job.outputs["digest"] == ""),
        )  # fmt: skip

    def injection(self) -> None:
        """A model name full of shell syntax."""
        job = self.machine.use(mode="build", model=HOSTILE, recipe=RECIPE, output="out/other")
        pwned = list(self.folder.rglob("pwned"))
        self.scene(
            "shell syntax in an input", job,
            ("fails", not job.ok),
            ("runs nothing of it", not pwned),
            ("names it", "there is no such folder" in job.log),
        )  # fmt: skip

    def rebuild(self, digest: str) -> None:
        """Mode rebuild-compare, of the package and of one that says another recipe."""
        job = self.machine.use(mode="rebuild-compare", package="out/package", model="checkpoint", output="out/again")
        self.scene(
            "rebuild-compare", job,
            ("succeeds", job.ok),
            ("says so", "same bytes" in job.log),
            ("gives the same digest", job.outputs["digest"] == digest),
        )  # fmt: skip

    def rebuild_by_manifest(self, digest: str) -> None:
        """The same where phi4mm.json is all there is of the first package, as in a job on another runner."""
        alone = self.machine.workspace / "alone"
        alone.mkdir()
        shutil.copyfile(self.machine.workspace / "out" / "package" / "phi4mm.json", alone / "phi4mm.json")
        job = self.machine.use(mode="rebuild-compare", package="alone", model="checkpoint", output="out/by-manifest")
        self.scene(
            "rebuild by manifest", job,
            ("succeeds", job.ok),
            ("gives the same digest", job.outputs["digest"] == digest),
        )  # fmt: skip

    def resume(self) -> None:
        """A build that fails in its last stage, and the next one, which goes on from the cache."""
        recipe = self.machine.workspace / "strict.toml"
        recipe.write_text(STRICT, "utf-8")
        given = {"mode": "build", "model": "checkpoint", "recipe": recipe.name, "output": "out/strict"}
        job = self.machine.use(**given)
        self.scene(
            "build, gate missed", job,
            ("fails with exit 5", job.step("Build").code == 5),
            ("keeps its stages", job.step("Keep finished stages of a build that failed").outcome == "success"),
            ("publishes nothing", not (self.machine.workspace / "out" / "strict").exists()),
        )  # fmt: skip
        shutil.rmtree(self.machine.temp / "phi4mm" / "work")
        job = self.machine.use(**given)
        again = job.step("Build").log
        self.scene(
            "build, from the cache", job,
            ("looks at the stages", "looking at what an earlier run finished" in again),
            ("does not export again", "\nexporting\n" not in again),
        )  # fmt: skip

    def container(self) -> None:
        """The lines of the Dockerfile."""
        root = self.folder / "image"
        root.mkdir()
        bare = {"PATH": f"{self.folder / 'runner' / 'shims'}:/usr/bin:/bin", "HOME": str(Path.home())}
        wrong, log = [], ""
        start = time.monotonic()
        for line, code, printed in carry_out(self.machine.action, root, bare):
            seconds, start = time.monotonic() - start, time.monotonic()
            self.rows.append(("Dockerfile", line[:60], "failure" if code else "success", f"{seconds:.1f}"))
            log += printed
            wrong += [line] if code else []
        self.verdict("Dockerfile", wrong, log)

    def hooks(self) -> None:
        """The entries of the pre-commit hooks, with the package's folder as their argument."""
        import yaml

        for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8")):
            words = hook["entry"].split()
            command = [str(self.machine.temp / "phi4mm" / "venv" / "bin" / words[0]), *words[1:], "out/package"]
            start = time.monotonic()
            done = subprocess.run(command, cwd=self.machine.workspace, capture_output=True, text=True, check=False)
            outcome = "failure" if done.returncode else "success"
            self.rows.append(("pre-commit", hook["id"], outcome, f"{time.monotonic() - start:.1f}"))
            self.verdict("pre-commit", [hook["id"]] if done.returncode else [], done.stdout + done.stderr)


def rehearse(folder: Path, *, short: bool, container: bool) -> int:
    """Every scene in order; the exit code."""
    start = time.monotonic()
    show = Rehearsal(folder)
    show.refusals()
    built = show.build()
    scenes: Iterator[Callable[[], None]] = iter(())
    if built.ok:
        digest = built.outputs["digest"]
        scenes = iter(
            [lambda: show.verify(digest), show.injection, show.hooks]
            + ([] if short else [lambda: show.rebuild(digest), lambda: show.rebuild_by_manifest(digest), show.resume])
            + ([show.container] if container and not short else [])
        )
    for scene in scenes:
        scene()
    print(table(show.rows))
    print(f"{show.failed} scenes went wrong; {time.monotonic() - start:.0f} s")
    return 1 if show.failed else 0


def main() -> int:
    """Parse the command line and rehearse; without --folder in a temporary one."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="build, verify and refusals only")
    parser.add_argument("--no-container", action="store_true", help="leave the Dockerfile out")
    parser.add_argument("--folder", type=Path, help="work here and leave everything for a look")
    asked = parser.parse_args()
    if asked.folder is not None:
        asked.folder.mkdir(parents=True)
        return rehearse(asked.folder.resolve(), short=asked.short, container=not asked.no_container)
    with tempfile.TemporaryDirectory(prefix="phi4mm-rehearsal-") as temporary:
        return rehearse(Path(temporary).resolve(), short=asked.short, container=not asked.no_container)


if __name__ == "__main__":
    sys.exit(main())
