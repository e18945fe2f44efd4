"""`phi4mm diff` as it is typed: text, JSON, exit codes, and as git's textconv."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.packages import build_package, edit_config
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app


@pytest.fixture
def packages(tmp_path: Path) -> tuple[Path, Path]:
    first = build_package(tmp_path / "a")
    shutil.copytree(first, tmp_path / "b")
    return first, tmp_path / "b"


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diff", *map(str, arguments)])


def test_equal_packages_are_said_to_be_equal(packages: tuple[Path, Path]) -> None:
    result = _run(*packages, "--exit-code")
    assert (result.exit_code, result.stdout) == (0, "equal: no differences\n")


def test_differences_are_listed_and_the_exit_code_is_0_unless_asked_for(packages: tuple[Path, Path]) -> None:
    edit_config(packages[1], lambda c: c["search"].update(top_k=7))
    result = _run(*packages)
    assert result.exit_code == 0
    assert "config genai_config.json: search.top_k: other value (1 -> 7)" in result.stdout
    assert result.stdout.splitlines()[-1] == "different: 1 file, 1 config"
    assert _run(*packages, "--exit-code").exit_code == 5


def test_many_of_a_kind_are_cut_short_unless_all_are_asked_for(packages: tuple[Path, Path]) -> None:
    for number in range(9):
        (packages[1] / f"extra{number}").write_bytes(b"")
    assert "file: 4 more of this kind (--all lists them)" in _run(*packages).stdout
    assert "extra8" in _run(*packages, "--all").stdout


def test_json_is_one_document(packages: tuple[Path, Path]) -> None:
    edit_config(packages[1], lambda c: c["search"].update(top_k=7))
    document = json.loads(_run(*packages, "--json", "--tolerance", "0.5").stdout)
    assert list(document) == ["a", "b", "equal", "tolerance", "counts", "differences"]
    assert document["counts"] == {"file": 1, "config": 1}
    assert list(document["differences"][0]) == ["level", "where", "what", "a", "b", "figures", "within_tolerance"]


def test_two_kinds_or_nothing_at_a_path_are_usage_errors(packages: tuple[Path, Path]) -> None:
    assert _run(packages[0], packages[1] / "tokenizer.json").exit_code == 2
    assert _run(packages[0], packages[1] / "nothing").exit_code == 2
    assert _run(*packages, "--tolerance", "-1").exit_code == 2


def test_a_file_that_is_no_graph_is_exit_3(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\xff" * 64)
    assert _run(tmp_path / "m.onnx").exit_code == 3


def test_one_path_is_printed_as_canonical_text(packages: tuple[Path, Path]) -> None:
    package = _run(packages[0])
    assert package.exit_code == 0
    assert package.stdout.startswith("file genai_config.json ")
    assert "graph phi-4-mm-text.onnx" in package.stdout
    assert _run(packages[0] / "genai_config.json").stdout.startswith("{\n")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.subprocess
def test_git_shows_a_changed_graph_through_it(packages: tuple[Path, Path], tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*words: str) -> str:
        settings = ("-c", "user.name=n", "-c", "user.email=e@example.invalid", "-c", "core.autocrlf=false")
        done = subprocess.run(["git", *settings, *words], cwd=repository, capture_output=True, text=True, check=True)
        return done.stdout

    git("init", "-q")
    git("config", "diff.phi4mm.textconv", f"{sys.executable} -m phi4mm_export diff")
    (repository / ".gitattributes").write_text("*.onnx diff=phi4mm\n", encoding="utf-8")
    shutil.copyfile(packages[0] / "phi-4-mm-vision.onnx", repository / "m.onnx")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    shutil.copyfile(packages[0] / "phi-4-mm-speech.onnx", repository / "m.onnx")
    shown = git("diff")
    assert "-input pixel_values: float [num_images, max_num_crops, 3, height, width]" in shown
    assert "+input audio_embeds: float [num_audios, num_frames, 80]" in shown
