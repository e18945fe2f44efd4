"""action.yml as text: what is wired to what, and nothing from outside becomes shell code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from support.scripts import script
from typer.core import TyperGroup

from phi4mm_export.cli.app import app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "action"
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
RUN = re.compile(r'bash "\$GITHUB_ACTION_PATH/scripts/action/(\w+\.sh)"')
PLACE = re.compile(r"\$\{\{(.*?)\}\}")
ENVIRONMENT = (FOLDER / "environment.sh").read_text("utf-8")
SCRIPTS = sorted(path for path in FOLDER.glob("*.sh") if path.name != "environment.sh")
NAMES = {"inputs": dict.fromkeys(ACTION["inputs"], ""), "steps": {}, "runner": {}, "github": {}}
CALLS = dict.fromkeys(("always", "success", "failure", "cancelled"), lambda: True)


def script_of(step: dict[str, Any]) -> str:
    match = RUN.fullmatch(step["run"])
    assert match, step["run"]
    return (FOLDER / match[1]).read_text("utf-8")


def expressions() -> list[str]:
    """Every expression of the file, those of `if` without their braces."""
    text = (ROOT / "action.yml").read_text("utf-8")
    return [*PLACE.findall(text), *(step["if"] for step in STEPS if "if" in step)]


def test_it_is_a_composite_action_with_the_inputs_and_outputs_that_the_documentation_names() -> None:
    assert ACTION["runs"]["using"] == "composite"
    assert {"mode", "model", "recipe", "calibration", "expect", "output", "extras", "cache", "token"} <= set(
        ACTION["inputs"]
    )
    assert set(ACTION["outputs"]) == {"package", "digest", "class", "report"}
    assert all(entry["description"] for entry in (*ACTION["inputs"].values(), *ACTION["outputs"].values()))


def test_every_input_reaches_a_step() -> None:
    used = {name for text in expressions() for name in re.findall(r"(?<!steps\.)\binputs\.(\w+)", text)}
    assert used == set(ACTION["inputs"])


def test_a_run_body_is_the_call_of_one_script_and_holds_no_expression() -> None:
    bodies = [step["run"] for step in STEPS if "run" in step]
    assert all(RUN.fullmatch(body) for body in bodies)
    assert "${{" not in "".join(bodies)
    assert {step["shell"] for step in STEPS if "run" in step} == {"bash"}


def test_every_script_is_the_body_of_one_step() -> None:
    called = [RUN.fullmatch(step["run"])[1] for step in STEPS if "run" in step]  # type: ignore[index]
    assert sorted(called) == [path.name for path in SCRIPTS]


def test_a_step_sets_exactly_the_variables_that_its_script_reads() -> None:
    shared = set(re.findall(r"PHI4MM_\w+", ENVIRONMENT))
    for step in STEPS:
        if "run" in step:
            given = {name for name in step.get("env", {}) if name.startswith("PHI4MM_")}
            read = set(re.findall(r"\$\{?(PHI4MM_\w+)", script_of(step)))
            assert read - given == set(), step["name"]
            assert given - read - shared == set(), step["name"]


def test_the_token_goes_only_to_steps_that_may_fetch_a_model() -> None:
    assert [step["name"] for step in STEPS if "HF_TOKEN" in step.get("env", {})] == [
        "Plan",
        "Build",
        "Build again and compare",
    ]
    assert not any("inputs.token" in str(step.get("with")) + str(step.get("run")) for step in STEPS)


def test_every_output_that_is_read_is_written_by_that_step() -> None:
    written = {
        step.get("id"): set(re.findall(r"^ *output (\w+) ", script_of(step), re.MULTILINE)) if "run" in step else set()
        for step in STEPS
    }
    written["report"] |= set(re.findall(r'print\(f"(\w+)=', (FOLDER / "facts.py").read_text("utf-8")))
    read = [pair for text in expressions() for pair in re.findall(r"steps\.(\w+)\.outputs\.(\w+)", text)]
    read += [
        pair for o in ACTION["outputs"].values() for pair in re.findall(r"steps\.(\w+)\.outputs\.(\w+)", o["value"])
    ]
    assert {(step, name) for step, name in read if name not in written.get(step, set())} == set()


def test_other_actions_are_pinned_to_a_commit_with_the_version_beside_it() -> None:
    lines = [line for line in (ROOT / "action.yml").read_text("utf-8").splitlines() if "uses:" in line]
    assert lines
    assert [line for line in lines if not re.fullmatch(r" +uses: [\w/-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


@pytest.mark.parametrize("text", expressions())
def test_every_expression_is_one_that_the_rehearsal_follows(text: str) -> None:
    assert isinstance(script("action_expressions").evaluated(text, NAMES, CALLS), str | bool)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_command_and_option_in_a_script_exists(path: Path) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    text = path.read_text("utf-8").replace("\\\n", " ")
    calls = re.findall(
        r"^(?:.*\$\()?(?:plainly \"[^\"]+\"|phi4mm) ([a-z]+) (.*)|^plan=\((plan) (.*)", text, re.MULTILINE
    )
    for first, words, second, others in calls:
        command = group.get_command(typer.Context(group), first or second)
        assert command is not None, first
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<=[ (])--[a-z][a-z-]*", f" {words}{others}")) <= known


@pytest.mark.parametrize("path", [*SCRIPTS, FOLDER / "environment.sh"], ids=lambda path: path.name)
def test_scripts_quote_what_comes_from_outside_and_never_evaluate(path: Path) -> None:
    text = "\n".join(line.partition(" #")[0] for line in path.read_text("utf-8").splitlines())
    assert "eval" not in text
    bare = [line for line in text.splitlines() if re.search(r'(?<!["{\w\[])\$\{?PHI4MM_\w+\}?(?!["}\w\]])', line)]
    assigned = r"\w+=\$(PHI4MM_\w+|\{PHI4MM_\w+:-\})"
    allowed = re.compile(
        r'case \$PHI4MM_\w+ in|"[^"]*\$PHI4MM_\w+[^"]*"|'
        rf"^{assigned}$|; then {assigned}; fi$"
    )
    assert [line for line in bare if not allowed.search(line.strip())] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_user_words_that_begin_with_a_dash_stay_arguments(path: Path) -> None:
    """Whatever is not the value of an option follows `--`."""
    text = path.read_text("utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if re.search(r"\bphi4mm (plan|validate|verify)|plainly", line) and "fail" not in line:
            assert re.search(r'-- "\$[\w]+"', line), line
