"""`evaluate` on tiny packages: INT8 and INT4 against float, planted errors, gates, preprocessing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.media_files import write_picture, write_sound
from support.packages import edit_json
from support.planted import copy_package, spoil

from phi4mm_export.checks.evaluation import Evaluation
from phi4mm_export.errors import QualityError, UsageError
from phi4mm_export.pipeline.evaluate import evaluate
from phi4mm_export.pipeline.export import export
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe

BuildOnce = Callable[[str, Callable[[Path], object]], Path]

NEW_TOKENS = 3
TEXT = "The total of 72.50 EUR is due on 14 March."


@pytest.fixture(scope="module")
def float_package(built_once: BuildOnce, tiny_checkpoint: Path) -> Path:
    recipe = Recipe.resolve(precision=Precision.FP32)
    return built_once("package-float", lambda folder: export(tiny_checkpoint, folder, recipe=recipe))


@pytest.fixture(scope="module")
def int4_package(built_once: BuildOnce, tiny_checkpoint: Path) -> Path:
    recipe = Recipe.resolve(precision=Precision.INT4)
    return built_once("package-int4", lambda folder: export(tiny_checkpoint, folder, recipe=recipe))


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture, a clip, a question about the picture, and a text."""
    folder = tmp_path_factory.mktemp("media")
    write_picture(folder)
    write_sound(folder)
    (folder / "text.txt").write_text(TEXT)
    (folder / "ask.jsonl").write_text('{"prompt": "Say hello."}\n')
    return folder


def evaluated(package: Path, against: Path, media: Path, *, kinds: str = "ia", **options: object) -> Evaluation:
    """`kinds`: i for the picture, a for the clip (and so the pair), p for the prompt, t for the text."""
    sources: dict[str, object] = {}
    for kind, option, name in (
        ("i", "images", "page.png"),
        ("a", "audio", "question.wav"),
        ("p", "prompts", "ask.jsonl"),
        ("t", "text", "text.txt"),
    ):
        if kind in kinds:
            sources[option] = [media / name]
    return evaluate(package, against, max_new_tokens=NEW_TOKENS, **(sources | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def int4_against_float(int4_package: Path, float_package: Path, media: Path) -> Evaluation:
    return evaluated(int4_package, float_package, media, kinds="iapt")


def component(result: Evaluation, name: str) -> float:
    return next(each.relative_l2_worst or 0.0 for each in result.components if each.component == name)


def test_every_mode_and_component_is_measured(int4_against_float: Evaluation) -> None:
    result = int4_against_float
    assert [row.mode for row in result.modes] == ["none", "vision", "speech", "vision+speech"]
    assert [each.component for each in result.components] == ["decoder", "vision", "speech", "embedding"]
    assert [answer.request for answer in result.answers] == [
        "ask.jsonl, line 1",
        "page.png",
        "question.wav",
        "page.png + question.wav",
    ]
    assert result.against_kind == "package"
    assert not any(sample.fidelity.fault for sample in result.samples)


def test_only_the_quantized_graph_differs(int4_against_float: Evaluation) -> None:
    assert component(int4_against_float, "decoder") > 0.05
    for name in ("vision", "speech", "embedding"):
        assert component(int4_against_float, name) == 0
    formats = {each.component: (each.format, each.format_float) for each in int4_against_float.sizes}
    assert formats["decoder"] == ("int4", "fp32")
    assert formats["vision"] == ("fp32", "fp32")


def test_with_equal_encoders_end_to_end_is_the_decoder_alone(int4_against_float: Evaluation) -> None:
    for row in int4_against_float.modes:
        assert row.end_to_end == row.decoder
        assert (row.decoder.kl_mean or 0) > 0


def test_int8_is_nearer_to_float_than_int4(
    gated_package: Path, float_package: Path, media: Path, int4_against_float: Evaluation
) -> None:
    int8 = evaluated(gated_package, float_package, media, kinds="t")
    assert int8.modes == ()
    figures, coarse = int8.texts[0].figures, int4_against_float.texts[0].figures
    assert 0 < (figures.kl_mean or 0) < (coarse.kl_mean or 0) / 5
    assert (figures.top1 or 0) > (coarse.top1 or 0)
    assert figures.nll_float == pytest.approx(coarse.nll_float)


def test_a_package_against_itself_loses_nothing(float_package: Path, media: Path) -> None:
    result = evaluated(float_package, float_package, media, blame=True, min_cosine=1.0, max_rel_l2=0.0, max_kl=0.0)
    assert result.ok
    assert all(answer.agree_tokens == NEW_TOKENS for answer in result.answers)
    assert all(row.identical == row.requests and row.agreement == 1.0 for row in result.modes)
    assert result.layers == ()
    assert [verdict.component for verdict in result.blame] == ["", "", ""]


def test_layers_of_the_decoder_show_where_four_bits_cost_most(int4_against_float: Evaluation) -> None:
    assert [part.component for part in int4_against_float.layers] == ["decoder"]
    layers = {layer.layer: layer for layer in int4_against_float.layers[0].layers}
    quantized = layers["model/layers.0/mlp/down_proj"]
    assert (quantized.operator, quantized.bits) == ("MatMulNBits", 4)
    assert quantized.nbytes < quantized.nbytes_float / 5
    assert 0 < (quantized.made or 0) < (quantized.accumulated or 0)
    assert layers["model/layers.0/input_layernorm"].made == 0


@pytest.mark.parametrize(
    ("part", "weight", "kind", "layer"),
    [
        (Component.VISION, "layers.1.mlp.fc2.weight", "i", "layers.1/mlp/fc2"),
        (Component.SPEECH, "encoders.1.self_attn.linear_v.weight", "a", "encoders.1/self_attn/linear_v"),
        (Component.DECODER, "layers.1.mlp.down_proj.weight", "p", "model/layers.1/mlp/down_proj"),
    ],
)
def test_blame_names_the_component_and_the_layer_in_which_an_error_was_planted(
    float_package: Path, media: Path, tmp_path: Path, part: Component, weight: str, kind: str, layer: str
) -> None:
    spoilt = copy_package(float_package, tmp_path / "spoilt")
    spoil(spoilt, part, weight, 2.0)
    result = evaluated(spoilt, float_package, media, kinds=kind, blame=True)
    verdict = result.blame[0]
    assert verdict.component == part.value
    assert verdict.layer.endswith(layer)
    base, swap = (verdict.swaps[0].figures, next(s.figures for s in verdict.swaps if s.component == part.value))
    assert (base.kl_mean or 0) > 1e-4
    assert (swap.kl_mean or 0) < (base.kl_mean or 0) / 100
    made = {row.layer: row.made for row in result.layers[0].layers if row.made}
    assert max(made, key=lambda name: made[name] or 0).endswith(layer)


def test_graphs_of_another_maker_are_blamed_as_a_whole(float_package: Path, media: Path, tmp_path: Path) -> None:
    import onnx

    spoilt = copy_package(float_package, tmp_path / "foreign")
    spoil(spoilt, Component.VISION, "layers.1.mlp.fc2.weight", 2.0)
    graph = spoilt / "phi-4-mm-vision.onnx"
    model = onnx.load(graph, load_external_data=False)
    for number, node in enumerate(model.graph.node):
        node.name = f"node{number}/op"
    onnx.save(model, graph)
    result = evaluated(spoilt, float_package, media, kinds="i", blame=True)
    assert (result.blame[0].component, result.blame[0].layer) == ("vision", "")
    assert "share no layer names" in result.blame[0].remark
    assert "share no layer names" in result.layers[0].remark


def test_worst_pictures_are_kept_with_a_map_of_their_errors(float_package: Path, media: Path, tmp_path: Path) -> None:
    spoilt = copy_package(float_package, tmp_path / "spoilt")
    spoil(spoilt, Component.VISION, "layers.0.mlp.fc1.weight", 0.3)
    result = evaluated(spoilt, float_package, media, kinds="i")
    assert [picture.request for picture in result.pictures] == ["page.png"]
    assert result.pictures[0].thumbnail.startswith(b"\x89PNG")
    assert result.pictures[0].error_map.startswith(b"\x89PNG")
    assert result.pictures[0].largest >= (result.pictures[0].relative_l2 or 0) > 0


def test_a_graph_that_gives_no_numbers_is_a_fault_and_misses_every_gate(
    float_package: Path, media: Path, tmp_path: Path
) -> None:
    spoilt = copy_package(float_package, tmp_path / "nan")
    spoil(spoilt, Component.VISION, "layers.0.mlp.fc1.weight", float("nan"))
    result = evaluated(spoilt, float_package, media, kinds="i", max_rel_l2=10.0)
    assert "NaN or infinite" in next(c.fault for c in result.components if c.component == "vision")
    assert not result.ok
    with pytest.raises(QualityError, match=r"--max-rel-l2: expected at most 10, found no figure"):
        result.raise_for_gates()


def test_a_checkpoint_is_exported_in_float_in_the_form_of_the_package_and_removed(
    int4_package: Path, tiny_checkpoint: Path, media: Path, tmp_path: Path, int4_against_float: Evaluation
) -> None:
    stages: list[str] = []
    result = evaluated(int4_package, tiny_checkpoint, media, kinds="pt", work_dir=tmp_path, on_stage=stages.append)
    assert result.against_kind == "checkpoint"
    assert any("exporting" in stage and "fp32" in stage for stage in stages)
    assert result.texts == int4_against_float.texts
    assert result.modes[0] == int4_against_float.modes[0]
    assert list(tmp_path.iterdir()) == []


def test_a_merged_package_is_compared_with_a_merged_float_model(
    built_once: BuildOnce, tiny_checkpoint: Path, media: Path
) -> None:
    recipe = Recipe.resolve(precision=Precision.FP32, lora=LoraForm.MERGED)
    merged = built_once("package-merged-float", lambda folder: export(tiny_checkpoint, folder, recipe=recipe))
    result = evaluated(merged, tiny_checkpoint, media, kinds="p")
    assert component(result, "decoder") == 0


def test_other_processor_files_are_named_as_a_difference_of_preprocessing(
    float_package: Path, media: Path, tmp_path: Path
) -> None:
    other = copy_package(float_package, tmp_path / "other")
    edit_json(other / "vision_processor.json", lambda document: document["processor"].update(name="renamed"))
    result = evaluated(other, float_package, media, kinds="i")
    assert "differs as preprocessing: vision_processor.json" in result.preprocessing[0]
    assert component(result, "vision") == 0


def test_the_same_evaluation_twice_is_the_same_report(
    int4_package: Path, float_package: Path, media: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        evaluated(int4_package, float_package, media, kinds="i", report=tmp_path / name)
    for file in ("evaluation.json", "index.html"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_expected_fields_and_transcripts_are_scored(
    float_package: Path, media: Path, tmp_path: Path, int4_against_float: Evaluation
) -> None:
    answer = next(a for a in int4_against_float.answers if a.request == "page.png")
    word = answer.text_float.split()[0]
    (tmp_path / "fields.json").write_text(json.dumps({"page.png": {"first": word, "other": "never there at all"}}))
    (tmp_path / "said.json").write_text(json.dumps({"question.wav": "what is said"}))
    result = evaluated(
        float_package,
        float_package,
        media,
        fields=tmp_path / "fields.json",
        references=tmp_path / "said.json",
    )
    by_name = {each.request: each.probes for each in result.answers}
    assert [hit.exact for hit in by_name["page.png"].fields] == [True, False]
    assert (by_name["question.wav"].wer or 0) > 0
    assert by_name["page.png"].wer is None


def test_all_unusable_media_are_named_at_once_before_a_graph_runs(
    int4_package: Path, float_package: Path, tmp_path: Path
) -> None:
    (tmp_path / "half.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    (tmp_path / "noise.wav").write_bytes(b"RIFF")
    stages: list[str] = []
    with pytest.raises(UsageError, match="2 files cannot be used") as caught:
        evaluate(
            int4_package,
            float_package,
            images=[tmp_path / "half.jpg", write_picture(tmp_path)],
            audio=[tmp_path / "noise.wav"],
            on_stage=stages.append,
        )
    assert "half.jpg" in str(caught.value)
    assert "noise.wav" in str(caught.value)
    assert stages == ["reading the requests"]


def test_packages_of_different_models_are_refused(float_package: Path, media: Path, tmp_path: Path) -> None:
    other = copy_package(float_package, tmp_path / "other")
    edit_json(other / "genai_config.json", lambda document: document["model"].update(vocab_size=32064))
    with pytest.raises(UsageError, match=r"vocabulary of 200,064 against 32,064"):
        evaluated(float_package, other, media, kinds="p")


def test_nothing_given_asks_the_builtin_requests_and_says_so(float_package: Path) -> None:
    result = evaluate(float_package, float_package, max_new_tokens=1, max_text_tokens=4, num_samples=1)
    assert result.inputs.startswith("built in (synthetic, seed 0): 1 request")
    assert result.texts[0].tokens == 4


def test_the_figures_are_those_of_numpy_on_the_features(float_package: Path, media: Path, tmp_path: Path) -> None:
    from phi4mm_export.runtime.images import load_image
    from phi4mm_export.runtime.package import open_package
    from phi4mm_export.runtime.processor import open_processor
    from phi4mm_export.runtime.stepping import FourGraphs

    spoilt = copy_package(float_package, tmp_path / "spoilt")
    spoil(spoilt, Component.VISION, "layers.0.mlp.fc1.weight", 0.3)
    result = evaluated(spoilt, float_package, media, kinds="i")
    arrays = open_processor(open_package(spoilt))("<|user|><|image_1|><|end|>", [load_image(media / "page.png")]).arrays
    found, expected = (
        FourGraphs(open_package(each), components=[Component.VISION]).features(arrays)[0]
        for each in (spoilt, float_package)
    )
    assert found is not None
    assert expected is not None
    want = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    assert component(result, "vision") == pytest.approx(want, rel=1e-4)
