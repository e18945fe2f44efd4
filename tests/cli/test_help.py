"""`--help` of every command: what to fill in stands in capitals, examples can be copied, nothing is left raw."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from phi4mm_export.cli.app import COMMANDS, app

FILLED_IN = re.compile(r"(\[?[A-Z][A-Z|.a-z\d]*\]?)( \[?[A-Z][A-Z|]*\]?)*")
RAW_TYPES = {"str", "int", "float", "path", "Path", "bool", "range"}


def _help(command: str) -> str:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_are_named_in_capitals(command: str) -> None:
    usage = _help(command).splitlines()[0]
    assert FILLED_IN.fullmatch(usage.partition("[OPTIONS] ")[2]), usage


@pytest.mark.parametrize("command", COMMANDS)
def test_no_type_of_the_program_shows(command: str) -> None:
    text = _help(command)
    assert not set("<>{}") & set(text)
    options = [line.split() for line in text.splitlines() if line.lstrip().startswith("-")]
    assert not [words for words in options if RAW_TYPES & set(words[1:3])]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_has_an_example_on_one_line(command: str) -> None:
    examples = [line for line in _help(command).splitlines() if line.startswith("  Example: ")]
    assert examples
    assert all(line.startswith(f"  Example: phi4mm {command} ") for line in examples)


def test_export_shows_how_to_name_an_adapter_folder() -> None:
    assert "--adapter-path vision=" in _help("export")


def test_inspect_and_diff_say_that_they_take_onnx_files() -> None:
    assert "an ONNX file" in _help("inspect")
    every = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert "inspect Say what a checkpoint, a package or an ONNX file is." in every
    assert "two packages or ONNX files" in every


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("exprt",), "error: No such command 'exprt'; did you mean export?\n"),
        (("export",), "error: Missing argument 'CHECKPOINT'; see phi4mm export --help\n"),
        (("synth", "x", "--bogus"), "error: No such option: --bogus; see phi4mm synth --help\n"),
        (("synth", "x", "--seed", "one"), "error: Invalid value for '--seed': "),
    ],
)
def test_a_wrong_word_is_one_sentence_with_exit_code_2(words: tuple[str, ...], sentence: str) -> None:
    result = CliRunner().invoke(app, words, prog_name="phi4mm")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


@pytest.mark.subprocess
@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
@pytest.mark.parametrize("words", [["synth", "--help"], ["build", "--list"]])
def test_a_reader_that_goes_away_is_not_complained_about(words: list[str]) -> None:
    command = [sys.executable, "-m", "phi4mm_export", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 6


def test_a_wrong_word_is_json_under_json(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["synth", "--json", "--bogus"]
    monkeypatch.setattr(sys, "argv", ["phi4mm", *words])
    result = CliRunner().invoke(app, words)
    assert result.exit_code == json.loads(result.stderr)["exit_code"] == 2
