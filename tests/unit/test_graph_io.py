"""The border of a graph, read from its protobuf."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from phi4mm_export.errors import CheckpointError, PackageError
from phi4mm_export.package.graph_io import TensorIo, read_graph_io


def model_with_default_input() -> onnx.ModelProto:
    """y = x + w, where w is an overridable input; z has no shape at all."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"]), helper.make_node("Identity", ["y"], ["z"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["batch", None, 4]),
            helper.make_tensor_value_info("w", TensorProto.FLOAT16, [4]),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["batch", None, 4]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT16, None),
        ],
        [numpy_helper.from_array(np.zeros(4, np.float16), "w")],
    )
    return helper.make_model(graph)


def test_names_types_and_dims_are_read_and_defaults_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "g.onnx"
    onnx.save(model_with_default_input(), str(path))
    io = read_graph_io(path)
    assert io.inputs == (TensorIo("x", "float16", ("batch", None, 4)),)
    assert io.overridable == (TensorIo("w", "float16", (4,)),)
    assert io.output_names == ("y", "z")
    assert io.output("z") == TensorIo("z", "float16", None)
    assert io.input("w") is None


def test_dims_beyond_the_rank_are_unknown() -> None:
    tensor = TensorIo("x", "float", ("batch", 4))
    assert (tensor.dim(-1), tensor.dim(2), tensor.rank) == (4, None, 2)
    assert TensorIo("x", "float", None).dim(0) is None
    assert str(tensor) == "x: float [batch, 4]"


def test_external_data_need_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "g.onnx"
    onnx.save(
        model_with_default_input(), str(path), save_as_external_data=True, location="g.onnx.data", size_threshold=0
    )
    (tmp_path / "g.onnx.data").unlink()
    assert read_graph_io(path).input_names == ("x",)


def test_a_value_that_is_no_tensor_has_its_kind_as_type(tmp_path: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    node = helper.make_node("SequenceLength", ["s"], ["n"])
    count = helper.make_tensor_value_info("n", TensorProto.INT64, [])
    path = tmp_path / "g.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "g", [sequence], [count])), str(path))
    assert read_graph_io(path).inputs == (TensorIo("s", "sequence", None),)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"not a protobuf at all", "cannot be parsed"),
        (b"", "no graph"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    ],
)
def test_bytes_that_are_no_model_are_refused(tmp_path: Path, data: bytes, part: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(PackageError, match=part) as caught:
        read_graph_io(path)
    assert caught.value.where == "model.onnx"


def test_a_missing_file_is_refused_with_the_callers_error_and_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"vision/model\.onnx: the graph file is missing"):
        read_graph_io(tmp_path / "none.onnx", where="vision/model.onnx", error=CheckpointError)
