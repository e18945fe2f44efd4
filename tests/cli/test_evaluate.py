"""`phi4mm evaluate` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.media_files import write_picture
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.pipeline.export import export
from phi4mm_export.spec.recipe import Precision, Recipe

BuildOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="module")
def packages(built_once: BuildOnce, tiny_checkpoint: Path) -> tuple[Path, Path]:
    """INT4 and float."""
    int4, floats = Recipe.resolve(precision=Precision.INT4), Recipe.resolve(precision=Precision.FP32)
    return (
        built_once("package-int4", lambda folder: export(tiny_checkpoint, folder, recipe=int4)),
        built_once("package-float", lambda folder: export(tiny_checkpoint, folder, recipe=floats)),
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "letter.txt"
    file.write_text("Total due: 12.50")
    return file


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_tables_go_to_stdout_and_progress_to_stderr(packages: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "ask.jsonl").write_text('{"prompt": "Hi"}\n')
    options = ("--prompts", tmp_path / "ask.jsonl", "--max-new-tokens", 2, "--blame", "--threads", 1, "--seed", 3)
    result = typed(packages[0], "--against", packages[1], *options)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "package-int4 against package-float (package); inputs given: 1 request (1 none), 0 texts"
    assert any(line.startswith("decoder") and "int4" in line for line in lines)
    assert any(line.startswith("none") for line in lines)
    assert "loses its answer in: decoder, " in result.stdout
    assert "reading the requests" in result.stderr


def test_a_missed_gate_is_exit_5_after_the_report_was_written(
    packages: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    options = ("--text", text, "--report", tmp_path / "report", "--max-rel-l2", 0.001, "--quiet")
    result = typed(packages[0], "--against", packages[1], *options, "--max-text-tokens", 5)
    assert result.exit_code == 5
    assert "--max-rel-l2: expected at most 0.001, found no figure (nothing was measured)" in result.stderr
    assert "letter.txt" in result.stdout
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["evaluation.json", "index.html"]


def test_json_is_the_document_of_the_report(packages: tuple[Path, Path], text: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    options = ("--text", text, "--max-text-tokens", 4, "--json", "--report", report)
    result = typed(packages[0], "--against", packages[1], *options)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document == json.loads((report / "evaluation.json").read_text("utf-8"))
    assert document["texts"][0]["tokens"] == 4
    again = typed(packages[0], "--against", packages[1], *options)
    assert again.exit_code == 2
    assert "the target exists already" in again.stderr
    assert typed(packages[0], "--against", packages[1], *options, "--overwrite").exit_code == 0


def test_unusable_media_are_exit_2_and_every_file_is_named(packages: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    write_picture(tmp_path, "good.png")
    result = typed(packages[0], "--against", packages[1], "--images", tmp_path)
    assert result.exit_code == 2
    assert "2 files cannot be used" in result.stderr
    assert "text.jpg" in result.stderr
    assert "empty.png" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--images", "nowhere/"), "--images nowhere/"),
        (("--audio", "nowhere.wav"), "--audio nowhere.wav"),
        (("--prompts", "nowhere.jsonl"), "--prompts nowhere.jsonl"),
        (("--text", "nowhere.txt"), "nowhere.txt: the file does not exist"),
        (("--min-cosine", "2"), "--min-cosine: expected a cosine from -1 to 1"),
        (("--max-kl", "-1"), "--max-kl: expected a number of at least 0"),
        (("--num-samples", "0"), "--num-samples"),
        (("--ep", "tpu"), "cpu"),
        (("--fields", "nowhere.json"), "nowhere.json: the file is missing"),
    ],
)
def test_a_bad_option_is_exit_2_with_a_sentence(
    packages: tuple[Path, Path], options: tuple[str, ...], sentence: str
) -> None:
    result = typed(packages[0], "--against", packages[1], *options)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_name_in_the_expectations_that_no_request_has_is_exit_2(packages: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "said.json").write_text('{"other.wav": "hello"}')
    image = write_picture(tmp_path)
    result = typed(packages[0], "--against", packages[1], "--images", image, "--references", tmp_path / "said.json")
    assert result.exit_code == 2
    assert "other.wav" in result.stderr
    assert "page.png" in result.stderr


def test_a_file_as_the_float_side_is_exit_2(packages: tuple[Path, Path], text: Path, tmp_path: Path) -> None:
    result = typed(packages[0], "--against", text, "--text", text, "--work-dir", tmp_path, "--num-samples", 1)
    assert result.exit_code == 2
    assert "expected a package or checkpoint folder, found a file" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_work_folder_that_cannot_be_is_refused_before_the_package_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = typed("no package", "--against", "no checkpoint", "--work-dir", tmp_path / "file" / "below")
    assert result.exit_code == 2
    assert "expected a folder, found a file" in result.stderr
