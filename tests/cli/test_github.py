"""`--format github`: annotations with lines and escapes, the summary, and what happens beyond GitHub's limits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.packages import build_package, edit_config
from support.sealed import sealed_package
from typer.testing import CliRunner, Result

from phi4mm_export.cli import render
from phi4mm_export.cli.app import app
from phi4mm_export.cli.github import (
    MOST_ROWS,
    SHOWN,
    Level,
    Outcome,
    Remark,
    annotation_lines,
    escape_data,
    escape_property,
    summary_table,
)
from phi4mm_export.errors import PackageError

COMMAND = re.compile(r"::(error|warning|notice) ([^:\n]+)::(.+)")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace as a GitHub runner has one, with an empty summary."""
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    return tmp_path


def _run(command: str, *arguments: object) -> Result:
    return CliRunner().invoke(app, [command, *map(str, arguments), "--format", "github"])


def _commands(result: Result) -> list[tuple[str, dict[str, str], str]]:
    """Level, properties and message of every line, as the runner reads them."""
    found = []
    for line in result.stdout.splitlines():
        match = COMMAND.fullmatch(line)
        assert match, line
        pairs = (pair.partition("=") for pair in match[2].split(","))
        found.append((match[1], {name: _plain(value) for name, _, value in pairs}, _plain(match[3])))
    return found


def _plain(text: str) -> str:
    for code, letter in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, letter)
    return text


def test_a_finding_names_file_line_code_and_how_to_go_on(workspace: Path) -> None:
    package = build_package(workspace / "out" / "package")
    edit_config(package, lambda c: c["search"].update(max_length=131073))
    result = _run("validate", package)
    level, properties, message = _commands(result)[0]
    assert result.exit_code == 4
    assert (level, properties["file"], properties["title"]) == (
        "error", "out/package/genai_config.json", "phi4mm validate: C320",
    )  # fmt: skip
    line = (package / "genai_config.json").read_text("utf-8").splitlines()[int(properties["line"]) - 1]
    assert '"max_length": 131073' in line
    assert "genai_config.json: search.max_length" in message
    assert "expected 1 to 131072, found 131073" in message


def test_broken_json_is_annotated_where_it_breaks(workspace: Path) -> None:
    package = build_package(workspace / "package")
    (package / "genai_config.json").write_text('{\n"model": {},\n"search" 1}', "utf-8")
    lines = [
        properties.get("line")
        for _, properties, message in _commands(_run("validate", package))
        if "not valid" in message
    ]
    assert lines == ["3"]


def test_a_sound_package_has_one_notice_with_the_verdict_and_a_summary(workspace: Path) -> None:
    package = build_package(workspace / "package")
    result = _run("validate", package)
    assert result.exit_code == 0
    assert [(level, message) for level, _, message in _commands(result)] == [
        ("notice", "package: ok: 0 errors, 0 warnings, 0 notes")
    ]
    summary = (workspace / "summary.md").read_text("utf-8")
    assert summary.startswith("### phi4mm validate package\n")
    assert "| contract official | 24 of 24 tensors match |" in summary


def test_the_summary_is_appended_to_what_is_there(workspace: Path) -> None:
    (workspace / "summary.md").write_text("before\n", "utf-8")
    _run("validate", build_package(workspace / "package"))
    assert (workspace / "summary.md").read_text("utf-8").startswith("before\n### ")


def test_without_a_summary_file_nothing_is_written(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    _run("validate", build_package(workspace / "package"))
    assert sorted(path.name for path in workspace.iterdir()) == ["package"]


def test_a_package_outside_the_workspace_is_annotated_without_a_file(
    workspace: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    package = build_package(tmp_path_factory.mktemp("elsewhere") / "package")
    edit_config(package, lambda c: c["search"].update(max_length=131073))
    result = _run("validate", package)
    assert "file" not in _commands(result)[0][1]
    assert str(package.parent) not in result.stdout + (workspace / "summary.md").read_text("utf-8")


def test_verify_annotates_every_fault_by_file(workspace: Path) -> None:
    package = sealed_package(workspace / "package")
    (package / "settings.json").write_text("{}", "utf-8")
    (package / "template.jinja").unlink()
    result = _run("verify", package, "--write-lock", workspace / "phi4mm.lock")
    assert result.exit_code == 4
    titles = {properties["title"]: properties.get("file") for _, properties, _ in _commands(result)}
    assert titles["phi4mm verify: changed"] == "package/settings.json"
    assert titles["phi4mm verify: missing"] is None
    assert _commands(result)[-1][2].startswith("package: not ok, 2 faults")


def test_doctor_annotates_causes(workspace: Path) -> None:
    package = build_package(workspace / "package")
    edit_config(package, lambda c: c["search"].update(max_length=131073))
    result = _run("doctor", package)
    assert result.exit_code == 4
    assert any(properties["title"] == "phi4mm doctor: C320" for _, properties, _ in _commands(result))


def test_json_and_github_together_are_a_usage_error(workspace: Path) -> None:
    package = build_package(workspace / "package")
    for command in ("validate", "verify", "doctor"):
        result = _run(command, package, "--json")
        assert result.exit_code == 2
        assert "contradict" in result.output


def test_format_json_is_what_json_prints(workspace: Path) -> None:
    package = build_package(workspace / "package")
    invoke = CliRunner().invoke
    plain = invoke(app, ["validate", str(package), "--json"]).stdout
    assert invoke(app, ["validate", str(package), "--format", "json"]).stdout == plain
    assert json.loads(plain)["ok"] is True


@pytest.mark.subprocess
@pytest.mark.parametrize("words", [("--format", "github"), ("--format=github",)])
def test_an_error_that_ends_the_command_is_an_annotation_too(tmp_path: Path, words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "phi4mm_export", "verify", str(tmp_path / "nothing"), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("::error title=phi4mm::")


def test_an_error_names_no_annotation_without_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    render.error(PackageError("wrong", where="x"))
    assert capsys.readouterr().err == "error: x: wrong\n"


# ------------------------------------------------------------------ escapes


def test_messages_and_properties_are_escaped_as_github_says() -> None:
    assert escape_data("50%\r\na: b, c") == "50%25%0D%0Aa: b, c"
    assert escape_property("50%\r\na: b, c") == "50%25%0D%0Aa%3A b%2C c"
    assert escape_data("%0A") == "%250A"
    assert escape_data("\x1b[31m\0") == "?[31m?"


HOSTILE = "x\n::error::forged\r::add-mask::y%0A::stop-commands::t"


def _outcome(package: Path, *remarks: Remark) -> Outcome:
    return Outcome("validate", package, False, "not ok", remarks)


@pytest.mark.parametrize("field", ["code", "where", "what", "fix"])
def test_no_field_can_start_a_command_of_its_own(tmp_path: Path, field: str) -> None:
    values = {"code": "C1", "where": "a.json", "what": "wrong", "fix": "", field: HOSTILE}
    lines = annotation_lines(_outcome(tmp_path, Remark(Level.ERROR, **values)), {})
    assert len(lines) == 2
    assert all(len(line.splitlines()) == 1 and COMMAND.fullmatch(line) for line in lines)
    assert HOSTILE in _plain(lines[0])


def test_a_table_cell_cannot_end_the_row_or_become_markup(tmp_path: Path) -> None:
    text = 'a | b\n| --- | <img src="https://example.invalid"> ![x](https://example.invalid) `c` **d** @somebody #1'
    table = summary_table(_outcome(tmp_path, Remark(Level.ERROR, "C1", "a.json", text)))
    row = next(line for line in table.splitlines() if line.startswith("| error"))
    assert row.count("|") == 6
    assert not set("<>`*[]@\\") & set(row)


def test_links_and_paths_that_leave_the_package_are_not_read(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (tmp_path / "secret.json").write_text('{"key": 1}', "utf-8")
    (package / "link.json").symlink_to(tmp_path / "secret.json")
    for name in ("link.json", "../secret.json", str(tmp_path / "secret.json"), "nothing.json", ""):
        lines = annotation_lines(
            _outcome(package, Remark(Level.ERROR, "C1", f"{name}: key", "x")), {"GITHUB_WORKSPACE": str(tmp_path)}
        )
        assert "file=" not in lines[0]


# ------------------------------------------------------------------ limits


def _many(count: int, level: Level = Level.ERROR) -> list[Remark]:
    return [Remark(level, f"C{number % 3}", "a.json", f"remark {number}") for number in range(count)]


@pytest.mark.parametrize("level", [Level.ERROR, Level.WARNING])
def test_ten_are_shown_as_they_are_and_of_more_the_tenth_counts_the_rest(tmp_path: Path, level: Level) -> None:
    lines = annotation_lines(_outcome(tmp_path, *_many(SHOWN, level)), {})
    assert "remark 9" in lines[SHOWN - 1]
    lines = annotation_lines(_outcome(tmp_path, *_many(25, level)), {})
    assert lines[SHOWN - 1].endswith(
        f"::16 more of kind {level}: C0 x 6, C1 x 5, C2 x 5; the log and the summary list them"
    )
    assert sum("remark " in line for line in lines) == 25


def test_the_verdict_is_always_among_the_notices_that_github_shows(tmp_path: Path) -> None:
    lines = annotation_lines(_outcome(tmp_path, *_many(SHOWN - 1, Level.NOTICE)), {})
    assert len(lines) == SHOWN
    assert lines[-1].endswith("not ok")


def test_errors_come_before_warnings_and_notices(tmp_path: Path) -> None:
    remarks = [Remark(level, "C1", "a", "x") for level in reversed(Level)]
    words = [line.split(" ")[0] for line in annotation_lines(_outcome(tmp_path, *remarks), {})]
    assert words == ["::error", "::warning", "::notice", "::notice"]


def test_long_messages_and_long_tables_stay_below_githubs_limits(tmp_path: Path) -> None:
    long = Remark(Level.ERROR, "C1", "a.json", "x" * 10_000)
    assert len(annotation_lines(_outcome(tmp_path, long), {})[0]) < 4_100
    table = summary_table(_outcome(tmp_path, *_many(MOST_ROWS + 5)))
    assert table.count("| error |") == MOST_ROWS
    assert "and 5 more" in table
