"""`phi4mm export` on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app

PACKAGE_FILES = {"genai_config.json", "vision_processor.json", "speech_processor.json", "tokenizer.json", "phi4mm.json"}


def _run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, words)])


def _plan(checkpoint: Path, out: Path, *options: str) -> dict[str, object]:
    """What an export with these options would be: resolved by the command, nothing written."""
    result = _run(checkpoint, "-o", out, "--dry-run", "--json", *options)
    assert result.exit_code == 0, result.stderr
    assert not out.exists()
    return dict(json.loads(result.stdout))


def _recipe(checkpoint: Path, out: Path, *options: str) -> dict[str, object]:
    return dict(_plan(checkpoint, out, *options)["recipe"])  # type: ignore[call-overload]


def test_one_command_turns_a_checkpoint_into_a_package(tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = _run(tiny_checkpoint, "--output", tmp_path / "p", "-v")
    assert result.exit_code == 0, result.stderr
    assert {path.name for path in (tmp_path / "p").iterdir()} > PACKAGE_FILES
    assert "key-value cache" in result.stdout
    assert "phi-4-mm-text.onnx.data" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"p"}


def test_quiet_says_nothing_and_json_is_one_document(tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert _run(tiny_checkpoint, "-o", tmp_path / "a", "--component", "speech", "-q").stdout == ""
    document = json.loads(_run(tiny_checkpoint, "-o", tmp_path / "b", "--component", "speech", "--json").stdout)
    assert document["bytes"] == sum(file["size"] for file in document["files"])


@pytest.mark.parametrize("command", ["export", "plan"])
def test_warnings_are_silent_with_quiet_and_in_the_document_with_json(
    tiny_checkpoint: Path, tmp_path: Path, command: str
) -> None:
    own = ["--dry-run", "-o", str(tmp_path / "p")] if command == "export" else []
    words = [command, str(tiny_checkpoint), *own, "--lora", "merged"]
    plain, quiet, document = (CliRunner().invoke(app, [*words, *more]) for more in ((), ("-q",), ("--json",)))
    assert plain.stderr.startswith("warning: speech and text prompts run with the vision adapter")
    assert quiet.stderr == document.stderr == ""
    assert "speech and text prompts" in json.loads(document.stdout)["warnings"][0]


def test_a_revision_of_a_folder_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = _run(tiny_checkpoint, "-o", tmp_path / "p", "--revision", "main")
    assert result.exit_code == 2
    assert "--revision main: expected a hub id, found a folder" in result.stderr


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ((), "precision", "int8"),
        ((), "lora", "gated"),
        ((), "layout", "flat"),
        ((), "float_type", "fp32"),
        ((), "lora_precision", "int8"),
        (("--ep", "cuda"), "float_type", "fp16"),
        (("--ep", "CUDAExecutionProvider"), "provider", "cuda"),
        (("--precision", "int4"), "block_size", 32),
        (("--precision", "int4", "--block-size", "128"), "block_size", 128),
        (("--encoder-precision", "fp16"), "encoder_precision", "fp16"),
        (("--embedding-precision", "int8"), "embedding_precision", "int8"),
        (("--lora-precision", "fp16"), "lora_precision", "fp16"),
        (("--accuracy-level", "0"), "accuracy_level", 0),
        (("--lora", "branch", "--adapter", "speech"), "adapters", ["speech"]),
        (("--lora", "merged", "--adapter", "none"), "adapters", []),
        (("--layout", "nested"), "layout", "nested"),
        (("--full-logits",), "full_logits", True),
        (("--component", "vision", "--component", "speech"), "components", ["vision", "speech"]),
    ],
)
def test_an_option_and_the_default_it_replaces(
    tiny_checkpoint: Path, tmp_path: Path, options: tuple[str, ...], key: str, value: object
) -> None:
    assert _recipe(tiny_checkpoint, tmp_path / "p", *options)[key] == value


def test_max_length_and_memory_budget_set_the_cache(tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert _plan(tiny_checkpoint, tmp_path / "p", "--max-length", "4096")["max_length"] == 4096
    plan = _plan(tiny_checkpoint, tmp_path / "p", "--memory-budget", "4MiB")
    assert plan["max_length"] == (4 << 20) // int(plan["kv_bytes_per_token"])  # type: ignore[call-overload]


def test_an_adapter_folder_replaces_the_built_in_adapter_of_its_role(tiny_native: Path, tmp_path: Path) -> None:
    swapped = tmp_path / "p"
    options = ("--lora", "merged", "--precision", "fp32", "--component", "decoder", "-q")
    assert _run(tiny_native, "-o", tmp_path / "built-in", *options).exit_code == 0
    result = _run(tiny_native, "-o", swapped, *options, "--adapter-path", f"vision={tiny_native / 'speech-lora'}")
    assert result.exit_code == 0, result.stderr
    data = "phi-4-mm-text.onnx.data"
    assert (swapped / data).read_bytes() != (tmp_path / "built-in" / data).read_bytes()
    assert _run(tiny_native, "-o", tmp_path / "speech", *options, "--adapter", "speech").exit_code == 0
    assert (swapped / data).read_bytes() == (tmp_path / "speech" / data).read_bytes()


def test_a_bare_adapter_folder_takes_the_role_of_the_adapter_option(tiny_native: Path, tmp_path: Path) -> None:
    folder = str(tiny_native / "vision-lora")
    assert _recipe(tiny_native, tmp_path / "p", "--lora", "merged", "--adapter", "speech", "--adapter-path", folder)[
        "adapters"
    ] == ["speech"]


def test_configs_follow_release_arena_and_the_audio_limit(tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = _run(tiny_checkpoint, "-o", tmp_path / "p", "--release-arena", "--original-audio-limit", "-q")
    assert result.exit_code == 0, result.stderr
    config = json.loads((tmp_path / "p" / "genai_config.json").read_text())
    assert config["model"]["vision"]["run_options"] == {"memory.enable_memory_arena_shrinkage": "cpu:0"}
    assert "max_samples" not in (tmp_path / "p" / "speech_processor.json").read_text()


def test_jobs_change_no_byte(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for jobs in ("1", "3"):
        assert (
            _run(tiny_checkpoint, "-o", tmp_path / jobs, "--component", "decoder", "--jobs", jobs, "-q").exit_code == 0
        )
    name = "phi-4-mm-text.onnx.data"
    assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--ep", "gpu"), 2, "CUDAExecutionProvider"),
        (("--block-size", "48"), 2, "--block-size"),
        (("--precision", "int5"), 2, "int5"),
        (("--adapter-path", "vision=nowhere"), 2, "nowhere"),
        (("--lora", "merged", "--adapter", "none", "--adapter-path", "."), 2, "role"),
        (("--max-length", "131073"), 2, "131072"),
        (("--memory-budget", "lots"), 2, "lots"),
        (("--memory-budget", "1KiB", "--max-length", "4096"), 6, "4,096"),
        (("--from-package", "nowhere"), 2, "genai_config"),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence_and_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, options: tuple[str, ...], code: int, words: str
) -> None:
    result = _run(tiny_checkpoint, "-o", tmp_path / "p", *options)
    assert result.exit_code == code, result.stderr
    assert words in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr
    assert not any(tmp_path.iterdir())


def test_an_existing_package_is_replaced_only_with_overwrite(tiny_checkpoint: Path, tmp_path: Path) -> None:
    first = _run(tiny_checkpoint, "-o", tmp_path / "p", "--component", "speech", "-q")
    again = _run(tiny_checkpoint, "-o", tmp_path / "p", "--component", "speech", "-q")
    forced = _run(tiny_checkpoint, "-o", tmp_path / "p", "--component", "vision", "-q", "--force")
    assert (first.exit_code, again.exit_code, forced.exit_code) == (0, 2, 0)
    assert (tmp_path / "p" / "phi-4-mm-vision.onnx").exists()
    assert not (tmp_path / "p" / "phi-4-mm-speech.onnx").exists()


def test_errors_are_one_json_object_under_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["phi4mm", "export", "--json"])
    result = _run(tmp_path / "nothing", "-o", tmp_path / "p", "--json")
    assert json.loads(result.stderr)["exit_code"] == result.exit_code == 2


@pytest.mark.subprocess
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_with_130_one_line_and_nothing_left(
    tiny_checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "phi4mm_export", "export", str(tiny_checkpoint), "-o", str(tmp_path / "p")]
    process = subprocess.Popen([*command, "--precision", "int4"], stderr=subprocess.PIPE, text=True)
    staging = tmp_path / ".p.staging"
    while not staging.exists() and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.count("\n") == 1
    assert not any(tmp_path.iterdir())
