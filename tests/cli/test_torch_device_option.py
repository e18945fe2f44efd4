"""`--torch-device` and the recipes' `torch_device` where they cannot be used, and torch where nobody asked for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phi4mm_export.cli.app import app
from phi4mm_export.errors import UsageError
from phi4mm_export.pipeline.build import build
from phi4mm_export.quant.settings import QuantSettings
from phi4mm_export.spec.build_recipe_read import recipe_of
from phi4mm_export.spec.contract import Component


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch fails, as where it is not installed."""
    monkeypatch.setitem(sys.modules, "torch", None)


def test_without_torch_the_option_is_refused_before_any_work(model: Path, feeds: Path, tmp_path: Path) -> None:
    options = ["quantize", str(model), "-o", str(tmp_path / "out.onnx"), "--calibration", str(feeds)]
    result = CliRunner().invoke(app, [*options, "--torch-device", "cuda"])
    assert result.exit_code == 2
    assert "--torch-device cuda: expected torch, which does this work, found that it is not" in result.stderr
    assert 'pip install "phi4mm[reference]", or leave --torch-device out' in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["feeds", "in"]


def test_without_the_option_torch_is_not_asked_for(model: Path, feeds: Path, tmp_path: Path) -> None:
    options = ["quantize", str(model), "-o", str(tmp_path / "out.onnx"), "--calibration", str(feeds)]
    result = CliRunner().invoke(app, [*options, "--json"])
    assert result.exit_code == 0, result.stderr
    assert "torch_device" not in json.loads(result.stdout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "rtn"], "--torch-device cpu: expected the method gptq"),
        (["--method", "none"], "--torch-device cpu: expected the method gptq"),
        (["--method", "k_quant", "--engine", "onnxruntime"], "--torch-device cpu: expected the method gptq"),
        (["--engine", "onnxruntime"], "--engine: onnxruntime does not heed --torch-device"),
        (["--engine", "neural-compressor"], "--engine: neural-compressor does not heed --torch-device"),
    ],
)
def test_what_would_not_use_the_device_is_refused(
    model: Path, feeds: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    given = ["quantize", str(model), "-o", str(tmp_path / "out.onnx"), "--calibration", str(feeds), *options]
    result = CliRunner().invoke(app, [*given, "--torch-device", "cpu"])
    assert result.exit_code == 2
    assert message in result.stderr


def test_exact_arithmetic_and_a_device_exclude_each_other() -> None:
    with pytest.raises(UsageError, match=r"--torch-device cuda:1: expected .*, found exact arithmetic"):
        QuantSettings(torch_device="cuda:1")
    assert QuantSettings(torch_device="cuda:1", exact=False).device_kind == "cuda"
    assert QuantSettings().device_kind is None


@pytest.mark.parametrize(("method", "message"), [("gptq", "expected torch"), ("rtn", "expected the method gptq")])
def test_a_recipe_with_a_device_that_cannot_be_used_is_refused_before_the_export(
    method: str, message: str, tmp_path: Path
) -> None:
    settings = ["quantize.vision.torch_device=cuda", f"quantize.vision.method={method}"]
    with pytest.raises(UsageError, match=f"quantize.vision.torch_device.*{message}"):
        build("int8-gptq", tmp_path / "out", model=tmp_path, calibration="builtin", set_values=settings)
    assert list(tmp_path.iterdir()) == []


def test_a_recorded_recipe_has_the_kind_of_the_device_and_is_read_again() -> None:
    recipe = recipe_of({"quantize": {"vision": {"torch_device": "cuda:1"}, "speech": {}}}, "x.toml")
    recorded = recipe.recorded()["quantize"]
    assert recorded["vision"]["torch_device"] == "cuda"
    assert "torch_device" not in recorded["speech"]
    assert recipe_of(recipe.recorded(), "phi4mm.json").quantize[Component.VISION].torch_device == "cuda"
