"""`phi4mm inspect` as it is typed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file
from support.packages import DATA_FILE, FILES, build_package, edit_graph, edit_json, external, save
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.pipeline.inspect import inspect


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_a_package_says_contract_adapters_providers_and_precisions(tmp_path: Path) -> None:
    result = _run(build_package(tmp_path / "package", gated=True))
    assert result.exit_code == 0
    assert "contract: gated, adapters: gated, providers: CPU" in result.stdout
    assert "graph decoder: phi-4-mm-text.onnx" in result.stdout
    assert "orphaned bytes: 0" in result.stdout


def test_json_carries_the_same_figures(tmp_path: Path) -> None:
    package = build_package(tmp_path / "package")
    document = json.loads(_run(package, "--json").stdout)
    assert (document["kind"], document["contract"], document["lora"]) == ("package", "official", "merged or none")
    assert [graph["component"] for graph in document["graphs"]] == ["decoder", "vision", "speech", "embedding"]
    assert document["data"] == [
        {"file": DATA_FILE, "nbytes": (package / DATA_FILE).stat().st_size, "referenced": 200096 * 64, "orphaned": 0}
    ]


def test_orphaned_bytes_are_counted(tmp_path: Path) -> None:
    package = build_package(tmp_path / "package")
    os.truncate(package / DATA_FILE, (package / DATA_FILE).stat().st_size + 100_000)
    result = _run(package)
    assert result.exit_code == 0
    assert "orphaned bytes: 100,000" in result.stdout


@pytest.mark.parametrize(("name", "form"), [("layers.0.lora_A.weight", "branch"), ("lora_A.MatMul.weight", "branch")])
def test_lora_constants_beside_the_base_are_a_branch(tmp_path: Path, name: str, form: str) -> None:
    package = build_package(tmp_path / "package")
    weight = numpy_helper.from_array(np.zeros((2, 2), np.float32), f"model.{name}")
    edit_graph(package, "decoder", lambda model: model.graph.initializer.append(weight))
    summary = inspect(package).package
    assert summary is not None
    assert summary.lora == form


def test_lora_inputs_with_defaults_are_the_adapters_form(tmp_path: Path) -> None:
    package = build_package(tmp_path / "package")
    name = "model.layers.0.attn.q_proj.lora_A.MatMul.weight"

    def add(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((16, 1), np.float32), name))
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [16, "rank"]))

    edit_graph(package, "decoder", add)
    summary = inspect(package).package
    assert summary is not None
    assert summary.lora == "adapters"
    assert summary.graphs[0].overridable == 1


def test_quantized_weights_are_grouped_by_bits_and_block(tmp_path: Path) -> None:
    node = helper.make_node(
        "MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft", K=64, N=8, bits=4, block_size=32
    )
    constants = [
        numpy_helper.from_array(np.zeros((8, 2, 16), np.uint8), "q"),
        numpy_helper.from_array(np.ones((8, 2), np.float32), "s"),
        numpy_helper.from_array(np.ones(4, np.float16), "other"),
    ]
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        constants,
    )
    save(tmp_path / "graph.onnx", helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    summary = inspect(tmp_path / "graph.onnx").package
    assert summary is not None
    groups = {group.format: (group.count, group.nbytes) for group in summary.graphs[0].weights}
    assert groups == {"int4 in blocks of 32": (1, 256 + 64), "float16": (1, 8)}


def test_a_weight_beyond_two_gibibytes_is_described_from_its_header(tmp_path: Path) -> None:
    k, n = 4096, 137_216
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", k])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", n])]
    weight = external("w", TensorProto.FLOAT, [k, n], 0, location="big.onnx.data")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", inputs, outputs, [weight])
    save(tmp_path / "big.onnx", helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    with (tmp_path / "big.onnx.data").open("wb") as file:
        file.truncate(4 * k * n)
    result = _run(tmp_path / "big.onnx")
    assert result.exit_code == 0
    assert "weights outside 2.1 GiB" in result.stdout


def test_a_graph_that_shares_its_data_file_orphans_nothing(tmp_path: Path) -> None:
    package = build_package(tmp_path / "package")
    result = _run(package / FILES["embedding"])
    assert "orphaned bytes: 0" in result.stdout


def test_a_checkpoint_says_layout_adapters_with_rank_and_scale_and_types(tiny_checkpoint: Path) -> None:
    result = _run(tiny_checkpoint)
    assert result.exit_code == 0
    assert "layout: original" in result.stdout
    assert "adapter vision: from config.json: vision_lora" in result.stdout
    assert "adapter speech: " in result.stdout
    assert "BF16" in result.stdout


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_head_that_drifted_is_refused_with_options_that_the_command_has(
    tiny_checkpoint: Path, tmp_path: Path, command: str
) -> None:
    folder = tmp_path / "drifted"
    shutil.copytree(tiny_checkpoint, folder)
    index = folder / "model.safetensors.index.json"
    edit_json(index, lambda body: body["weight_map"].update({"lm_head.weight": "model-head.safetensors"}))
    zeros = np.zeros((200064, 128), np.float16)
    save_file({"lm_head.weight": zeros}, folder / "model-head.safetensors")
    refused = CliRunner().invoke(app, [command, str(folder)])
    assert refused.exit_code == 3
    for choice in ("stored", "tied"):
        assert f"--head {choice}" in refused.stderr
        assert CliRunner().invoke(app, [command, str(folder), "--head", choice]).exit_code == 0


def test_a_native_checkpoint_says_so(tiny_native: Path) -> None:
    document = json.loads(_run(tiny_native, "--json").stdout)
    assert document["layout"] == "native"
    assert [adapter["role"] for adapter in document["adapters"]] == ["speech", "vision"]
    assert all(adapter["ranks"] and adapter["scales"] for adapter in document["adapters"])


def test_a_broken_package_is_described_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    package = build_package(tmp_path / "package")
    (package / FILES["vision"]).write_bytes(b"\xff")
    result = _run(package)
    assert result.exit_code == 0
    assert "C201" in result.stdout
    assert "graph decoder" in result.stdout


def test_a_part_of_a_package_is_no_fault_and_says_what_it_holds(tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = ["export", str(tiny_checkpoint), "-o", str(tmp_path / "p"), "--component", "speech"]
    made = CliRunner().invoke(app, words)
    assert "key-value cache" not in made.stdout
    result = _run(tmp_path / "p")
    assert result.exit_code == 0
    assert result.stdout.startswith("part of a package p\nholds speech alone: ")
    assert "error" not in result.stdout
    document = json.loads(_run(tmp_path / "p", "--json").stdout)
    assert (document["kind"], document["findings"]) == ("part", [])


def test_four_graphs_without_their_config_are_a_package_with_a_fault(tmp_path: Path) -> None:
    package = build_package(tmp_path / "package")
    (package / "genai_config.json").unlink()
    result = _run(package)
    assert result.stdout.startswith("package package\n")
    assert "error C300 genai_config.json: the file is missing" in result.stdout


def test_an_onnx_file_that_is_none_exits_3(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"\xff" * 10)
    result = _run(tmp_path / "x.onnx")
    assert result.exit_code == 3
    assert result.stderr.startswith("error: x.onnx: not an ONNX model")


def test_other_paths_are_usage_errors(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "nothing", tmp_path / "text.txt", tmp_path / "empty"):
        assert _run(place).exit_code == 2
