"""A package under hard links (a deduplicating backup, a build cache) is a package like any other."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from phi4mm_export.errors import PackageError
from phi4mm_export.package.tensor_bytes import inlined
from phi4mm_export.quant.graph import read_graph

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def _model(folder: Path) -> Path:
    folder.mkdir()
    weight = onnx.numpy_helper.from_array(VALUES, "w")
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 4])
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    onnx.save(
        onnx.helper.make_model(graph), folder / "m.onnx", save_as_external_data=True, location="d", size_threshold=0
    )
    return folder / "m.onnx"


def test_the_quantizer_reads_weights_of_a_data_file_with_a_second_name(tmp_path: Path) -> None:
    path = _model(tmp_path / "package")
    os.link(path.parent / "d", tmp_path / "snapshot")
    assert np.array_equal(read_graph(path).constant("w"), VALUES)


def test_a_link_that_stays_in_the_folder_is_followed(tmp_path: Path) -> None:
    path = _model(tmp_path / "package")
    (path.parent / "d").rename(path.parent / "blob")
    (path.parent / "d").symlink_to("blob")
    assert np.array_equal(read_graph(path).constant("w"), VALUES)


def test_a_link_that_leaves_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    path = _model(tmp_path / "package")
    (path.parent / "d").rename(tmp_path / "secret")
    (path.parent / "d").symlink_to(tmp_path / "secret")
    tensor = onnx.load(path, load_external_data=False).graph.initializer[0]
    with pytest.raises(PackageError, match="leaves the folder"):
        inlined(tensor, path, "m.onnx: w")
