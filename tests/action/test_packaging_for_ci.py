"""The Dockerfile, the pre-commit hooks, the lock file of what is run, and the page that explains them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.scripts import script
from typer.core import TyperGroup

from phi4mm_export.cli.app import app

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
PAGE = (ROOT / "docs" / "ci.md").read_text("utf-8")
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))


def lines(word: str) -> list[str]:
    """The arguments of one instruction, wherever it stands."""
    return [rest for found, rest in script("container_rehearsal").instructions(DOCKERFILE) if found == word]


# ------------------------------------------------------------------ container


def test_the_image_starts_from_slim_python_3_11_and_ends_as_a_user_without_rights() -> None:
    assert lines("ARG") == ["BASE=python:3.11-slim"]
    assert {line.split()[0] for line in lines("FROM")} == {"${BASE}"}
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", lines("USER")[-1])
    assert lines("ENTRYPOINT") == ['["phi4mm"]']


def test_whatever_pip_installs_is_hashed_or_the_project_itself() -> None:
    installs = [line for line in lines("RUN") if " install " in line]
    assert len(installs) == 2
    assert all("--require-hashes -r" in line or "--no-deps --no-build-isolation" in line for line in installs)


def test_what_is_copied_exists_and_is_let_through_to_the_engine() -> None:
    let_through = (ROOT / ".dockerignore").read_text("utf-8").split()
    sources = [word for line in lines("COPY") if not line.startswith("--from") for word in line.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in let_through


def test_an_instruction_that_cannot_be_rehearsed_is_refused() -> None:
    with pytest.raises(ValueError, match="not rehearsed: ADD"):
        list(script("container_rehearsal").instructions("FROM x\nADD a b\n"))


@pytest.mark.subprocess
def test_lines_are_carried_out_in_order_below_the_folder_and_stop_at_a_failure(tmp_path: Path) -> None:
    context, root = tmp_path / "context", tmp_path / "root"
    context.mkdir()
    root.mkdir()
    (context / "a.txt").write_text("a", "utf-8")
    (context / "Dockerfile").write_text(
        "# a comment\nFROM x\nENV PHI4MM_HOME=/opt/p\nENV B=${PHI4MM_HOME}/b\nCOPY a.txt ${B}/\n"
        'RUN test -f "$B/a.txt" && \\\n    echo found\nRUN exit 3\nRUN touch never\n',
        "utf-8",
    )
    done = list(script("container_rehearsal").carry_out(context, root, {"PATH": "/usr/bin:/bin"}))
    assert [code for _, code, _ in done] == [0, 0, 3]
    assert done[1][2] == "found\n"
    assert (root / "opt" / "p" / "b" / "a.txt").read_text("utf-8") == "a"
    assert not list(root.rglob("never"))


# ------------------------------------------------------------------ pre-commit


def test_the_hooks_are_commands_with_options_that_exist() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert [hook["id"] for hook in hooks] == ["phi4mm-validate", "phi4mm-verify"]
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for hook in hooks:
        program, name, *options = hook["entry"].split()
        command = group.get_command(typer.Context(group), name)
        assert program == "phi4mm"
        assert command is not None
        assert set(options) <= {option for parameter in command.params for option in parameter.opts}
        assert hook["pass_filenames"] is False
        assert re.search(hook["files"], "package/genai_config.json")
        assert not re.search(hook["files"], "src/main.py")


# ------------------------------------------------------------------ lock


def locked(name: str) -> dict[str, str]:
    """Package -> its whole entry, markers and hashes included."""
    text = (ROOT / name).read_text("utf-8")
    return {
        entry.partition("==")[0]: entry for entry in re.split(r"\n(?=\S)", text.strip()) if not entry.startswith("#")
    }


def test_what_is_run_is_locked_as_what_is_tested_and_holds_no_tool_of_development() -> None:
    run, everything = locked("requirements-run.lock"), locked("requirements.lock")
    assert {name for name, entry in run.items() if everything.get(name) != entry} == set()
    assert not {"pytest", "mypy", "ruff", "hypothesis", "torch"} & set(run)
    assert all("--hash=sha256:" in entry for entry in run.values())


def test_what_is_run_holds_what_the_project_and_its_extras_ask_for() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(line for extra in ("cpu", "media", "hub") for line in extras[extra])]
    names = {canonicalize_name(Requirement(line).name) for line in asked} | {"setuptools"}
    assert names - {canonicalize_name(name) for name in locked("requirements-run.lock")} == set()


# ------------------------------------------------------------------ the page


def test_the_page_explains_every_input_and_every_output() -> None:
    assert {name for name in (*ACTION["inputs"], *ACTION["outputs"]) if f"| `{name}` |" not in PAGE} == set()


def test_the_workflows_of_the_page_use_inputs_that_exist_and_pinned_actions() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert blocks
    seen = 0
    for block in blocks:
        document = yaml.safe_load(block)
        for job in document.get("jobs", {}).values():
            for step in job["steps"]:
                name, _, pin = step.get("uses", "").partition("@")
                if name.endswith("/phi4mm"):
                    seen += 1
                    assert set(step["with"]) <= set(ACTION["inputs"])
                elif name:
                    assert re.fullmatch(r"[0-9a-f]{40}", pin), step
    assert seen >= 3


def test_the_rehearsal_s_python_is_not_that_of_a_virtual_environment() -> None:
    assert Path(sys.prefix).resolve() == Path(sys.base_prefix).resolve() or not script(
        "action_runner"
    ).base_python().is_relative_to(sys.prefix)
