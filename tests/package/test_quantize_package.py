"""One graph of a package quantized: a whole new package that validates, runs, and keeps what was not asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image
from support.media_files import write_picture, write_sound
from typer.testing import CliRunner

from phi4mm_export.cli.app import app
from phi4mm_export.errors import QualityError, UsageError
from phi4mm_export.package.replace_graph import data_files
from phi4mm_export.pipeline.export import export
from phi4mm_export.pipeline.quantize import quantize
from phi4mm_export.pipeline.run import run
from phi4mm_export.pipeline.validate import validate
from phi4mm_export.spec.recipe import Precision, Recipe

VISION, SPEECH, DECODER, EMBEDDING = (f"phi-4-mm-{name}.onnx" for name in ("vision", "speech", "text", "embedding"))


@pytest.fixture(scope="session")
def float_package(built_once, tiny_checkpoint: Path) -> Path:  # type: ignore[no-untyped-def]
    """Everything in float32, both adapters gated; the embedding's table is the decoder's head."""
    recipe = Recipe.resolve(precision=Precision.FP32)
    return built_once("package-float", lambda folder: export(tiny_checkpoint, folder, recipe=recipe))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for number, (width, height) in enumerate([(300, 200), (448, 448), (200, 400)]):
        write_picture(folder, f"page {number}.png", width, height)
    return folder


@pytest.fixture(scope="module")
def int4_package(gated_package: Path, pages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("quantized") / "int4"
    arguments = ["quantize", str(gated_package), "-o", str(target), "--method", "gptq", "--calibration", str(pages)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    return target


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def operators(package: Path, graph: str) -> list[str]:
    return [node.op_type for node in onnx.load(package / graph, load_external_data=False).graph.node]


def test_the_chain_from_export_to_an_answer_works(int4_package: Path, pages: Path) -> None:
    assert validate(int4_package).ok
    answer = run(int4_package, prompt="What is shown?", images=[pages / "page 0.png"], max_new_tokens=4)
    assert len(answer.token_ids) == 4
    assert operators(int4_package, VISION).count("MatMulNBits") == 14


def test_every_other_file_is_the_same_and_no_link(int4_package: Path, gated_package: Path) -> None:
    before, after = files(gated_package), files(int4_package)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {VISION, f"{VISION}.data", "phi4mm.json", "SHA256SUMS", "README.md"}
    assert all(not path.is_symlink() and path.stat().st_nlink == 1 for path in int4_package.iterdir())


def test_the_manifest_says_what_was_done_and_on_what(int4_package: Path, gated_package: Path) -> None:
    manifest = json.loads((int4_package / "phi4mm.json").read_text(encoding="utf-8"))
    entry = manifest["quantization"][0]
    assert (entry["component"], entry["method"], entry["bits"], entry["block_size"]) == ("vision", "gptq", 4, 32)
    assert entry["calibration"]["samples"] == 3
    assert len(set(entry["calibration"]["sha256"])) == 3
    assert manifest["recipe"] == json.loads((gated_package / "phi4mm.json").read_text(encoding="utf-8"))["recipe"]


@pytest.mark.parametrize(
    ("engine", "kind"), [("native", "exact"), ("onnxruntime", "same-machine")], ids=["our rounding", "another engine"]
)
def test_only_our_own_rounding_is_promised_to_be_the_same_everywhere(
    gated_package: Path, tmp_path: Path, engine: str, kind: str
) -> None:
    quantize(gated_package, tmp_path / "out", method="rtn", engine=engine)
    manifest = json.loads((tmp_path / "out" / "phi4mm.json").read_text(encoding="utf-8"))
    classes = {entry["name"]: entry["reproducibility"] for entry in manifest["files"]}
    assert classes[VISION] == classes[f"{VISION}.data"] == kind
    assert classes[DECODER] == "exact"


def test_the_source_package_is_not_touched(gated_package: Path, int4_package: Path) -> None:
    assert "MatMulNBits" not in operators(gated_package, VISION)
    assert not [path for path in int4_package.parent.iterdir() if path != int4_package]


def test_one_blank_page_gives_finite_scales_or_no_package(gated_package: Path, tmp_path: Path) -> None:
    Image.new("RGB", (448, 448), "white").save(tmp_path / "blank.png")
    report = quantize(gated_package, tmp_path / "out", calibration=tmp_path / "blank.png")
    assert any("single sample" in line for line in report.warnings)
    assert report.gate is not None
    assert report.gate.judged_on == "calibration samples"
    assert all(layer.damp > 0 for layer in report.layers if layer.method_used == "gptq")
    for tensor in onnx.load(tmp_path / "out" / VISION).graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            assert np.isfinite(onnx.numpy_helper.to_array(tensor)).all()


def test_a_missed_limit_leaves_nothing_beside_the_target(gated_package: Path, pages: Path, tmp_path: Path) -> None:
    with pytest.raises(QualityError, match=r"image_features, 1 held-out sample.*allowed at most 0.0001"):
        quantize(gated_package, tmp_path / "out", calibration=pages, max_rel_l2=1e-4)
    assert list(tmp_path.iterdir()) == []


def test_speech_is_calibrated_in_both_projections(gated_package: Path, tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    write_sound(tmp_path / "clips", "clip.wav", 2.0)
    report = quantize(
        gated_package, tmp_path / "out", component="speech", calibration=tmp_path / "clips", quality_gate=False
    )
    assert report.samples == 2
    assert {layer.method_used for layer in report.layers} == {"gptq"}
    assert validate(tmp_path / "out").ok


def test_a_decoder_is_calibrated_by_prompts_and_the_embedding_keeps_its_table(
    float_package: Path, pages: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    shutil.copy(pages / "page 0.png", prompts / "a.png")
    (prompts / "a.txt").write_text("What is shown?", encoding="utf-8")
    (prompts / "b.txt").write_text("Count to three.", encoding="utf-8")
    report = quantize(
        float_package,
        tmp_path / "out",
        component="decoder",
        calibration=prompts,
        exclude=["lm_head*"],
        quality_gate=False,
    )
    used = {layer.name: layer.method_used for layer in report.layers}
    assert used["model/layers.0/self_attn/qkv_proj/FusedMatMul"] == "gptq"
    assert [name for name, method in used.items() if method == "kept"] == ["lm_head/FusedMatMul"]
    assert report.settings.accuracy_level == 4
    assert any("clips alone: the speech adapter was not calibrated" in line for line in report.warnings)
    assert data_files(float_package, EMBEDDING) == {f"{DECODER}.data"}
    assert data_files(tmp_path / "out", EMBEDDING) == {f"{EMBEDDING}.data"}
    assert validate(tmp_path / "out").ok
    ours, theirs = (onnx.load(package / EMBEDDING).graph.initializer for package in (tmp_path / "out", float_package))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(mine), onnx.numpy_helper.to_array(other))
    assert len(run(tmp_path / "out", prompt="Hello", max_new_tokens=3).token_ids) == 3


def test_arrays_may_take_the_place_of_media(gated_package: Path, tmp_path: Path) -> None:
    (tmp_path / "feeds").mkdir()
    rng = np.random.default_rng(0)
    for number in range(2):
        np.savez(
            tmp_path / "feeds" / f"{number}.npz",
            pixel_values=rng.standard_normal((1, 2, 3, 448, 448)).astype(np.float32),
            image_attention_mask=np.ones((1, 2, 32, 32), np.float32),
            image_sizes=np.array([[448, 448]]),
        )
    report = quantize(gated_package, tmp_path / "out", calibration=tmp_path / "feeds", quality_gate=False)
    assert report.count("gptq") == 14


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"component": "embedding", "method": "rtn"}, "the embedding graph has no linear layers"),
        ({"method": "gptq"}, "gptq was asked for without calibration samples"),
    ],
)
def test_what_cannot_be_asked_of_a_package_is_said_in_a_sentence(
    gated_package: Path, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        quantize(gated_package, tmp_path / "out", **options)  # type: ignore[arg-type]


def test_a_decoder_that_holds_integers_already_has_nothing_to_quantize(gated_package: Path, tmp_path: Path) -> None:
    with pytest.raises(QualityError):
        quantize(gated_package, tmp_path / "out", component="decoder", method="rtn")
    assert list(tmp_path.iterdir()) == []


def test_a_target_inside_the_source_package_is_refused(gated_package: Path) -> None:
    with pytest.raises(UsageError, match="the target lies inside the source"):
        quantize(gated_package, gated_package / "out", method="rtn")
    assert not (gated_package / "out").exists()


def test_a_package_can_be_replaced_by_its_own_quantized_form(gated_package: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(gated_package, package)
    quantize(package, package, method="rtn", overwrite=True)
    assert operators(package, VISION).count("MatMulNBits") == 14
    assert validate(package).ok
