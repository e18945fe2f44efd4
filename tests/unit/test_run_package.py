"""A runner's view of a package: what the decoder graph reveals, and og's versions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from support import stub_graphs

from phi4mm_export.errors import PackageError
from phi4mm_export.runtime.ort import genai_version
from phi4mm_export.runtime.package import open_package, rope_switch
from phi4mm_export.runtime.stepping import role_of
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.json_text import json_bytes
from phi4mm_export.spec.model import Role


def branch(value: float) -> onnx.GraphProto:
    constant = helper.make_node("Constant", [], ["x"], value_float=value)
    return helper.make_graph([constant], "branch", [], [helper.make_tensor_value_info("x", TensorProto.FLOAT, [])])


def decoder(comparison: str, *inputs: str, constant: int = 4096, as_node: bool = False) -> onnx.ModelProto:
    """A graph whose `If` is decided by a comparison of the total length "t" and the constant "c"."""
    tensor = helper.make_tensor("c", TensorProto.INT64, [], [constant])
    nodes = [helper.make_node("Constant", [], ["c"], value=tensor)] if as_node else []
    nodes += [
        helper.make_node(comparison, list(inputs), ["longer"]),
        helper.make_node("Squeeze", ["longer"], ["condition"]),
        helper.make_node("If", ["condition"], ["y"], then_branch=branch(1), else_branch=branch(0)),
    ]
    t = helper.make_tensor_value_info("t", TensorProto.INT64, [1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [])
    return helper.make_model(helper.make_graph(nodes, "g", [t], [y], [] if as_node else [tensor]))


@pytest.mark.parametrize(
    ("comparison", "inputs", "switch"),
    [
        ("Greater", ("t", "c"), 4096),
        ("LessOrEqual", ("t", "c"), 4096),
        ("GreaterOrEqual", ("t", "c"), 4095),
        ("Less", ("t", "c"), 4095),
        ("Less", ("c", "t"), 4096),
        ("GreaterOrEqual", ("c", "t"), 4096),
        ("Greater", ("c", "t"), 4095),
        ("LessOrEqual", ("c", "t"), 4095),
    ],
)
@pytest.mark.parametrize("as_node", [False, True])
def test_the_rope_switch_of_a_foreign_decoder_is_read_from_its_comparison(
    comparison: str, inputs: tuple[str, ...], switch: int, as_node: bool
) -> None:
    assert rope_switch(decoder(comparison, *inputs, as_node=as_node)) == switch


def test_our_own_metadata_decides_before_any_node() -> None:
    model = decoder("Greater", "t", "c")
    helper.set_model_props(model, {"phi4mm.rope_switch": "512"})
    assert rope_switch(model) == 512


def test_a_flag_compared_with_a_small_number_is_no_rope_switch() -> None:
    assert rope_switch(decoder("Greater", "t", "c", constant=0)) is None


@pytest.fixture
def package(tmp_path: Path) -> Path:
    stub_graphs.decoder(tmp_path / "model/model.onnx")
    for name in ("vision", "speech", "embedding"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx").write_bytes(b"")
    sections = {name: {"filename": f"{name}/model.onnx"} for name in ("vision", "speech", "embedding")}
    decoder_section = {"filename": "model/model.onnx", "hidden_size": 8, "inputs": {"attention_mask": "mask"}}
    model = {"type": "phi4mm", "context_length": 64.0, "eos_token_id": 7, "decoder": decoder_section, **sections}
    (tmp_path / "genai_config.json").write_bytes(json_bytes({"model": model, "search": {}}))
    return tmp_path


def edited(package: Path, change: Any) -> Path:
    config = json.loads((package / "genai_config.json").read_text())
    change(config["model"])
    (package / "genai_config.json").write_bytes(json_bytes(config))
    return package


def test_names_come_from_the_config_and_else_from_og(package: Path) -> None:
    opened = open_package(package)
    assert opened.tensor_name(Component.DECODER, "attention_mask") == "mask"
    assert opened.tensor_name(Component.VISION, "attention_mask") == "image_attention_mask"
    assert (opened.context_length, opened.hidden_size, opened.eos_token_ids) == (64, 8, (7,))
    assert (opened.gated, opened.rope_switch) == (False, None)
    assert opened.notes == ("no LongRoPE switch found in model/model.onnx: lengths are not watched",)


def test_speech_may_be_left_out_and_nothing_else(package: Path) -> None:
    edited(package, lambda model: model["speech"].update(filename=""))
    assert open_package(package).graph(Component.SPEECH) is None
    edited(package, lambda model: model["vision"].update(filename=""))
    with pytest.raises(PackageError, match=r"model\.vision\.filename"):
        open_package(package)


@pytest.mark.parametrize("name", ["../decoder.onnx", "/decoder.onnx", "..\\decoder.onnx", "C:\\decoder.onnx"])
@pytest.mark.parametrize("place", ["decoder.filename", "vision.config_filename", "speech.adapter_filename"])
def test_a_file_outside_the_package_is_refused_and_the_key_named(package: Path, place: str, name: str) -> None:
    section, key = place.split(".")
    with pytest.raises(PackageError, match=rf"model\.{section}\.{key}: expected a name inside the package"):
        open_package(edited(package, lambda model: model[section].update({key: name})))


def test_a_tokenizer_outside_the_package_is_refused(package: Path) -> None:
    with pytest.raises(PackageError, match=r"model\.tokenizer_dir"):
        open_package(edited(package, lambda model: model.update(tokenizer_dir="../tokenizer")))


def test_missing_graphs_are_named_together(package: Path) -> None:
    (package / "vision/model.onnx").unlink()
    (package / "speech/model.onnx").unlink()
    with pytest.raises(PackageError, match=r"2 graph files are missing: vision/model\.onnx, speech/model\.onnx"):
        open_package(package)


@pytest.mark.parametrize("value", [None, "64", 0, 64.5, True])
def test_a_context_length_that_is_no_whole_number_is_refused(package: Path, value: Any) -> None:
    opened = open_package(edited(package, lambda model: model.update(context_length=value)))
    with pytest.raises(PackageError, match=r"model\.context_length"):
        _ = opened.context_length


@pytest.mark.parametrize(
    ("version", "numbers"), [("0.18.0", (0, 18, 0)), ("0.14.1.dev0", (0, 14, 1)), ("1", (1,)), ("0.15.0rc1", (0, 15))]
)
def test_og_versions_compare_as_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert genai_version(SimpleNamespace(__version__=version)) == numbers  # type: ignore[arg-type]


def test_the_adapter_follows_the_placeholders_as_in_the_original() -> None:
    assert role_of([1, 2]) is None
    assert role_of([1, 200011]) is Role.SPEECH
    assert role_of([200010]) is Role.VISION
    assert role_of([200011, 200010]) is Role.VISION
