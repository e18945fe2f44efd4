"""`export` as a function: what a package holds, and that its bytes depend on the model alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.trimmed import without_tensors

from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.errors import CheckpointError, SystemLimitError, UsageError
from phi4mm_export.pipeline.export import ExportReport, ExportSettings, export
from phi4mm_export.pipeline.validate import validate
from phi4mm_export.runtime.package import open_package
from phi4mm_export.runtime.stepping import FourGraphs
from phi4mm_export.spec.contract import FILE_NAMES, Component, PackageLayout, Provider
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe

OWN = {"phi4mm.json", "SHA256SUMS"}


def _export(checkpoint: Path, out: Path, *, settings: ExportSettings | None = None, **choices: object) -> ExportReport:
    return export(checkpoint, out, recipe=Recipe.resolve(**choices), settings=settings)  # type: ignore[arg-type]


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _initializers(graph: Path) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(graph).graph.initializer}


@pytest.fixture(scope="module")
def float_package(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float") / "package"
    _export(tiny_checkpoint, folder, precision=Precision.FP32)
    return folder


def test_two_exports_of_one_checkpoint_are_byte_identical(
    tiny_checkpoint: Path, float_package: Path, tmp_path: Path
) -> None:
    _export(tiny_checkpoint, tmp_path / "again", precision=Precision.FP32, settings=ExportSettings(jobs=1))
    assert _digests(tmp_path / "again") == _digests(float_package)


def test_both_layouts_of_one_model_give_the_same_graphs_and_data(
    tiny_native: Path, float_package: Path, tmp_path: Path
) -> None:
    _export(tiny_native, tmp_path / "native", precision=Precision.FP32)
    graphs = {name: digest for name, digest in _digests(float_package).items() if ".onnx" in name}
    native = {name: digest for name, digest in _digests(tmp_path / "native").items() if ".onnx" in name}
    assert native == graphs


@pytest.mark.parametrize("lora", list(LoraForm))
@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_every_form_passes_validation(
    tiny_checkpoint: Path, tmp_path: Path, lora: LoraForm, precision: Precision
) -> None:
    _export(tiny_checkpoint, tmp_path / "package", lora=lora, precision=precision)
    report = validate(tmp_path / "package")
    assert report.ok, report.errors


def test_a_cuda_package_has_a_kernel_for_every_node(tiny_checkpoint: Path, tmp_path: Path) -> None:
    _export(tiny_checkpoint, tmp_path / "package", provider=Provider.CUDA)
    assert validate(tmp_path / "package", provider=Provider.CUDA).ok


@pytest.mark.parametrize("layout", list(PackageLayout))
def test_every_graph_passes_the_onnx_checker_under_its_published_name(
    tiny_checkpoint: Path, tmp_path: Path, layout: PackageLayout
) -> None:
    _export(tiny_checkpoint, tmp_path / "package", layout=layout)
    for component in Component:
        onnx.checker.check_model(str(tmp_path / "package" / FILE_NAMES[layout][component]))


def test_the_manifest_lists_every_other_file_with_its_size_and_digest(float_package: Path) -> None:
    manifest = json.loads((float_package / "phi4mm.json").read_text())
    listed = {entry["name"]: entry["sha256"] for entry in manifest["files"]}
    assert listed == {name: digest for name, digest in _digests(float_package).items() if name not in OWN}


def test_no_output_names_the_machine_the_user_or_a_path(float_package: Path, tiny_checkpoint: Path) -> None:
    for path in float_package.rglob("*"):
        if path.is_file() and path.stat().st_size < 4 << 20:
            assert str(tiny_checkpoint.parent).encode() not in path.read_bytes()


def test_merged_weights_are_the_base_plus_the_scaled_product(tiny_checkpoint: Path, tmp_path: Path) -> None:
    _export(tiny_checkpoint, tmp_path / "p", lora=LoraForm.MERGED, precision=Precision.FP32, adapter=Role.SPEECH)
    name = "model.layers.1.mlp.down_proj"
    with open_checkpoint(tiny_checkpoint) as checkpoint:
        pair = checkpoint.adapters[Role.SPEECH].pairs[name]
        base = checkpoint.tensors[f"{name}.weight"].whole().astype(np.float64)
        delta = pair.b.whole().astype(np.float64) @ pair.a.whole().astype(np.float64) * pair.scale
    merged = _initializers(tmp_path / "p" / "phi-4-mm-text.onnx")[f"{name}.weight"]
    assert np.abs(merged - (base + delta)).max() < 1e-6 * np.abs(delta).max()


def test_an_int8_head_and_table_are_the_same_bytes_in_one_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    _export(tiny_checkpoint, tmp_path / "shared", embedding_precision=Precision.INT8)
    _export(tiny_checkpoint, tmp_path / "apart", embedding_precision=Precision.INT8, layout=PackageLayout.NESTED)
    assert not (tmp_path / "shared" / "phi-4-mm-embedding.onnx.data").exists()
    table = _initializers(tmp_path / "shared" / "phi-4-mm-embedding.onnx")
    own = _initializers(tmp_path / "apart" / "embedding" / "model.onnx")
    assert np.array_equal(table["model.embed_tokens.qweight"], own["model.embed_tokens.qweight"])
    assert np.array_equal(table["model.embed_tokens.scales"], own["model.embed_tokens.scales"])


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_a_quantized_table_returns_the_rows_that_its_codes_mean(
    tiny_checkpoint: Path, tmp_path: Path, precision: Precision
) -> None:
    import onnxruntime

    from phi4mm_export.weights.packing import decode, unpack

    _export(tiny_checkpoint, tmp_path / "p", precision=precision, embedding_precision=precision)
    graph = tmp_path / "p" / "phi-4-mm-embedding.onnx"
    stored = _initializers(graph)
    scales = stored["model.embed_tokens.scales"]
    ids = np.array([[5, 200063, 7]])
    codes = unpack(stored["model.embed_tokens.qweight"][ids[0]], precision.bits or 8)
    wanted = decode(codes.reshape(3, scales.shape[1], -1), scales[ids[0]], precision.bits or 8).reshape(3, -1)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    none = np.zeros((0, wanted.shape[1]), np.float32)
    (rows,) = session.run(None, {"input_ids": ids, "image_features": none, "audio_features": none})
    assert np.array_equal(rows[0], wanted)


def test_one_component_can_be_exported_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    _export(tiny_checkpoint, tmp_path / "p", components=(Component.SPEECH,))
    assert {path.name for path in (tmp_path / "p").iterdir()} == {
        "phi-4-mm-speech.onnx",
        "phi-4-mm-speech.onnx.data",
        "speech_processor.json",
        *OWN,
    }


def test_a_decoder_can_be_put_into_an_existing_package(
    tiny_checkpoint: Path, float_package: Path, tmp_path: Path
) -> None:
    recipe = Recipe.resolve(components=(Component.DECODER,), precision=Precision.INT8)
    export(tiny_checkpoint, tmp_path / "p", recipe=recipe, from_package=float_package)
    before, after = _digests(float_package), _digests(tmp_path / "p")
    changed = {name for name in before if after.get(name) != before[name]}
    # the float table lay in the old decoder's data file, so the embedding graph gets a file of its own
    assert changed == {"phi-4-mm-text.onnx", "phi-4-mm-text.onnx.data", "phi-4-mm-embedding.onnx", *OWN}
    old, new = (_initializers(folder / "phi-4-mm-embedding.onnx") for folder in (float_package, tmp_path / "p"))
    assert np.array_equal(old["model.embed_tokens.weight"], new["model.embed_tokens.weight"])
    assert validate(tmp_path / "p").ok


def test_an_export_that_takes_what_is_not_there_from_a_folder_that_is_no_package_is_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="genai_config"):
        export(tiny_checkpoint, tmp_path / "p", from_package=tiny_checkpoint)


def test_a_dry_run_says_what_it_would_write_and_writes_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    planned = _export(tiny_checkpoint, tmp_path / "p", settings=ExportSettings(dry_run=True))
    assert planned.dry_run
    assert not any(tmp_path.iterdir())
    written = _export(tiny_checkpoint, tmp_path / "p")
    sizes = {file.name: file.nbytes for file in written.files}
    for file in planned.files:
        assert file.nbytes == pytest.approx(sizes[file.name], rel=0.01)


def test_asking_for_an_adapter_that_is_not_there_names_it_and_its_first_tensor(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source = without_tensors(tiny_checkpoint, tmp_path / "ck", r"\.lora_[AB]\.speech\.")
    recipe = Recipe.resolve(lora=LoraForm.MERGED, adapter=Role.SPEECH)
    with pytest.raises(CheckpointError) as caught:
        export(source, tmp_path / "p", recipe=recipe, adapter_named=True)
    assert "lora_A.speech" in str(caught.value)
    assert not (tmp_path / "p").exists()


def test_with_one_adapter_the_missing_mode_runs_as_base_with_one_warning(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = without_tensors(tiny_checkpoint, tmp_path / "ck", r"\.lora_[AB]\.speech\.")
    report = _export(source, tmp_path / "p")
    assert report.baked == (Role.VISION,)
    assert len([w for w in report.warnings if "speech" in w]) == 1


def test_a_budget_that_no_cache_fits_names_the_largest_length_that_does(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemLimitError):
        _export(tiny_checkpoint, tmp_path / "p", settings=ExportSettings(memory_budget=1 << 20, max_length=131072))
    assert not any(tmp_path.iterdir())


def test_a_path_that_is_no_folder_is_refused_without_looking_at_the_network(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        export(tmp_path / "nothing", tmp_path / "p")


def test_the_manifest_of_a_part_says_nothing_of_graphs_that_were_not_exported(
    tiny_checkpoint: Path, float_package: Path, tmp_path: Path
) -> None:
    recipe = Recipe.resolve(components=(Component.VISION,))
    export(tiny_checkpoint, tmp_path / "p", recipe=recipe, from_package=float_package)
    stated = json.loads((tmp_path / "p" / "phi4mm.json").read_text())["recipe"]
    assert stated["components"] == ["vision"]
    assert stated["encoder_precision"] == "fp32"
    assert not {"lora", "adapters", "precision", "lora_precision", "embedding_precision"} & set(stated)


@pytest.mark.parametrize("lora", [LoraForm.GATED, LoraForm.BRANCH])
def test_rotated_products_give_the_logits_of_plain_ones(tiny_checkpoint: Path, tmp_path: Path, lora: LoraForm) -> None:
    found = {}
    for name, choices in {"plain": {"rotate": False}, "rotated": {"rotate": True}}.items():
        _export(tiny_checkpoint, tmp_path / name, lora=lora, accuracy_level=0, **choices)
        graphs = FourGraphs(open_package(tmp_path / name), threads=1)
        embeds, ids = graphs.embedding(np.array([[3, 5, 9, 31, 7]])), np.array([[200010, 5, 9, 31, 7]])
        found[name] = graphs.decoder(embeds, np.ones((1, 5), np.int64), input_ids=ids)[0].astype(np.float64)
    assert not np.array_equal(found["plain"], found["rotated"])
    assert np.linalg.norm(found["plain"] - found["rotated"]) < 0.05 * np.linalg.norm(found["plain"])
