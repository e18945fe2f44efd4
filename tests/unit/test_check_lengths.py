"""scripts/check_lengths.py: what `make check` refuses beside ruff and mypy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.subprocess
SCRIPT = Path(__file__).parents[2] / "scripts" / "check_lengths.py"


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, check=False)


def function_of(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (lines - 1)


def test_a_file_of_400_lines_and_a_function_of_80_pass(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("x = 1\n" * 400)
    (tmp_path / "deep.py").write_text(function_of(80))

    assert check(tmp_path).returncode == 0


def test_a_file_of_401_lines_is_named_with_its_length(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("x = 1\n" * 401)

    result = check(tmp_path)

    assert result.returncode == 1
    assert "long.py:401: the file has 401 lines" in result.stdout


def test_a_last_line_without_an_end_counts(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("x = 1\n" * 400 + "x = 1")

    assert check(tmp_path).returncode == 1


def test_a_function_of_81_lines_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text("x = 1\n\n\n" + function_of(81))

    result = check(tmp_path)

    assert result.returncode == 1
    assert "deep.py:4: f has 81 lines" in result.stdout


def test_a_method_inside_a_class_is_measured_too(tmp_path: Path) -> None:
    method = "".join(f"    {line}\n" for line in function_of(81).splitlines())
    (tmp_path / "deep.py").write_text("class A:\n" + method)

    assert check(tmp_path).returncode == 1


def test_a_module_named_utils_is_refused(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("x = 1\n")

    result = check(tmp_path)

    assert result.returncode == 1
    assert "'utils' says nothing" in result.stdout
