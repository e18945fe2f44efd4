"""Recipes are read strictly: what is wrong is said by file and key, and what is right comes back unchanged."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from phi4mm_export.errors import PackageError, UsageError
from phi4mm_export.spec.build_recipe import GIVEN, AdapterChoice, BuildRecipe, check_places
from phi4mm_export.spec.build_recipe_read import (
    MAX_NBYTES,
    parse_toml,
    put,
    read_recipe,
    recipe_names,
    recipe_of,
    toml_text,
)
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.recipe import LoraForm, Precision

NAMES = ("cpu-int4", "cpu-int8", "fp16", "int4-gated", "int4-gptq", "int8-gated", "int8-gptq")


def refusal(text: str | bytes, tmp_path: Path) -> str:
    """The sentence with which a recipe file is refused."""
    path = tmp_path / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        read_recipe(path)
    return str(caught.value)


def test_the_seven_named_recipes_are_there() -> None:
    assert recipe_names() == NAMES
    assert all(read_recipe(name).name == name and read_recipe(name).description for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_recipe_resolves_to_every_choice_and_reads_back_from_its_own_toml(name: str) -> None:
    recipe = read_recipe(name).resolved()

    again = recipe_of(tomllib.loads(toml_text(recipe.plain())), "again.toml")

    assert again == recipe
    assert None not in (recipe.export.block_size, recipe.export.accuracy_level, recipe.export.encoder_precision)


def test_the_published_build_is_an_int8_decoder_with_the_vision_adapter_beside_it_and_int4_vision_by_gptq() -> None:
    recipe = read_recipe("int8-gptq")

    assert (recipe.export.ep, recipe.export.precision) == (Provider.CUDA, Precision.INT8)
    assert (recipe.export.lora, recipe.export.adapter) == (LoraForm.BRANCH, AdapterChoice.VISION)
    assert list(recipe.quantize) == [Component.VISION]
    assert (recipe.quantize[Component.VISION].method, recipe.quantize[Component.VISION].bits) == ("gptq", 4)


def test_recipes_for_the_cpu_compute_in_float32_and_the_others_in_float16() -> None:
    encoders = {name: read_recipe(name).resolved().export.encoder_precision for name in NAMES}

    assert {name for name, kind in encoders.items() if kind is Precision.FP32} == {"cpu-int4", "cpu-int8"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[export]\nprecison = 'int8'", "mine.toml: export.precison: unknown key, did you mean precision"),
        ("[exprt]\nprecision = 'int8'", "mine.toml: exprt: unknown key, did you mean export"),
        ("[export]\nprecision = 'int5'", 'export.precision: expected one of "int8", "int4", "fp16", "fp32"'),
        ("[export]\nprecision = 8", "found 8"),
        ("[export]\nblock_size = 33", "export.block_size: expected one of 16, 32, 64, 128, 256, found 33"),
        ("[export]\nblock_size = true", "found true"),
        ("[export]\nfull_logits = 1", "export.full_logits: expected true or false, found 1"),
        ("[export]\nmemory_budget = 'much'", 'expected an amount of memory such as "4GiB", found "much"'),
        ("[export]\nencoder_precision = 'int8'", 'expected one of "fp16", "fp32"'),
        ("export = 3", "export: expected a table [export], found 3"),
        ("quantize = 3", "expected tables such as [quantize.vision], found 3"),
        ("[quantize.vison]\nbits = 4", "quantize.vison: unknown key, did you mean vision"),
        ("[quantize.vision]\nbits = 3", "quantize.vision.bits: expected one of 4, 8, found 3"),
        ("[quantize.vision]\ndamp = 2.0", "expected a number between 0 and 1, found 2.0"),
        ("[quantize.vision]\nexclude = 'a'", "expected a list of at most 1000 texts"),
        ("[quantize.vision]\nexclude = [1]", "expected a list of at most 1000 texts, found [1]"),
        ("[evaluate]\nmin_cosine = nan", "evaluate.min_cosine: expected a number from -1 to 1, found nan"),
        ("[evaluate]\nmax_kl = inf", "evaluate.max_kl: expected a number of at least 0, found inf"),
        ("name = 2026-01-01", "name: expected a text of 1 to 1024 characters in one line, found the date 2026-01-01"),
        ("name = ''", "name: expected a text"),
        ("recipe_version = 2", "recipe_version: expected 1, found 2"),
        ("name = 'a'\nname = 'b'", "mine.toml: not valid TOML: Cannot overwrite a value"),
        ("name = ", "not valid TOML"),
        (b"\xff\xfen\x00", "mine.toml: the text is UTF-16, expected UTF-8"),
        (b"name = '\xff'", "the text is not UTF-8 (byte 8)"),
        ("x = " + "[" * 5000, "mine.toml: "),
        ("x = " + "9" * 5000, "mine.toml: "),
        ("#" * (MAX_NBYTES + 1), f"expected at most {MAX_NBYTES:,} bytes, found {MAX_NBYTES + 1:,}"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence_with_file_key_expected_and_found(
    tmp_path: Path, text: str | bytes, sentence: str
) -> None:
    found = refusal(text, tmp_path)

    assert sentence in found
    assert "\n" not in found
    assert len(found) < 700


def test_several_faults_are_told_together(tmp_path: Path) -> None:
    found = refusal("nme = 1\n[export]\nep = 'gpu'\n[card]\ntags = 1\ntitel = 'x'", tmp_path)

    assert "4 keys cannot be used" in found
    assert "1 more" in found


def test_a_name_that_no_recipe_has_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean int8-gptq"):
        read_recipe("int8gptq")
    with pytest.raises(UsageError, match="found something else"):
        read_recipe(tmp_path)


def test_a_setting_is_put_over_the_recipe_as_toml_or_as_plain_text() -> None:
    settings = ["export.precision=int4", "export.block_size=64", "export.full_logits=true", 'card.tags=["a", "b"]']

    recipe = read_recipe("int8-gated", settings)

    assert (recipe.export.precision, recipe.export.block_size, recipe.export.full_logits) == (Precision.INT4, 64, True)
    assert recipe.card.tags == ("a", "b")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("export.precision", "expected key=value, found 'export.precision'"),
        ("export..precision=int4", "expected key=value"),
        ("=int4", "expected key=value"),
        ("name.first=x", "name is a value, not a table"),
        ("export.precison=int4", "export.precison: unknown key, did you mean precision"),
    ],
)
def test_a_setting_that_cannot_be_put_is_refused(setting: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_recipe("int8-gated", [setting])
    assert sentence in str(caught.value)


def test_a_setting_cannot_smuggle_a_second_key_in() -> None:
    values = parse_toml(b"", "x.toml")

    put(values, 'name=1\nmodel="x"')

    assert values == {"name": '1\nmodel="x"'}
    with pytest.raises(UsageError, match="name: expected a text"):
        recipe_of(values, "x.toml")


def test_paths_of_a_file_are_relative_to_it_and_hub_ids_and_words_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    text = (
        "calibration = 'pages'\noutput = 'out'\n[quantize.speech]\ncalibration = 'builtin'\n[evaluate]\nimages = ['a']"
    )
    for model, wanted in (("checkpoint", str(tmp_path / "checkpoint")), ("owner/name", "owner/name")):
        (tmp_path / "mine.toml").write_text(f"model = '{model}'\n{text}")

        placed = read_recipe(tmp_path / "mine.toml").placed()

        assert placed.model == wanted
    assert (placed.calibration, placed.output) == (str(tmp_path / "pages"), str(tmp_path / "out"))
    assert placed.quantize[Component.SPEECH].calibration == "builtin"
    assert (placed.evaluate.images, placed.evaluate.against) == ((str(tmp_path / "a"),), "none")


def test_what_is_recorded_holds_no_place_of_this_machine() -> None:
    text = b"model = '/m'\noutput = '/o'\ncalibration = '/c'\n[quantize.vision]\ncalibration = '/v'\n[evaluate]\n"
    recipe = recipe_of(parse_toml(text + b"against = '/f'\nprompts = ['/p']", "x.toml"), "x.toml")

    recorded = recipe.recorded()

    assert "/" not in str(recorded)
    assert (recorded["calibration"], recorded["evaluate"]["against"]) == (GIVEN, GIVEN)
    assert recipe_of(recorded, "manifest", error=PackageError).recorded() == recorded


def test_a_recorded_recipe_with_a_fault_is_a_broken_package() -> None:
    with pytest.raises(PackageError, match="unknown key"):
        recipe_of({"export": {"evil": 1}}, "phi4mm.json: build", error=PackageError)


def test_gptq_without_samples_says_what_to_give() -> None:
    with pytest.raises(UsageError, match="calibrates the vision graph, and no samples were given"):
        check_places(read_recipe("int8-gptq"))


def test_the_embedding_graph_is_not_quantized() -> None:
    recipe = recipe_of({"quantize": {"embedding": {"method": "rtn"}}}, "x.toml")

    with pytest.raises(UsageError, match="no linear layers"):
        check_places(recipe)


def test_a_recipe_that_no_runtime_can_serve_is_refused_when_it_is_resolved() -> None:
    with pytest.raises(UsageError, match="fp32 decoder cannot run on CUDA"):
        read_recipe("fp16", ["export.precision=fp32"]).resolved()


def test_an_empty_recipe_is_the_default_export() -> None:
    assert recipe_of({}, "empty.toml").export == BuildRecipe().export
