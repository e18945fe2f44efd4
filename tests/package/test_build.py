"""Packages built by a recipe: what is in them, and what stops a build."""

from __future__ import annotations

import json
import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest
from support.builds import DESCRIBED, card_of, digests, stage_of
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.errors import QualityError, SystemLimitError, UsageError
from phi4mm_export.package.manifest_read import read_manifest
from phi4mm_export.package.source_card import front_matter
from phi4mm_export.pipeline import build as build_module
from phi4mm_export.pipeline import build_measure
from phi4mm_export.pipeline.build import BuildSettings, build
from phi4mm_export.pipeline.build_quantize import QuantizeStep, quantized
from phi4mm_export.pipeline.build_stages import Stages
from phi4mm_export.pipeline.doctor import doctor
from phi4mm_export.pipeline.inspect import inspect
from phi4mm_export.pipeline.plan import plan
from phi4mm_export.pipeline.rebuild import rebuild
from phi4mm_export.pipeline.validate import validate
from phi4mm_export.pipeline.verify import verify
from phi4mm_export.spec.build_recipe import BuildRecipe, QuantizeChoices
from phi4mm_export.spec.build_recipe_read import read_recipe, recipe_names
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.quantization import Method


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_a_built_package_is_complete_verifies_and_has_no_fault(built: Path) -> None:
    assert DESCRIBED | {"genai_config.json"} <= {path.name for path in built.iterdir()}
    assert verify(built).ok
    assert validate(built).ok
    assert not [item for item in doctor(built).diagnoses if item.finding.severity == "error"]
    assert inspect(built)


def test_what_a_build_exports_is_what_an_export_of_the_same_choices_gives(built: Path, cuda_package: Path) -> None:
    ours, plain = digests(built), digests(cuda_package)

    assert {name: ours[name] for name in ours.keys() - DESCRIBED} == {
        name: plain[name] for name in plain.keys() - DESCRIBED
    }


def test_the_manifest_records_recipe_inputs_and_classes_and_no_place(built: Path, tiny_checkpoint: Path) -> None:
    manifest = read_manifest(built)

    assert manifest.build is not None
    assert manifest.build["name"] == "int8-gated"
    assert manifest.build["export"]["block_size"] == 128
    assert manifest.source is not None
    assert {entry.name for entry in manifest.source.files} >= {"config.json", "tokenizer.json"}
    assert {entry.reproducibility.value for entry in manifest.files} == {"exact"}
    for name in DESCRIBED:
        assert str(tiny_checkpoint.parent) not in (built / name).read_text(encoding="utf-8")


def test_the_calibrated_graph_and_the_card_are_sure_on_one_machine_only(calibrated: Path) -> None:
    classes = {entry.name: entry.reproducibility.value for entry in read_manifest(calibrated).files}

    loose = {name for name, kind in classes.items() if kind != "exact"}
    assert loose == {"phi-4-mm-vision.onnx", "phi-4-mm-vision.onnx.data", "README.md"}


def test_other_calibration_samples_are_refused_by_their_names(built: Path, tmp_path: Path) -> None:
    from support.media_files import picture_bytes

    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "page.png").write_bytes(picture_bytes(40, 30))
    (tmp_path / "stages").mkdir()
    step = QuantizeStep(Component.VISION, QuantizeChoices(), str(tmp_path / "pages"), 1, ("0" * 64, "1" * 64))

    with pytest.raises(UsageError, match="expected the 2 recorded calibration samples of the vision graph") as caught:
        quantized(step, stage_of(built), Stages(tmp_path / "stages"))

    assert "page.png" in str(caught.value)


def test_a_quantized_graph_beyond_the_recipes_limit_is_exit_code_5(built: Path, tmp_path: Path) -> None:
    choices = QuantizeChoices(num_samples=2, max_rel_l2=1e-6)
    step = QuantizeStep(Component.VISION, choices, "builtin", 1, None)

    with pytest.raises(QualityError, match="allowed at most 1e-06"):
        quantized(step, stage_of(built), Stages(tmp_path))


def test_a_build_that_fails_late_leaves_nothing_but_its_work_folder_from_which_the_next_one_goes_on(
    built: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, seen = BuildSettings(work_dir=tmp_path / "work"), list[str]()

    def refuse(*_: object) -> str:
        raise QualityError("not today")

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "card_text", refuse)
        with pytest.raises(QualityError, match="not today"):
            build("int8-gated", tmp_path / "out", model=tiny_checkpoint, settings=settings)
    left = [path.name for path in tmp_path.iterdir()]
    result = build("int8-gated", tmp_path / "out", model=tiny_checkpoint, settings=settings, on_stage=seen.append)

    assert left == ["work"]
    assert result.reused == ("export",)
    assert "exporting" not in seen
    assert digests(tmp_path / "out") == digests(built)
    assert [path.name for path in (tmp_path / "work").iterdir()] == []


def test_a_recipe_file_names_model_and_output_and_the_licence_of_the_source_goes_with_the_package(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny_checkpoint, source)
    (source / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    (source / "LICENSE").write_text("Permission is hereby granted\n", encoding="utf-8")
    text = 'name = "mine"\nmodel = "source"\noutput = "out"\n[export]\nembedding_precision = "int8"\n'
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")

    result = run("build", tmp_path / "mine.toml", "--json")

    report = json.loads(result.stdout)
    assert (result.exit_code, report["path"], report["reproducibility"]) == (0, str(out), "exact")
    assert (report["recipe"]["name"], "model" in report["recipe"]) == ("mine", False)
    assert verify(out).ok
    assert (out / "LICENSE").read_bytes() == (source / "LICENSE").read_bytes()
    said = front_matter((out / "README.md").read_bytes())
    assert (said["license"], said["license_link"]) == ("mit", "LICENSE")
    assert "Made for the CPU" in card_of(out)
    assert rebuild(out, model=source).same


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["int8-gated", "-o", "out"], "the recipe names no model"),
        (["int8-gated", "--model", "m"], "the recipe names no output"),
        ([], "expected a recipe, found none"),
        (["int8-gatd"], "did you mean int8-gated"),
        (["int8-gptq", "-o", "out", "--model", "m"], "no samples were given"),
        (["int8-gated", "--set", "export.precison=int4"], "did you mean precision"),
    ],
)
def test_what_a_build_lacks_is_a_usage_error(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    result = run("build", *arguments)

    assert result.exit_code == 2
    assert sentence in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_recipes_are_listed_and_shown_as_files_that_can_be_built() -> None:
    listed, shown = run("build", "--list"), run("build", "int4-gptq", "--show", "--set", "quantize.vision.bits=8")

    assert listed.exit_code == shown.exit_code == 0
    assert tuple(line.split()[0] for line in listed.stdout.splitlines()) == recipe_names()
    assert "[quantize.vision]" in shown.stdout
    assert "bits = 8" in shown.stdout


def test_a_package_that_was_changed_by_a_command_is_no_recipes_result_any_more(
    built: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)

    result = run("config", tiny_checkpoint, "--package", copy, "--max-length", 512)

    assert result.exit_code == 0, result.stderr
    assert read_manifest(copy).build is None


@pytest.mark.parametrize("name", recipe_names())
def test_every_named_recipe_can_be_exported(name: str, tiny_checkpoint: Path) -> None:
    choices = read_recipe(name).export

    report = plan(tiny_checkpoint, recipe=choices.recipe(), adapter_named=choices.adapter is not None)

    assert report.nbytes > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_a_killed_build_goes_on_after_the_stages_that_it_had_finished(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = BuildRecipe(quantize={Component.SPEECH: QuantizeChoices(Method.RTN, bits=8)})

    def die(stage: str) -> None:
        if stage == "validating":
            os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking with threads around
        child = os.fork()
    if child == 0:
        build(recipe, tmp_path / "out", model=tiny_checkpoint, on_stage=die)
        os._exit(1)
    killed = os.WTERMSIG(os.waitpid(child, 0)[1])
    left = [path.name for path in tmp_path.iterdir()]
    result = build(recipe, tmp_path / "out", model=tiny_checkpoint)

    assert (killed, left) == (signal.SIGKILL, [".out.staging"])
    assert result.reused == ("export", "quantize-speech")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert verify(tmp_path / "out").ok


def test_a_comparison_that_memory_cannot_hold_is_refused_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_measure, "available_memory", lambda: 1 << 20)
    seen: list[str] = []

    with pytest.raises(
        SystemLimitError, match=r"float weights in memory, 1\.0 MiB are available; build with --against none"
    ):
        build(
            "int8-gated",
            tmp_path / "out",
            model=tiny_checkpoint,
            set_values=["evaluate.against=model"],
            on_stage=seen.append,
        )

    assert seen == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"statistics": "nowhere"}, "expected the vision graph's statistics, found no folder"),
        ({"statistics": "kept"}, "expected statistics of version [0-9], found 0"),
        ({"save_statistics": "kept"}, "--save-statistics .*vision: the folder holds statistics already"),
        ({"save_statistics": "file/x"}, "--save-statistics .*vision: expected a folder, found a file"),
        ({"work_dir": "file"}, "--work-dir .*expected a folder, found a file"),
    ],
)
def test_folders_of_statistics_and_of_work_that_cannot_be_used_are_refused_before_the_model_is_looked_for(
    settings: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "kept" / "vision").mkdir(parents=True)
    (tmp_path / "kept" / "vision" / "statistics.json").write_text('{"version": 0}', encoding="utf-8")
    (tmp_path / "file").write_text("x", encoding="utf-8")
    places = {key: tmp_path / name for key, name in settings.items()}

    with pytest.raises(UsageError, match=sentence):
        build("int8-gptq", tmp_path / "out", model=".", calibration="builtin", settings=BuildSettings(**places))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["calibration=nowhere"], "--calibration .*nowhere: the file or folder does not exist"),
        (["evaluate.against=nowhere"], "expected the folder of a float package, found nothing"),
        (["evaluate.against=model", 'evaluate.images=["nowhere"]'], "evaluate.images: .*does not exist"),
        (["evaluate.against=model", 'evaluate.prompts=["nowhere"]'], "evaluate.prompts: .*does not exist"),
        (["evaluate.against=model", 'evaluate.text=["nowhere"]'], "evaluate.text: expected files, found nothing"),
    ],
)
def test_samples_and_requests_that_are_not_there_are_refused_before_the_model_is_looked_for(
    words: list[str], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=sentence):
        build("int8-gptq", tmp_path / "out", model="no model", set_values=["calibration=builtin", *words])
    assert list(tmp_path.iterdir()) == []
