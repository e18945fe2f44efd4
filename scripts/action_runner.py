"""A GitHub runner for one composite action, as far as a rehearsal needs it: expressions, environment files, outcomes.

`run` steps are run by the shell command that GitHub documents for `shell: bash`. Of the actions in `uses` three are
known: actions/setup-python puts an interpreter on the path, actions/cache/restore and actions/cache/save copy a folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from action_expressions import evaluated, substituted, truth

PASSED_ON = ("HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_INDEX_URL", "PIP_CONFIG_FILE",
             "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")  # fmt: skip
"""All of the caller's environment that a step gets to see: where pip finds packages."""
COMMAND = re.compile(r"\s*::([a-z-]+)")


@dataclass(frozen=True)
class StepResult:
    """One step: success, failure or skipped; its exit code, seconds, what it printed."""

    name: str
    outcome: str
    code: int = 0
    seconds: float = 0.0
    log: str = ""


@dataclass
class JobResult:
    """One use of the action: every step, the outputs of the action, the summaries of all steps."""

    steps: list[StepResult] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    summary: str = ""

    @property
    def ok(self) -> bool:
        return all(step.outcome != "failure" for step in self.steps)

    @property
    def log(self) -> str:
        return "".join(step.log for step in self.steps)

    def step(self, name: str) -> StepResult:
        return next(step for step in self.steps if step.name == name)


class Machine:
    """A runner: a workspace, a temporary folder and a cache, which outlive single jobs.

    action: the action's own checkout. python: the interpreter that setup-python finds. `done` names steps that need not
    run again, because what they leave is still there.
    """

    def __init__(self, folder: Path, action: Path, python: Path) -> None:
        self.action, self.workspace, self.temp = action, folder / "workspace", folder / "temp"
        self.cache, self._shims, self._files = folder / "cache", folder / "shims", folder / "files"
        for path in (self.workspace, self.temp, self.cache, self._shims, self._files):
            path.mkdir(parents=True)
        (self._shims / "python").symlink_to(python)
        self._runs = 0
        self.done: set[str] = set()

    def use(self, **inputs: str) -> JobResult:
        """Run the action with these inputs."""
        document = yaml.safe_load((self.action / "action.yml").read_text("utf-8"))
        known = document["inputs"]
        unknown = set(inputs) - set(known)
        if unknown:
            raise ValueError(f"the action has no input {sorted(unknown)}")
        self._runs += 1
        names: dict[str, Any] = {
            "inputs": {name: inputs.get(name, str(entry.get("default", ""))) for name, entry in known.items()},
            "steps": {},
            "runner": {"temp": str(self.temp), "os": "Linux"},
            "github": {"run_id": str(self._runs), "run_attempt": "1", "workspace": str(self.workspace)},
        }
        job = JobResult()
        for number, step in enumerate(document["runs"]["steps"]):
            job.steps.append(self._step(step, names, job, number))
        job.outputs = {name: substituted(entry["value"], names) for name, entry in document["outputs"].items()}
        return job

    def _step(self, step: Mapping[str, Any], names: dict[str, Any], job: JobResult, number: int) -> StepResult:
        asked = str(step.get("if", "success()"))
        calls: dict[str, Callable[[], bool]] = {
            "always": lambda: True,
            "success": lambda: job.ok,
            "failure": lambda: not job.ok,
            "cancelled": lambda: False,
        }
        wanted = truth(evaluated(asked, names, calls))
        if not wanted or not (job.ok or re.search(r"\b(always|failure|cancelled)\(\)", asked)):
            names["steps"][step.get("id", "")] = {"outcome": "skipped", "outputs": {}}
            return StepResult(step["name"], "skipped")
        start = time.monotonic()
        if step["name"] in self.done:
            code, log, outputs = 0, "", {}
        elif "uses" in step:
            code, log, outputs = 0, "", self._used(step["uses"], step.get("with", {}), names)
        else:
            code, log, outputs = self._run(step, names, job, number)
        outcome = "failure" if code else "success"
        names["steps"][step.get("id", "")] = {"outcome": outcome, "outputs": outputs}
        return StepResult(step["name"], outcome, code, time.monotonic() - start, log)

    def _run(
        self, step: Mapping[str, Any], names: Mapping[str, Any], job: JobResult, number: int
    ) -> tuple[int, str, dict[str, str]]:
        stem = self._files / f"{self._runs}-{number}"
        script, output, summary = (stem.with_name(f"{stem.name}.{kind}") for kind in ("sh", "output", "summary"))
        script.write_text(step["run"], "utf-8")
        output.touch()
        summary.touch()
        given = {name: substituted(str(value), names) for name, value in step.get("env", {}).items()}
        if step["shell"] != "bash":
            raise ValueError(f"{step['name']}: expected shell bash, found {step['shell']}")
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.workspace,
            env={**self._environment(output, summary), **given},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, encoding="utf-8", errors="replace", check=False,
        )  # fmt: skip
        stem.with_name(f"{stem.name}.log").write_text(done.stdout, "utf-8")
        job.summary += summary.read_text("utf-8")
        pairs = (line.partition("=") for line in output.read_text("utf-8").splitlines())
        return done.returncode, done.stdout, {name: value for name, _, value in pairs}

    def _environment(self, output: Path, summary: Path) -> dict[str, str]:
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return kept | {
            "PATH": os.pathsep.join([str(self._shims), "/usr/local/bin", "/usr/bin", "/bin"]),
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTION_PATH": str(self.action),
            "GITHUB_WORKSPACE": str(self.workspace),
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(summary),
            "RUNNER_TEMP": str(self.temp),
        }

    def _used(self, action: str, given: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, str]:
        name = action.partition("@")[0]
        values = {key: substituted(str(value), names) for key, value in given.items()}
        if name == "actions/setup-python":
            return {"python-version": values["python-version"]}
        if name not in ("actions/cache/restore", "actions/cache/save"):
            raise ValueError(f"the rehearsal knows no {name}")
        folder, place = Path(values["path"]), self.cache / values["key"]
        if name.endswith("save"):
            if not place.exists() and folder.is_dir():
                shutil.copytree(folder, place)
            return {}
        starts = (values["key"], *values.get("restore-keys", "").split())
        found = [entry for start in starts for entry in sorted(self.cache.iterdir()) if entry.name.startswith(start)]
        if found:
            shutil.copytree(found[-1], folder, dirs_exist_ok=True)
        return {"cache-matched-key": found[-1].name if found else ""}


def forged_commands(log: str) -> list[str]:
    """Lines of a log that a runner would obey and that no step of ours prints: data that became a command."""
    token, forged = "", []
    for line in log.splitlines():
        if token:
            token = "" if line.strip() == f"::{token}::" else token
        elif line.startswith("::stop-commands::"):
            token = line.removeprefix("::stop-commands::")
        elif (match := COMMAND.match(line)) and match.group(1) not in ("error", "warning", "notice"):
            forged.append(line)
    return forged


def copied(root: Path, target: Path) -> Path:
    """The files of the repository that git knows, or would add, copied: what a checkout of the action has."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, target / name)
    return target


def base_python() -> Path:
    """The interpreter behind a virtual environment."""
    return Path(getattr(sys, "_base_executable", sys.executable))


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(map(str.rstrip, lines))
