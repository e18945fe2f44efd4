"""The goldens notice mistakes: a changed table, a wrong mode, a dropped adapter."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from phi4mm_export.checks.cases import Case, chain_case
from phi4mm_export.checks.goldens import Goldens, compare, golden_table
from phi4mm_export.checks.package_graphs import PackageGraphs, precisions
from phi4mm_export.spec.model import Role

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
IMAGE, AUDIO = "model.embed_tokens_extend.image_embed.", "model.embed_tokens_extend.audio_embed."
PackageOf = Callable[[str], Path]
Edit = Callable[[np.ndarray], np.ndarray]


def swap_halves(table: np.ndarray) -> np.ndarray:
    return np.roll(table, len(table) // 2, axis=0)


def swap_rows(table: np.ndarray) -> np.ndarray:
    return table[[1, 0, *range(2, len(table))]]


def nudge(table: np.ndarray) -> np.ndarray:
    return table * np.float32(1.001)


TABLES: list[tuple[str, str, Edit, str]] = [
    ("vision", f"{IMAGE}img_processor.embeddings.position_embedding.weight", swap_halves, "vision_grid"),
    ("vision", f"{IMAGE}glb_GN", nudge, "vision_grid"),
    ("speech", f"{AUDIO}encoder.relative_attention_bias_layer.bias_values.weight", swap_halves, "speech_one"),
    ("speech", f"{AUDIO}encoder.encoder_embedding.global_mean", nudge, "speech_tiny"),
    ("text", "rope.cos_short", swap_rows, "decoder_split.none"),
    ("text", "rope.cos_long", nudge, "decoder_limit1.vision"),
    ("text", "model.norm.weight", nudge, "decoder_split.none"),
    ("text", "model.layers.1.mlp.gate_up_proj.weight", swap_halves, "decoder_split.speech"),
    ("text", "model.layers.0.mlp.down_proj.lora_B.vision.weight", nudge, "decoder_split.vision"),
    ("embedding", "model.embed_tokens.weight", nudge, "embedding_text"),
]


def edited_copy(package: Path, copy: Path, graph: str, tensor: str, edit: Edit) -> Path:
    """A copy of a flat package with one float32 initializer of one graph changed in its data file."""
    shutil.copytree(package, copy)
    model = onnx.load(copy / f"phi-4-mm-{graph}.onnx", load_external_data=False)
    (stored,) = [weight for weight in model.graph.initializer if weight.name == tensor]
    place = {entry.key: entry.value for entry in stored.external_data}
    data = np.memmap(copy / place["location"], np.float32, "r+", int(place.get("offset", 0)), tuple(stored.dims))
    data[:] = edit(np.array(data))
    data.flush()
    return copy


@pytest.mark.parametrize(
    ("graph", "tensor", "edit", "case"), TABLES, ids=[row[1].rpartition("embed.")[2] for row in TABLES]
)
def test_a_changed_table_fails_its_golden(
    package_of: PackageOf, tmp_path: Path, graph: str, tensor: str, edit: Edit, case: str
) -> None:
    def chosen(one: Case) -> bool:
        return one.name == case

    package = package_of("last-logits")
    assert golden_table(package, GOLDENS, only=chosen).ok
    broken = edited_copy(package, tmp_path / "broken", graph, tensor, edit)
    assert not golden_table(broken, GOLDENS, only=chosen).ok


def test_a_wrong_projection_mode_fails_the_chain(package_of: PackageOf, goldens: Goldens) -> None:
    package = package_of("last-logits")
    request = {**goldens.inputs["both"], "audio_projection_mode": np.array([2])}
    case = chain_case("both", request, Role.VISION, steps=16)
    row = compare(case, PackageGraphs(package), goldens, precisions(package), frozenset({None, *Role}))
    assert row.verdict == "FAIL"


def test_a_dropped_adapter_fails_in_the_mode_that_needs_it(package_of: PackageOf, goldens: Goldens) -> None:
    package = package_of("no-adapter")
    graphs, formats = PackageGraphs(package), precisions(package)
    claimed = frozenset({None, *Role})
    verdicts = {
        case.name: compare(case, graphs, goldens, formats, claimed).verdict
        for case in goldens.cases
        if case.name.startswith("decoder_split")
    }
    assert verdicts == {"decoder_split.none": "pass", "decoder_split.vision": "FAIL", "decoder_split.speech": "FAIL"}
