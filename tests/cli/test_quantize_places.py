"""Folders that `phi4mm quantize` is given beside the output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.plain_models import write_model
from typer.testing import CliRunner

from phi4mm_export.cli.app import app
from phi4mm_export.quant.statistics import VERSION


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
    result = CliRunner().invoke(app, ["quantize", "model.onnx", *options, *words])
    assert result.exit_code == 2, result.stderr
    assert sentence in result.stderr
    assert sorted(tmp_path.rglob("*")) == before
