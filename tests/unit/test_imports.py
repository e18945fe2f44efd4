"""What importing, installing and asking for help may cost: no torch, no onnxruntime, none of the extras."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from phi4mm_export.cli.app import COMMANDS, app

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = {"torch", "transformers", "onnxruntime", "onnxruntime_genai", "onnx", "onnxscript", "numpy", "PIL", "soundfile"}


def loaded_by(statement: str) -> set[str]:
    """The heavy modules that a fresh interpreter has loaded after the statement."""
    code = f"import sys\n{statement}\nprint('LOADED', *sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.rsplit("LOADED", 1)[1].split())


def base_requirements(extras: frozenset[str] = frozenset()) -> Iterator[Requirement]:
    """The project's requirements that apply when these extras are asked for."""
    for line in requires("phi4mm") or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield requirement


def closure() -> set[str]:
    """Names of everything that the base install pulls in, followed through the installed metadata."""
    seen: set[str] = set()
    queue = [(requirement.name, frozenset(requirement.extras)) for requirement in base_requirements()]
    while queue:
        name, extras = queue.pop()
        if (key := canonicalize_name(name)) in seen:
            continue
        seen.add(key)
        try:
            lines = requires(name) or ()
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
                queue.append((requirement.name, frozenset(requirement.extras)))
    return seen


@pytest.mark.subprocess
def test_importing_the_package_loads_neither_torch_nor_onnxruntime_nor_numpy() -> None:
    assert loaded_by("import phi4mm_export") == set()


@pytest.mark.subprocess
def test_asking_for_help_loads_no_heavy_library() -> None:
    statement = (
        "sys.argv = ['phi4mm', '--help']\nfrom phi4mm_export.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code"
    )

    assert loaded_by(statement) == set()


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])

    assert result.exit_code == 0
    assert [name for name in COMMANDS if f"\n  {name} " not in result.stdout] == []


def test_an_unknown_command_and_an_unknown_option_are_usage_errors() -> None:
    assert CliRunner().invoke(app, ["exprot"]).exit_code == 2
    assert CliRunner().invoke(app, ["--colour"]).exit_code == 2


def test_the_version_of_the_module_is_the_version_of_the_project() -> None:
    result = CliRunner().invoke(app, ["--version"])

    assert result.stdout.strip() == PROJECT["version"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_shows_an_example(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])

    lines = [line for line in result.stdout.splitlines() if not line.startswith("Usage:")]
    assert result.exit_code == 0
    assert any(f"phi4mm {name} " in line for line in lines), result.stdout


def test_the_base_install_names_no_library_of_an_extra() -> None:
    base = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    optional = {
        canonicalize_name(Requirement(line).name)
        for extra, lines in PROJECT["optional-dependencies"].items()
        if extra != "dev"
        for line in lines
    }

    assert base & optional == set()


def test_every_library_that_the_package_imports_is_a_declared_requirement() -> None:
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    declared = {canonicalize_name(Requirement(line).name) for line in [*PROJECT["dependencies"], *extras]}
    homes = packages_distributions()

    undeclared = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in sorted((ROOT / "phi4mm_export").rglob("*.py"))
        for module in top_level_imports(path) - sys.stdlib_module_names - {"phi4mm_export"}
        if not {canonicalize_name(home) for home in homes.get(module, [module])} & declared
    }

    assert undeclared == set()


def test_the_lock_file_holds_what_the_project_asks_for_and_no_torch_and_no_address() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", lock, re.M)}
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *(line for extra in ("cpu", "media", "hub", "dev") for line in extras[extra])]

    unmet = [
        line
        for requirement in map(Requirement, asked)
        if not requirement.specifier.contains(locked.get(line := canonicalize_name(requirement.name), "0"))
    ]

    assert unmet == []
    assert "torch" not in locked
    assert "://" not in lock
    assert not re.search(r"^-", lock, re.M)


def top_level_imports(path: Path) -> set[str]:
    """The first part of every absolute import in a file, wherever in the file it stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_the_base_install_pulls_in_no_library_of_an_extra_through_another() -> None:
    runtimes = {"onnxruntime", "onnxruntime-genai", "onnxruntime-gpu", "onnxruntime-genai-cuda"}
    media = {"pillow", "soundfile", "soxr", "jiwer"}
    frameworks = {"torch", "transformers", "peft", "neural-compressor", "huggingface-hub"}

    assert closure() & (runtimes | media | frameworks) == set()


@pytest.mark.subprocess
def test_the_import_contracts_hold() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"

    result = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout + result.stderr
