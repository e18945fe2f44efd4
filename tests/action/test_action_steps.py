"""The scripts of the action's steps, one by one, with a stand-in for the installed program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.scripts import script

pytestmark = pytest.mark.subprocess
FOLDER = Path(__file__).parents[2] / "scripts" / "action"
STAND_IN = """#!/usr/bin/env bash
if [ "$2" = --show ]; then printf '%s' "$STAND_IN_RECIPE"; exit 0; fi
printf '%s\\n' "$@" >> "$RUNNER_TEMP/words"
echo "::add-mask::forged by stdout"
echo "::error::forged by stderr" >&2
echo "error: the last words, 100%" >&2
exit "${STAND_IN_EXIT:-0}"
"""
INPUTS = {
    "PHI4MM_MODE": "build", "PHI4MM_MODEL": "model", "PHI4MM_RECIPE": "cpu-int8", "PHI4MM_PACKAGE": "",
    "PHI4MM_EXPECT": "", "PHI4MM_EXTRAS": "", "PHI4MM_CACHE": "true", "PHI4MM_CALIBRATION": "",
    "PHI4MM_OUTPUT": "out/package",
}  # fmt: skip


class Step:
    """A place to run one script in."""

    def __init__(self, folder: Path) -> None:
        self.workspace, self.temp = folder / "workspace", folder / "temp"
        bin_ = self.temp / "phi4mm" / "venv" / "bin"
        for path in (self.workspace, bin_):
            path.mkdir(parents=True)
        (bin_ / "phi4mm").write_text(STAND_IN, "utf-8")
        (bin_ / "phi4mm").chmod(0o755)
        (bin_ / "python").symlink_to(sys.executable)

    def run(self, name: str, **inputs: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "RUNNER_TEMP": str(self.temp),
            "GITHUB_OUTPUT": str(self.temp / "output"),
            **INPUTS,
        }
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(FOLDER / name)],
            cwd=self.workspace, env=environment | inputs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip

    @property
    def words(self) -> list[str]:
        return (self.temp / "words").read_text("utf-8").splitlines()

    @property
    def outputs(self) -> list[str]:
        return (self.temp / "output").read_text("utf-8").splitlines()


@pytest.fixture
def step(tmp_path: Path) -> Step:
    return Step(tmp_path)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"PHI4MM_MODE": "publish"}, "expected mode build, verify or rebuild-compare, found publish"),
        ({"PHI4MM_MODEL": ""}, "mode build needs the input model"),
        ({"PHI4MM_RECIPE": ""}, "mode build needs the input recipe"),
        ({"PHI4MM_MODE": "verify"}, "mode verify needs the input package"),
        ({"PHI4MM_MODE": "rebuild-compare"}, "mode rebuild-compare needs the input package"),
        ({"PHI4MM_EXTRAS": "sign; rm -r ."}, "expected extras as names"),
        ({"PHI4MM_CACHE": "yes"}, "expected cache true or false, found yes"),
        ({"PHI4MM_EXPECT": "no.lock"}, "the lock file no.lock is not there"),
    ],
)
def test_inputs_that_cannot_be_used_are_exit_2_with_one_annotation(
    step: Step, inputs: dict[str, str], said: str
) -> None:
    done = step.run("check_inputs.sh", **inputs)
    assert done.returncode == 2
    assert done.stdout.startswith("::error title=phi4mm action::")
    assert done.stdout.count("\n") == 1
    assert said in done.stdout


@pytest.mark.parametrize("mode", ["build", "verify", "rebuild-compare"])
def test_inputs_that_can_be_used_pass_and_name_the_folder_of_reports(step: Step, mode: str) -> None:
    done = step.run("check_inputs.sh", PHI4MM_MODE=mode, PHI4MM_PACKAGE="package")
    assert done.returncode == 0, done.stdout
    assert step.outputs[0] == f"report={step.temp}/phi4mm/report"


def test_an_input_with_line_breaks_and_percent_signs_is_still_one_annotation(step: Step) -> None:
    done = step.run("check_inputs.sh", PHI4MM_MODE="a\n::add-mask::b%0A\r")
    assert done.stdout.endswith("found a%0A::add-mask::b%250A%0D\n")


def test_what_the_program_prints_is_no_command_to_the_runner(step: Step) -> None:
    done = step.run("build.sh")
    assert done.returncode == 0, done.stdout
    assert "::add-mask::forged" in done.stdout
    assert script("action_runner").forged_commands(done.stdout) == []
    assert script("action_runner").forged_commands("::add-mask::forged") != []


def test_the_program_s_last_words_become_an_annotation_and_its_exit_code_that_of_the_step(step: Step) -> None:
    done = step.run("build.sh", STAND_IN_EXIT="5")
    assert done.returncode == 5
    assert done.stdout.splitlines()[-1] == "::error title=phi4mm build::error: the last words, 100%25"


def test_build_passes_every_input_on_as_one_word(step: Step) -> None:
    hostile = "--overwrite $(touch pwned) ; `touch pwned` \" '"
    step.run("build.sh", PHI4MM_MODEL=hostile, PHI4MM_RECIPE=hostile, PHI4MM_CALIBRATION=hostile, PHI4MM_OUTPUT=hostile)
    assert step.words == [
        "build", "--model", hostile, "--stream", "--calibration", hostile, "--output", hostile,
        "--work-dir", f"{step.temp}/phi4mm/work", "--", hostile,
    ]  # fmt: skip
    assert list(step.workspace.iterdir()) == []


def test_a_commit_after_the_hub_id_is_the_revision_unless_there_is_such_a_folder(step: Step) -> None:
    step.run("build.sh", PHI4MM_MODEL="owner/name@0123abc")
    assert step.words[1:6] == ["--model", "owner/name", "--revision", "0123abc", "--stream"]
    (step.temp / "words").unlink()
    (step.workspace / "name@home").mkdir()
    step.run("build.sh", PHI4MM_MODEL="name@home")
    assert step.words[1:4] == ["--model", "name@home", "--output"]


@pytest.mark.parametrize("script_name", ["plan.sh", "build.sh"])
def test_a_hub_model_is_read_in_ranges_unless_the_recipe_compares_with_it(step: Step, script_name: str) -> None:
    for against, streamed in (("none", True), ("model", False)):
        step.run(script_name, PHI4MM_MODEL="owner/name", STAND_IN_RECIPE=f'[evaluate]\nagainst = "{against}"\n')
        assert ("--stream" in step.words) is streamed
        (step.temp / "words").unlink()


def test_rebuild_finds_in_the_manifest_whether_the_package_was_compared_with_the_model(step: Step) -> None:
    package = step.workspace / "theirs"
    package.mkdir()
    for against, streamed in (("none", True), ("model", False)):
        (package / "phi4mm.json").write_text(
            json.dumps({"build": {"evaluate": {"against": against}}}, indent=2), "utf-8"
        )
        for name in ("theirs", "theirs/README.md"):
            step.run("rebuild.sh", PHI4MM_MODEL="", PHI4MM_PACKAGE=name)
            assert ("--stream" in step.words) is streamed
            (step.temp / "words").unlink()


def test_check_judges_twice_even_if_the_first_finds_something(step: Step) -> None:
    done = step.run("check.sh", STAND_IN_EXIT="4", PHI4MM_EXPECT="a.lock")
    assert done.returncode == 4
    assert step.words == [
        "validate", "--format", "github", "--", "out/package",
        "verify", "--format", "github", "--expect", "a.lock", "--", "out/package",
    ]  # fmt: skip


def test_check_judges_the_given_package_in_mode_verify(step: Step) -> None:
    step.run("check.sh", PHI4MM_MODE="verify", PHI4MM_PACKAGE="theirs")
    assert step.words[4] == "theirs"
    assert step.outputs == ["package=theirs"]


def test_rebuild_names_a_model_only_if_one_is_given(step: Step) -> None:
    step.run("rebuild.sh", PHI4MM_MODEL="", PHI4MM_PACKAGE="theirs")
    assert step.words == ["rebuild", "--stream", "--output", "out/package", "--", "theirs"]


def test_an_output_with_a_line_break_is_refused(step: Step) -> None:
    done = step.run("check.sh", PHI4MM_MODE="verify", PHI4MM_PACKAGE="a\ndigest=forged")
    assert done.returncode == 2
    assert "has a line break" in done.stdout
    assert not (step.temp / "output").exists()


def test_modules_that_lie_in_the_workspace_are_not_imported(step: Step) -> None:
    (step.workspace / "secrets.py").write_text("raise SystemExit('imported from the workspace')", "utf-8")
    assert "imported from the workspace" not in step.run("build.sh").stdout
