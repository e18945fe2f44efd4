"""`phi4mm run` as it is typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.media_files import write_picture, write_sound
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.pipeline.export import export


@pytest.fixture(scope="module")
def package(tiny_checkpoint: Path, built_once: object) -> Path:
    return built_once("package-gated", lambda folder: export(tiny_checkpoint, folder))  # type: ignore[operator]


def typed(*arguments: object, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments)], input=text)


def test_the_answer_streams_to_stdout_and_nothing_else_does(package: Path) -> None:
    result = typed(package, "--prompt", "Hi", "--max-new-tokens", 5)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert len(result.stdout.split()) == 5
    assert result.stdout.endswith("\n")


def test_verbose_says_the_speed_on_stderr(package: Path) -> None:
    result = typed(package, "-p", "Hi", "--max-new-tokens", 5, "-v", "--ep", "cpu", "--max-length", 100)
    assert "5 new tokens at " in result.stderr
    assert "tokens/s" in result.stderr
    assert "finished by length" in result.stderr


def test_json_gives_one_document_with_every_figure(package: Path, tmp_path: Path) -> None:
    image, audio = write_picture(tmp_path), write_sound(tmp_path)
    result = typed(package, "-p", "Hi", "--image", image, "--audio", audio, "--max-new-tokens", 3, "--json")
    document = json.loads(result.stdout)
    assert list(document) == [
        "text",
        "token_ids",
        "prompt",
        "prompt_tokens",
        "finish_reason",
        "device",
        "load_seconds",
        "prompt_seconds",
        "decode_seconds",
        "tokens_per_second",
        "restarts",
        "notes",
    ]
    assert len(document["token_ids"]) == 3
    assert document["prompt"] == "<|user|><|image_1|><|audio_1|>Hi<|end|><|assistant|>"


def test_the_prompt_comes_from_a_file_or_from_standard_input(package: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\nau lait\r\n")
    options = ("--max-new-tokens", 1, "--json", "--raw")
    from_file = typed(package, "-p", f"@{tmp_path / 'prompt.txt'}", *options)
    from_stdin = typed(package, "-p", "-", *options, text="café\nau lait\n".encode())
    assert json.loads(from_file.stdout)["prompt"] == json.loads(from_stdin.stdout)["prompt"] == "café\nau lait"


def test_a_system_text_reaches_the_prompt(package: Path) -> None:
    document = json.loads(typed(package, "-p", "Hi", "--system", "Be brief.", "--max-new-tokens", 1, "--json").stdout)
    assert document["prompt"] == "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-p", "@gone.txt"), "gone.txt: the prompt file cannot be read"),
        (("-p", "Hi", "--image", "gone.png"), "gone.png: the file does not exist"),
        (("-p", "<|audio_1|>"), "--prompt: 0 audio files passed"),
        (("-p", "Hi", "--device", "1"), "CUDA_VISIBLE_DEVICES=1"),
        (("-p", "Hi", "--device-id", "1"), "CUDA_VISIBLE_DEVICES=1"),
        (("-p", "Hi", "--ep", "tpu"), "cpu"),
        (("-p", "Hi", "--max-new-tokens", "0"), "--max-new-tokens"),
    ],
)
def test_a_bad_request_is_exit_2_with_a_sentence(package: Path, arguments: tuple[str, ...], sentence: str) -> None:
    result = typed(package, *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_prompt_file_that_is_no_text_is_refused(package: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"\xff\xfe\x00")
    result = typed(package, "-p", f"@{tmp_path / 'prompt.txt'}")
    assert result.exit_code == 2
    assert "not UTF-8" in result.stderr


def test_a_folder_that_is_no_package_is_exit_2(tmp_path: Path) -> None:
    result = typed(tmp_path, "-p", "Hi")
    assert result.exit_code == 2
    assert "expected a package folder with genai_config.json" in result.stderr


@pytest.mark.subprocess
def test_the_installed_command_leaves_nothing_in_the_home_directory(package: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    command = [sys.executable, "-m", "phi4mm_export", "run", str(package), "-p", "Hi", "--max-new-tokens", "2"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.subprocess
def test_the_library_call_leaves_nothing_in_the_home_directory_either(package: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    program = "from phi4mm_export.pipeline.run import run; import sys; run(sys.argv[1], prompt='Hi', max_new_tokens=1)"
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program, str(package)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.subprocess
def test_the_example_asks_in_every_mode(package: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "phi4mm_ort_genai.py"
    result = subprocess.run([sys.executable, str(example), str(package)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == [
        "text",
        "image",
        "again",
        "audio",
        "both",
    ]
