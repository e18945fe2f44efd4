"""Edges of a graph, judged without onnxruntime."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from support.packages import build_package, edit_graph, edit_json

from phi4mm_export.pipeline.validate import validate


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return build_package(tmp_path / "package")


def _found(package: Path, code: str) -> list[str]:
    return [f"{finding.where}: {finding.what}" for finding in validate(package).findings if finding.code == code]


def test_a_clean_package_has_sound_edges(package: Path) -> None:
    assert not _found(package, "C230")
    assert not _found(package, "C231")


def test_an_edge_from_nowhere_is_named_with_its_reader(package: Path) -> None:
    def cut(model: onnx.ModelProto) -> None:
        model.graph.node[0].input[0] = "ghost"

    edit_graph(package, "vision", cut)
    (found,) = _found(package, "C230")
    assert "phi-4-mm-vision.onnx" in found
    assert "ghost (read by" in found


def test_a_removed_node_shows_as_edges_without_a_source(package: Path) -> None:
    def remove(model: onnx.ModelProto) -> None:
        del model.graph.node[0]

    edit_graph(package, "embedding", remove)
    assert _found(package, "C230")
    assert not validate(package).ok


def test_a_name_made_by_two_nodes_is_named(package: Path) -> None:
    def double(model: onnx.ModelProto) -> None:
        again = model.graph.node.add()
        again.CopyFrom(model.graph.node[0])

    edit_graph(package, "speech", double)
    (found,) = _found(package, "C231")
    assert "made twice" in found


def test_a_branch_may_read_what_its_surroundings_make_but_not_what_nobody_makes(package: Path) -> None:
    def branch(name: str, source: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node("Identity", [source], [f"{name}_out"])], name, [], [out])

    def add(model: onnx.ModelProto) -> None:
        outside = model.graph.node[0].output[0]
        yes, no = branch("yes", outside), branch("no", "ghost")
        model.graph.node.append(
            helper.make_node("If", [model.graph.input[0].name], ["either"], then_branch=yes, else_branch=no)
        )

    edit_graph(package, "vision", add)
    (found,) = _found(package, "C230")
    assert "1 edges" in found
    assert "ghost" in found


def test_a_tokenizer_without_a_model_is_an_error_and_one_without_words_a_warning(package: Path) -> None:
    edit_json(package / "tokenizer.json", lambda document: document.update(model={"type": "BPE"}))
    assert _found(package, "C508")
    edit_json(package / "tokenizer.json", lambda document: document.pop("model"))
    assert _found(package, "C507")
    assert not validate(package).ok
