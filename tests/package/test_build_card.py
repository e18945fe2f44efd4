"""The model card of a built package, and the gates whose figures it tells."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.builds import DESCRIBED, card_of, stage_of

from phi4mm_export.checks.evaluation import Evaluation
from phi4mm_export.errors import QualityError
from phi4mm_export.package.manifest_read import read_manifest
from phi4mm_export.package.source_card import SourceCard, front_matter, read_source_card
from phi4mm_export.pipeline import build_measure
from phi4mm_export.pipeline.build_card import card_text
from phi4mm_export.pipeline.build_measure import Measured, evaluation_figures, measure
from phi4mm_export.pipeline.build_stages import Stages
from phi4mm_export.pipeline.evaluate import evaluate
from phi4mm_export.spec.build_recipe import EvaluateChoices
from phi4mm_export.spec.build_recipe_read import read_recipe


@pytest.fixture(scope="session")
def evaluated(built: Path, gated_package: Path) -> Evaluation:
    """A package against another one of the same model, with a gate that it misses and one that it passes."""
    return evaluate(
        built, gated_package, num_samples=1, max_new_tokens=1, max_text_tokens=2, min_cosine=0.9, max_rel_l2=1e-9
    )


def test_the_card_tells_every_figure_of_an_evaluation_and_the_gates(built: Path, evaluated: Evaluation) -> None:
    recipe = read_recipe("int8-gated").resolved()
    measured = Measured({}, evaluation_figures(evaluated))

    text = card_text(built, read_manifest(built), recipe, SourceCard(), measured)

    rows = re.findall(r"^\| (\w+) \| \d+ \| [\d.e-]+ \| [\d.e-]+ \| [\d.e-]+ ", text, re.MULTILINE)
    assert rows == [each.component for each in evaluated.components]
    assert "Gates: min_cosine at least 0.9, found " in text
    assert "did not compare" not in text
    assert "elsewhere `README.md` may differ" in text


def test_the_card_of_a_calibrated_package_tells_what_its_gate_saw(calibrated: Path) -> None:
    card = card_of(calibrated)

    assert re.search(r"^\| vision \| 1 held-out samples, `image_features` \| 0\.\d+ ", card, re.MULTILINE)
    assert "This build did not compare the whole package with its float form" in card
    assert "`phi-4-mm-vision.onnx.data` may differ" in card


def test_a_missed_gate_is_exit_code_5_and_names_figure_and_threshold(
    built: Path, evaluated: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_measure, "evaluate", lambda *_, **__: evaluated)
    stages, choices = Stages(tmp_path), EvaluateChoices(against=str(built), max_rel_l2=1e-9)

    with pytest.raises(QualityError, match="max_rel_l2: expected at most 1e-09, found"):
        measure(choices, stage_of(built), stages, model=built, adapter_paths={}, head=None, on_stage=print)


def test_the_card_has_front_matter_for_the_hub_and_says_that_the_licence_is_unknown(built: Path) -> None:
    said = front_matter((built / "README.md").read_bytes())

    assert (said["license"], said["base_model_relation"]) == ("unknown", "quantized")
    assert (said["library_name"], said["pipeline_tag"]) == ("onnxruntime-genai", "image-text-to-text")
    assert "**The licence is unknown**" in card_of(built)


@pytest.mark.parametrize(
    "text",
    [
        "## Run it",
        "## Measured errors",
        "This build did not compare the package with its float form",
        "phi-4-mm-text.onnx.data",
        "Device 0 only",
        "onnxruntime-genai#1545",
        "`nvidia_awq` cannot work",
        "both in one process",
        "phi4mm rebuild README.md --model CHECKPOINT -o rebuilt",
        "With the same versions it gives them on any machine.",
    ],
)
def test_the_card_tells_what_a_user_has_to_know(built: Path, text: str) -> None:
    assert text in card_of(built)


def test_the_table_of_sizes_in_the_card_is_that_of_the_files(built: Path) -> None:
    rows = dict(re.findall(r"^\| `([^`]+)` \| ([\d,]+) \|$", card_of(built), re.MULTILINE))

    assert rows == {path.name: f"{path.stat().st_size:,}" for path in built.iterdir() if path.name not in DESCRIBED}


def test_licence_name_and_task_are_inherited_from_the_card_of_the_source(built: Path, tmp_path: Path) -> None:
    head = "license: mit\nlicense_link: https://example.org/LICENSE\npipeline_tag: any-to-any\ntags:\n- x"
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n# Card\n", encoding="utf-8")
    recipe = read_recipe("int8-gated", ["card.base_model=owner/name"]).resolved()

    text = card_text(built, read_manifest(built), recipe, read_source_card(tmp_path), Measured())

    said = front_matter(text.encode())
    assert (said["license"], said["license_link"]) == ("mit", "https://example.org/LICENSE")
    assert (said["base_model"], said["pipeline_tag"]) == ("owner/name", "any-to-any")
    assert "The licence is that of the source's own card." in text


def test_the_snippet_in_the_card_runs(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime_genai", reason="needs the extra cpu")
    from PIL import Image

    Image.new("RGB", (40, 30), "firebrick").save(tmp_path / "page.png")
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", card_of(built), re.DOTALL)[0]
    shutil.copytree(built, "on-cpu")
    config = json.loads(Path("on-cpu/genai_config.json").read_text(encoding="utf-8"))
    for section in config["model"].values():
        if isinstance(section, dict):
            section.get("session_options", {}).pop("provider_options", None)
            section.pop("run_options", None)
    Path("on-cpu/genai_config.json").write_text(json.dumps(config), encoding="utf-8")

    names: dict[str, Any] = {}
    exec(compile(code.replace('"PACKAGE"', '"on-cpu"').replace("+ 64", "+ 3"), "card", "exec"), names)

    assert names["generator"].token_count() > names["inputs"]["input_ids"].shape()[1]
