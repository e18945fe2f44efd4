"""`phi4mm synth` as it is typed."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.errors import UsageError
from phi4mm_export.pipeline.synth import synth
from phi4mm_export.spec.model import Layout

DiskUsage = namedtuple("DiskUsage", "total used free")


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["synth", *map(str, arguments)])


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_writes_a_checkpoint_and_says_what_in_one_line(tmp_path: Path) -> None:
    result = _run(tmp_path / "ckpt")

    nbytes = sum(path.stat().st_size for path in (tmp_path / "ckpt").iterdir())
    assert result.exit_code == 0
    assert result.stdout == (
        f"{tmp_path / 'ckpt'}: 211 tensors, {nbytes:,} bytes in 9 files "
        "(tiny, original layout, seed 1, plain weights)\n"
    )
    assert _names(tmp_path) == ["ckpt"]


def test_every_option_reaches_the_files_and_the_json_report(tmp_path: Path) -> None:
    result = _run(
        tmp_path / "ckpt",
        *("--size", "oracle", "--layout", "native", "--seed", 7, "--weights", "heavy"),
        *("--set", "num_hidden_layers=1", "--set", "shards=1", "--json"),
    )

    report = json.loads(result.stdout)
    assert report["files"] == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "special_tokens_map.json",
        "speech-lora/adapter_config.json",
        "speech-lora/adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "vision-lora/adapter_config.json",
        "vision-lora/adapter_model.safetensors",
    ]
    assert [report[key] for key in ("size", "layout", "seed", "weights")] == ["oracle", "native", 7, "heavy"]
    assert report["settings"]["hidden_size"] == 256
    config = json.loads((tmp_path / "ckpt" / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("phi4_multimodal", 1)
    sizes = [path.stat().st_size for path in (tmp_path / "ckpt").rglob("*") if path.is_file()]
    assert report["bytes"] == sum(sizes) > report["tensor_bytes"] > 200064 * 256 * 2


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    result = _run(tmp_path / "ckpt", "--quiet")

    assert (result.exit_code, result.output) == (0, "")


def test_an_existing_folder_is_refused_without_overwrite(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()

    result = _run(tmp_path / "ckpt")

    assert result.exit_code == 2
    assert "exists" in result.stderr
    assert "--overwrite" in result.stderr


def test_overwrite_replaces_a_checkpoint_and_its_stale_files(tiny_native: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_native, tmp_path / "ckpt")

    result = _run(tmp_path / "ckpt", "--overwrite")

    assert result.exit_code == 0
    assert json.loads((tmp_path / "ckpt" / "config.json").read_text())["model_type"] == "phi4mm"
    assert not (tmp_path / "ckpt" / "vision-lora").exists()
    assert _names(tmp_path) == ["ckpt"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("notes.txt", "mine"), ("config.json", '{"model_type": "llama"}'), ("config.json", "[1]"), ("config.json", "{")],
)
def test_a_folder_that_is_no_checkpoint_is_never_replaced(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text(text)

    result = _run(tmp_path / "mine", "--overwrite")

    assert result.exit_code == 2
    assert (tmp_path / "mine" / name).read_text() == text
    assert _names(tmp_path) == ["mine"]


def test_a_misspelt_setting_exits_2_with_the_nearest_name_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["phi4mm", "synth", "--json"])

    result = _run(tmp_path / "ckpt", "--set", "hiden_size=64", "--json")

    assert result.exit_code == 2
    assert json.loads(result.stderr)["fix"].startswith("the nearest name is hidden_size;")
    assert _names(tmp_path) == []


def test_a_disk_without_room_exits_6_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(10**12, 10**12 - 1000, 1000))

    result = _run(tmp_path / "ckpt", "--size", "full")

    assert result.exit_code == 6
    assert "needs 11,165,697,984 bytes, the disk has 1,000 free" in result.stderr
    assert _names(tmp_path) == []


def test_a_missing_parent_folder_exits_6(tmp_path: Path) -> None:
    result = _run(tmp_path / "nowhere" / "ckpt")

    assert result.exit_code == 6
    assert "nowhere" in result.stderr


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synth(tmp_path / "ckpt", progress=interrupt)

    assert _names(tmp_path) == []


def test_progress_counts_every_byte_of_the_tensors_once(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    report = synth(tmp_path / "ckpt", layout=Layout.NATIVE, progress=lambda done, total: calls.append((done, total)))

    assert calls[-1] == (report.tensor_nbytes, report.tensor_nbytes)
    assert calls == sorted(calls)


def test_an_error_keeps_the_checkpoint_that_was_to_be_replaced(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "ckpt")

    with pytest.raises(UsageError):
        synth(tmp_path / "ckpt", settings=["shards=0"], overwrite=True)

    assert _names(tmp_path / "ckpt") == _names(tiny_checkpoint)


def test_help_shows_an_example() -> None:
    assert "phi4mm synth tiny-checkpoint --layout native" in _run("--help").stdout
