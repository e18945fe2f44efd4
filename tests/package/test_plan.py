"""`phi4mm plan`: sizes to the byte, memory from named terms, all from headers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.full_size import write_full_size
from support.packages import edit_json
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.errors import PackageError, SystemLimitError, UsageError
from phi4mm_export.pipeline.plan import PlanReport, PlanSettings, plan
from phi4mm_export.pipeline.plan_fit import fit
from phi4mm_export.pipeline.plan_memory import Workload
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.model import Layout
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe

GB, MIB = 10**9, 1 << 20
BuildOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model's headers, no weights."""
    return write_full_size(tmp_path_factory.mktemp("full") / "model")


@pytest.fixture(scope="module")
def published(full_size: Path) -> PlanReport:
    """The published build: INT8 decoder with the vision adapter beside it, float16 elsewhere, for CUDA."""
    recipe = Recipe.resolve(provider=Provider.CUDA, lora=LoraForm.BRANCH)
    return plan(full_size, recipe=recipe, settings=PlanSettings(workload=Workload(3344, 5, 30.0)))


@pytest.fixture(scope="module")
def default(full_size: Path) -> PlanReport:
    """The default export of the real model's sizes, on two threads."""
    return plan(full_size, settings=PlanSettings(jobs=2))


def _run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def test_the_published_build_has_seven_and_a_half_gigabytes_of_weights(published: PlanReport) -> None:
    assert sum(part.stored for part in published.weights) == pytest.approx(7.4 * GB, rel=0.03)


def test_its_cache_takes_seventeen_gigabytes_at_the_full_context(published: PlanReport) -> None:
    assert published.run.kv_per_token == 131_072
    assert published.run.kv == 131_072 * 131_072 == pytest.approx(17 * GB, rel=0.02)


def test_last_token_logits_remove_the_allocation_of_a_long_prompt(published: PlanReport) -> None:
    assert published.run.logits_full == 1_338_028_032
    assert published.run.logits_last == 1_338_028_032 // 3344
    assert not published.run.full_logits


def test_full_logits_count_in_the_peak(tiny_checkpoint: Path) -> None:
    recipes = [Recipe.resolve(provider=Provider.CUDA, full_logits=on) for on in (False, True)]
    last, full = (plan(tiny_checkpoint, recipe=recipe).run for recipe in recipes)
    assert full.full_logits
    assert full.device_peak - last.device_peak == pytest.approx(3343 * 200064 * 2, rel=1e-4)


def test_the_largest_length_that_a_device_holds_is_found_and_fits(tiny_checkpoint: Path) -> None:
    recipe, budget = Recipe.resolve(provider=Provider.CUDA), 180 * MIB
    verdict = plan(tiny_checkpoint, recipe=recipe, settings=PlanSettings(vram=budget)).verdicts[0]
    assert not verdict.fits
    longest = verdict.largest_max_length
    settings = [PlanSettings(max_length=length) for length in (longest, longest + 1)]
    held, over = (plan(tiny_checkpoint, recipe=recipe, settings=one).run.device_peak for one in settings)
    assert held <= budget < over


def test_a_package_gives_the_same_run_time_figures_as_its_checkpoint(
    tiny_checkpoint: Path, gated_package: Path
) -> None:
    from_checkpoint, from_package = plan(tiny_checkpoint), plan(gated_package)
    assert (from_package.kind, from_package.export, from_package.recipe) == ("package", None, None)
    assert from_package.run.kv == from_checkpoint.run.kv
    assert from_package.run.prompt == from_checkpoint.run.prompt
    assert from_package.run.vision == from_checkpoint.run.vision
    assert from_package.run.peak == pytest.approx(from_checkpoint.run.peak, rel=0.01)


def test_config_json_alone_gives_the_same_plan_as_all_headers(default: PlanReport, tmp_path: Path) -> None:
    alone = plan(write_full_size(tmp_path / "config-only", weights=False))
    sizes = [{f.name: f.nbytes for f in one.files} for one in (alone, default)]
    own = [one.pop("phi4mm.json") for one in sizes]  # it lists the files that were read
    assert sizes[0] == sizes[1]
    assert own[0] == pytest.approx(own[1], rel=0.5)
    assert "no weights here" in alone.warnings[-1]


def test_a_folder_without_a_tokenizer_is_planned_without_it(tmp_path: Path) -> None:
    folder = write_full_size(tmp_path / "config-only", weights=False)
    (folder / "tokenizer.json").unlink()
    report = plan(folder)
    assert "no tokenizer.json here" in report.warnings[-1]
    assert "genai_config.json" in {file.name for file in report.files}


def test_both_layouts_of_the_real_model_plan_the_same_files(default: PlanReport, tmp_path: Path) -> None:
    native = plan(write_full_size(tmp_path / "native", layout=Layout.NATIVE))
    data = {f.name: f.nbytes for f in native.files if f.name.endswith(".data")}
    assert data == {f.name: f.nbytes for f in default.files if f.name.endswith(".data")}


def test_the_arena_of_the_encoders_counts_once_when_it_is_released(tiny_checkpoint: Path) -> None:
    run = plan(tiny_checkpoint, settings=PlanSettings(max_length=4096)).run
    assert run.peak_both_kept - run.peak_text == run.vision + run.speech
    assert run.peak_both_released == run.peak_text - run.prompt + max(run.prompt, run.vision, run.speech)
    assert run.peak_both_released < run.peak_both_kept


def test_export_memory_does_not_grow_with_the_model(default: PlanReport) -> None:
    assert default.export is not None
    assert default.export.memory_peak < 500 * MIB
    assert default.export.disk_peak == default.nbytes


def test_a_search_lists_only_recipes_that_run_and_marks_the_frontier(tiny_checkpoint: Path) -> None:
    settings = PlanSettings(workload=Workload(64, 2, 1.0))
    everything = fit(tiny_checkpoint, 64 << 30, settings=settings)
    assert [c.data_nbytes for c in everything] == sorted(c.data_nbytes for c in everything)
    best = min(everything, key=lambda c: c.data_nbytes)
    assert best.on_frontier
    assert best.precision == Precision.INT4
    dominated = [c for c in everything if c.precision == "int8" and c.embedding_precision == "int4"]
    assert dominated


def test_a_budget_that_holds_no_recipe_is_exit_6_with_both_numbers(tiny_checkpoint: Path) -> None:
    with pytest.raises(SystemLimitError, match=r"none of 48 recipes runs in 100\.0 MiB .* needs \d+\.\d MiB"):
        fit(tiny_checkpoint, 100 << 20, settings=PlanSettings(workload=Workload(64, 2, 1.0)))
    result = _run(tiny_checkpoint, "--fit", "60MiB")
    assert (result.exit_code, result.stdout) == (6, "")
    assert "60.0 MiB" in result.stderr


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--precision", "fp32"), {"precision": "fp32"}),
        (("--lora", "branch"), {"lora": "branch"}),
        (("--embedding-precision", "int8"), {"embedding_precision": "int8"}),
        (("--encoder-precision", "fp16", "--precision", "int4"), {"encoder_precision": "fp16", "precision": "int4"}),
    ],
)
def test_recipe_options_fix_their_part_of_a_search(
    tiny_checkpoint: Path, options: tuple[str, ...], part: dict[str, str]
) -> None:
    found = json.loads(_run(tiny_checkpoint, "--fit", "64GiB", "--prompt-tokens", "16", *options, "--json").stdout)
    assert 1 < len(found) < 48
    assert all({key: one[key] for key in part} == part for one in found)


def test_options_that_change_the_weights_change_the_sizes_of_a_search(tiny_checkpoint: Path) -> None:
    settings = PlanSettings(workload=Workload(16, 0, 0))
    given = {"precision": Precision.INT4, "lora": LoraForm.GATED}
    plain = fit(tiny_checkpoint, 64 << 30, given=given, settings=settings)
    wide = fit(tiny_checkpoint, 64 << 30, given=given | {"lora_precision": Precision.FP32}, settings=settings)
    assert [one.label for one in plain] == [one.label for one in wide]
    assert all(a.data_nbytes < b.data_nbytes for a, b in zip(plain, wide, strict=True))


def test_a_search_leaves_out_merges_of_an_adapter_that_is_not_there(tiny_native: Path, tmp_path: Path) -> None:
    alone = tmp_path / "speech-only"
    shutil.copytree(tiny_native, alone, ignore=shutil.ignore_patterns("vision-lora"))
    found = fit(alone, 64 << 30, settings=PlanSettings(workload=Workload(16, 0, 0)))
    assert {one.lora for one in found} == {"gated"}


def test_only_recipes_with_room_for_the_asked_length_are_listed(tiny_checkpoint: Path) -> None:
    workload = Workload(16, 0, 0)
    short = fit(tiny_checkpoint, 260 << 20, settings=PlanSettings(workload=workload))
    longer = fit(tiny_checkpoint, 260 << 20, settings=PlanSettings(workload=workload, max_length=100_000))
    assert {one.label for one in longer} == {one.label for one in short if one.max_length >= 100_000}
    assert len(longer) < len(short)


@pytest.mark.parametrize("label", ["int5", "int4/int8/fp16/gate", "int8/fp16"])
def test_an_unknown_label_is_refused_with_the_nearest_known_one(
    tiny_checkpoint: Path, tmp_path: Path, label: str
) -> None:
    (tmp_path / "errors.json").write_text(json.dumps({label: 0.1}))
    result = _run(tiny_checkpoint, "--fit", "4GiB", "--errors", tmp_path / "errors.json")
    assert result.exit_code == 2
    assert repr(label) in result.stderr
    assert "did you mean int" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--errors", "figures.json"), "--errors"),
        (("--fit", "4GiB", "--ram", "4GiB"), "--ram"),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    tiny_checkpoint: Path, options: tuple[str, ...], words: str
) -> None:
    result = _run(tiny_checkpoint, *options)
    assert result.exit_code == 2
    assert words in result.stderr


def test_recipe_options_beside_a_package_are_refused(gated_package: Path) -> None:
    result = _run(gated_package, "--precision", "int4")
    assert result.exit_code == 2
    assert "whose recipe is settled" in result.stderr
    with pytest.raises(UsageError, match="settled"):
        plan(gated_package, recipe=Recipe.resolve())


def test_a_length_beyond_the_budget_is_exit_6_with_the_largest_that_fits(tiny_checkpoint: Path) -> None:
    budget, request = "500MiB", ("--prompt-tokens", "16", "--crops", "0", "--seconds", "0")
    free = _run(tiny_checkpoint, "--precision", "fp32", *request, "--ram", "300MiB")
    asked = _run(tiny_checkpoint, "--precision", "fp32", *request, "--ram", "300MiB", "--max-length", "131072")
    roomy = _run(tiny_checkpoint, *request, "--ram", budget, "--max-length", "131072")
    assert (free.exit_code, asked.exit_code, roomy.exit_code) == (0, 6, 0)
    assert "the largest max_length that fits is" in asked.stderr
    assert "the largest max_length that fits is" in free.stdout


def test_a_prompt_longer_than_the_length_is_pointed_out(tiny_checkpoint: Path) -> None:
    report = plan(tiny_checkpoint, settings=PlanSettings(max_length=1024))
    assert report.warnings == ("a prompt of 3,344 tokens does not fit a max_length of 1,024",)


def test_error_figures_replace_bits_as_the_measure_of_accuracy(tiny_checkpoint: Path) -> None:
    settings = PlanSettings(workload=Workload(64, 2, 1.0))
    found = fit(tiny_checkpoint, 64 << 30, settings=settings, errors={"int4": 0.001, "int8": 0.01})
    kept = {c.precision for c in found if c.on_frontier and c.error is not None}
    assert kept == {"int4"}


def test_text_and_json_say_the_same(tiny_checkpoint: Path) -> None:
    text = _run(tiny_checkpoint, "--max-length", "4096", "--ram", "8GiB", "--prompt-tokens", "100").stdout
    document = json.loads(
        _run(tiny_checkpoint, "--max-length", "4096", "--ram", "8GiB", "--prompt-tokens", "100", "--json").stdout
    )
    assert f"{document['run']['kv_per_token']:,} B per token" in text
    assert document["bytes"] == sum(file["nbytes"] for file in document["files"])
    assert "the largest max_length that fits is" in text
    assert document["verdicts"][0]["kind"] == "ram"


def test_fit_on_the_command_line_prints_the_frontier(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "errors.json").write_text('{"int4": 0.25}')
    options = ("--fit", "4GiB", "--prompt-tokens", "16", "--crops", "0", "--seconds", "0")
    result = _run(tiny_checkpoint, *options, "--errors", tmp_path / "errors.json")
    assert result.exit_code == 0, result.stderr
    assert "* int4/int4/fp16/merged" in result.stdout
    assert "0.25" in result.stdout
    assert json.loads(_run(tiny_checkpoint, *options, "--json").stdout)[0]["label"].startswith("int4/")


def test_an_error_figure_that_is_no_number_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "errors.json").write_text('{"int4": "low"}')
    result = _run(tiny_checkpoint, "--fit", "4GiB", "--errors", tmp_path / "errors.json")
    assert result.exit_code == 2
    assert "expected a number for int4" in result.stderr


def test_a_length_beyond_the_context_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="max_length"):
        plan(tiny_checkpoint, settings=PlanSettings(max_length=131_073))


def test_a_package_without_a_graph_is_refused_by_name(gated_package: Path, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    for name in ("genai_config.json", "phi-4-mm-text.onnx"):
        (tmp_path / "p" / name).write_bytes((gated_package / name).read_bytes())
    with pytest.raises(PackageError, match=r"phi-4-mm-vision\.onnx is missing"):
        plan(tmp_path / "p")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (("model",), "context_length", -1),
        (("model",), "vocab_size", None),
        (("model", "decoder"), "head_size", "64"),
        (("search",), "max_length", None),
        ((), "model", []),
    ],
)
def test_a_package_whose_config_states_no_sizes_is_refused_by_key(
    gated_package: Path, tmp_path: Path, section: tuple[str, ...], key: str, value: object
) -> None:
    (tmp_path / "p").mkdir()
    for file in (*gated_package.glob("*.onnx"), gated_package / "genai_config.json"):
        (tmp_path / "p" / file.name).write_bytes(file.read_bytes())

    def change(config: dict[str, Any]) -> None:
        for name in section:
            config = config[name]
        config[key] = value

    edit_json(tmp_path / "p" / "genai_config.json", change)
    with pytest.raises(PackageError) as caught:
        plan(tmp_path / "p")
    assert caught.value.where == f"genai_config.json: {'.'.join((*section, key))}"


def test_graphs_without_a_config_are_no_whole_package(gated_package: Path, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "vision.onnx").write_bytes((gated_package / "phi-4-mm-vision.onnx").read_bytes())
    with pytest.raises(UsageError, match=r"found graphs without genai_config\.json"):
        plan(tmp_path / "p")
