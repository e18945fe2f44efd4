"""Folders that `phi4mm quantize` is given beside the output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.plain_models import write_model
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.pipeline.quantize import quantize
from phi4mm_export.quant.statistics import VERSION


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--statistics", "nowhere"], "statistics.json: the file is missing"),
        (["--statistics", "other"], "the statistics are those of another graph or another choice of layers"),
        (["--statistics", "other", "--save-statistics", "new"], "so there are none to keep"),
        (["--save-statistics", "other"], "the folder holds statistics already"),
        (["--save-statistics", "file"], "expected a folder, found a file"),
        (["--save-statistics", "file/below"], "expected a folder, found a file"),
        (["--save-statistics", "new", "--method", "rtn"], "only gptq by the native engine takes or makes Hessians"),
        (["--statistics", "other", "--engine", "onnxruntime"], "found gptq by onnxruntime"),
        (["--work-dir", "file"], "--work-dir file: expected a folder, found a file"),
    ],
)
def test_folders_that_cannot_serve_are_refused_before_a_sample_is_read(
    tmp_path: Path, words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model.onnx")
    (tmp_path / "other").mkdir()
    index = {"version": VERSION, "samples": [], "stages": [["another layer"]]}
    (tmp_path / "other" / "statistics.json").write_text(json.dumps(index), encoding="utf-8")
    (tmp_path / "file").write_text("x", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    options = ["-o", "out.onnx", "--calibration", "no such samples"]
    result = typed("model.onnx", *options, *words)
    assert result.exit_code == 2, result.stderr
    assert sentence in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_killed_run_left_is_used_by_the_next_and_removed(model: Path, feeds: Path, tmp_path: Path) -> None:
    first = quantize(model, tmp_path / "first.onnx", calibration=feeds, work_dir=tmp_path / "kept")
    left = tmp_path / ".second.onnx.staging" / "0123456789abcdef" / "kept" / "quantize"
    left.parent.mkdir(parents=True)
    (tmp_path / "kept" / "phi4mm-work").rename(left)
    (left / "samples" / "half").write_bytes(b"of a sample")
    second = quantize(model, tmp_path / "second.onnx", calibration=feeds)
    assert (first.reused, second.reused) == (0, 2)
    assert (tmp_path / "first.onnx.data").read_bytes() == (tmp_path / "second.onnx.data").read_bytes()
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_kept_statistics_give_the_same_bytes_without_samples(model: Path, feeds: Path, tmp_path: Path) -> None:
    kept = tmp_path / "statistics"
    first = typed(model, "-o", tmp_path / "a.onnx", "--calibration", feeds, "--save-statistics", kept)
    again = typed(model, "-o", tmp_path / "b.onnx", "--statistics", kept)
    judged = typed(model, "-o", tmp_path / "c.onnx", "--statistics", kept, "--calibration", feeds)
    assert (first.exit_code, again.exit_code, judged.exit_code) == (0, 0, 0), again.stderr + judged.stderr
    assert (tmp_path / "a.onnx.data").read_bytes() == (tmp_path / "b.onnx.data").read_bytes()
    assert "was not judged" in again.stderr
    assert "y on 9 validation samples" in judged.stdout


def test_a_work_folder_keeps_finished_layers_for_the_next_run(model: Path, feeds: Path, tmp_path: Path) -> None:
    (tmp_path / "work" / "samples").mkdir(parents=True)
    (tmp_path / "work" / "samples" / "mine.txt").write_text("not yours", encoding="utf-8")
    first = quantize(model, tmp_path / "a.onnx", calibration=feeds, work_dir=tmp_path / "work")
    again = quantize(model, tmp_path / "b.onnx", calibration=feeds, work_dir=tmp_path / "work")
    assert (first.reused, again.reused) == (0, 2)
    assert first.files[1].sha256 == again.files[1].sha256
    assert names(tmp_path / "work" / "samples") == ["mine.txt"]
