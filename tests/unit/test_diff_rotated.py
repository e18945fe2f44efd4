"""Weights whose inputs are mixed first are compared by what they stand for, against mixed and unmixed ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from phi4mm_export.package.diff import Difference, Level
from phi4mm_export.pipeline.diff import diff
from phi4mm_export.weights.packing import quantize_rows
from phi4mm_export.weights.rotation import rotated_rows, rotation_matrix

N, K, GROUP = 6, 256, 128
W = np.random.default_rng(3).standard_normal((N, K)).astype(np.float32)


def _product(*, mixed: bool, branch: bool = False, matrix: np.ndarray | None = None) -> onnx.ModelProto:
    """y = x W' in 8 bits; the weight is the same with and without mixing. branch: inside an `If`, x mixed outside."""
    codes, scales = quantize_rows(rotated_rows(W, GROUP) if mixed else W, 8, GROUP, np.dtype(np.float32))
    arrays = {"q": codes.reshape(N, K // GROUP, GROUP), "s": scales, "yes": np.array(True)}
    steps, source = [], "x"
    if mixed:
        arrays |= {"r": rotation_matrix(GROUP) if matrix is None else matrix}
        arrays |= {"groups": np.array([0, K // GROUP, GROUP]), "rows": np.array([0, K])}
        steps = [
            helper.make_node("Reshape", ["x", "groups"], ["g"], name="split"),
            helper.make_node("MatMul", ["g", "r"], ["m"], name="mix"),
            helper.make_node("Reshape", ["m", "rows"], ["t"], name="join"),
        ]
        source = "t"
    linear = helper.make_node(
        "MatMulNBits", [source, "q", "s"], ["z" if branch else "y"], name="linear", domain="com.microsoft",
        K=K, N=N, bits=8, block_size=GROUP,
    )  # fmt: skip
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", n]) for name, n in (("x", K), ("y", N)))
    if branch:
        z = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["b", N])
        inner = helper.make_graph([linear], "inner", [], [z])
        linear = helper.make_node("If", ["yes"], ["y"], name="choice", then_branch=inner, else_branch=inner)
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    graph = helper.make_graph([*steps, linear], "g", [x], [y], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _weights(tmp_path: Path, a: onnx.ModelProto, b: onnx.ModelProto) -> list[Difference]:
    for folder, model in (("a", a), ("b", b)):
        (tmp_path / folder).mkdir()
        onnx.save(model, tmp_path / folder / "m.onnx")
    found = diff(tmp_path / "a" / "m.onnx", tmp_path / "b" / "m.onnx").differences
    return [item for item in found if item.level is Level.VALUE and "linear" in item.where]


@pytest.mark.parametrize("branch", [False, True])
def test_a_mixed_weight_differs_from_the_plain_one_by_rounding_alone(tmp_path: Path, branch: bool) -> None:
    found = _weights(tmp_path, _product(mixed=True, branch=branch), _product(mixed=False, branch=branch))
    assert len(found) == (2 if branch else 1)
    for item in found:
        assert item.figures["codes"] is None
        assert 0 < item.figures["dequantized_rel_l2"] < 0.02
        assert "mixed in groups of 128" in item.what


def test_equal_mixed_weights_do_not_differ(tmp_path: Path) -> None:
    assert _weights(tmp_path, _product(mixed=True), _product(mixed=True)) == []


def test_equal_codes_stand_for_other_weights_where_only_one_side_is_mixed(tmp_path: Path) -> None:
    plain = _product(mixed=False)
    mixed = _product(mixed=True)
    for tensor in mixed.graph.initializer:
        if tensor.name in ("q", "s"):
            tensor.CopyFrom(next(each for each in plain.graph.initializer if each.name == tensor.name))
    (found,) = _weights(tmp_path, plain, mixed)
    assert found.figures["dequantized_rel_l2"] > 1


def test_a_product_with_another_matrix_is_compared_as_it_is_stored(tmp_path: Path) -> None:
    other = _product(mixed=True, matrix=np.eye(GROUP, dtype=np.float32))
    (found,) = _weights(tmp_path, other, _product(mixed=False))
    assert found.figures["codes"] == N * K
