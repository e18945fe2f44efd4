"""`phi4mm validate --reference`: packages against PyTorch from the checkpoint, every graph and mode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from phi4mm_export.checks.cases import InputMode
from phi4mm_export.checks.parity import parity_findings, parity_table
from phi4mm_export.checks.report import Severity
from phi4mm_export.cli.app import app
from phi4mm_export.pipeline.export import export
from phi4mm_export.pipeline.synth import synth
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe

pytest.importorskip("torch", reason='needs torch: pip install "phi4mm[reference]"')
pytestmark = pytest.mark.reference

BuildOnce = Callable[[str, Callable[[Path], object]], Path]
SHORT_CONTEXT = ["original_max_position_embeddings=1024"]


@pytest.fixture(scope="module")
def checkpoint(built_once: BuildOnce) -> Path:
    """Another model than the goldens': other seed, ranks, depth, untied head, and a nearer LongRoPE switch."""
    settings = [*SHORT_CONTEXT, "num_hidden_layers=1", "vision_lora_r=4", "tie_word_embeddings=false", "dtype=float32"]
    return built_once("reference-checkpoint", lambda folder: synth(folder, seed=5, settings=settings))


@pytest.fixture(scope="module")
def package(built_once: BuildOnce, checkpoint: Path) -> Path:
    recipe = Recipe.resolve(precision=Precision.FP32)
    return built_once("reference-gated", lambda folder: export(checkpoint, folder, recipe=recipe))


@pytest.fixture(scope="module")
def merged(built_once: BuildOnce, checkpoint: Path) -> Path:
    recipe = Recipe.resolve(precision=Precision.FP32, lora=LoraForm.MERGED)
    return built_once("reference-merged", lambda folder: export(checkpoint, folder, recipe=recipe))


def test_a_gated_package_agrees_in_every_mode_on_every_graph(package: Path, checkpoint: Path) -> None:
    table = parity_table(package, checkpoint)
    assert [line for line in table.lines()[1:] if "pass" not in line] == []
    for graph in ("embedding", "decoder", "chain"):
        assert {row.mode for row in table.rows if row.graph == graph} == set(InputMode)
    assert {"vision", "speech"} < {row.graph for row in table.rows}
    assert all(row.clear_tokens >= 8 for row in table.rows if "steps" in row.case)


def test_a_merged_package_says_which_modes_it_cannot_run(merged: Path, checkpoint: Path) -> None:
    findings = parity_findings(merged, checkpoint)
    warned = {item.where.partition(":")[0] for item in findings if item.severity is Severity.WARNING}
    assert warned == {f"{graph}, {mode}" for graph in ("decoder", "chain") for mode in ("text", "audio")}
    assert not [item for item in findings if item.severity is Severity.ERROR]


def test_validate_with_the_right_reference_exits_0_and_shows_figures(package: Path, checkpoint: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(package), "--reference", str(checkpoint), "--json"])
    assert result.exit_code == 0, result.output
    figures = [item for item in json.loads(result.stdout)["findings"] if item["code"] == "C703"]
    assert len(figures) > 20


def test_validate_with_another_model_exits_4_and_names_graph_and_mode(package: Path, tiny_checkpoint: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(package), "--reference", str(tiny_checkpoint)])
    assert result.exit_code == 4
    assert "C701" in result.stdout


def test_nan_in_one_graph_fails_that_graph_alone(package: Path, checkpoint: Path, tmp_path: Path) -> None:
    import shutil

    import onnx

    broken = tmp_path / "broken"
    shutil.copytree(package, broken)
    graph = onnx.load(broken / "phi-4-mm-vision.onnx", load_external_data=False).graph
    (bias,) = [w for w in graph.initializer if w.name.endswith("img_projection.2.bias")]
    offset = next(int(entry.value) for entry in bias.external_data if entry.key == "offset")
    data = np.memmap(broken / "phi-4-mm-vision.onnx.data", np.float32, "r+", offset, tuple(bias.dims))
    data[0] = np.nan
    data.flush()
    table = parity_table(broken, checkpoint)
    failed = {row.graph for row in table.rows if not row.ok}
    assert failed == {"vision", "chain"}
    assert all("NaN" in row.errors.fault for row in table.rows if not row.ok and row.graph == "vision")
