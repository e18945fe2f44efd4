"""Layers of two graphs paired by name, and inner values read and replaced, on graphs built by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from phi4mm_export.checks.layers import LayerComparison, find_layers
from phi4mm_export.errors import PackageError
from phi4mm_export.runtime.probes import ProbedGraph

WIDTH = 6
FEEDS = {"x": np.random.default_rng(1).standard_normal((4, WIDTH)).astype(np.float32)}


def tower(folder: Path, name: str, *, spoilt: int | None = None, prefix: str = "tower/") -> Path:
    """Three layers y = x W + b, a residual around each; external weights; noise in one layer's W."""
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    for index in range(3):
        W, b = rng.standard_normal((WIDTH, WIDTH)) / 3, rng.standard_normal(WIDTH)
        if index == spoilt:
            W = W + np.random.default_rng(7).standard_normal(W.shape) / 10
        layer, source = f"{prefix}fc{index}", "x" if index == 0 else f"h{index - 1}"
        weights += [numpy_helper.from_array(v.astype(np.float32), f"{layer}.{k}") for k, v in (("W", W), ("b", b))]
        nodes += [
            helper.make_node("MatMul", [source, f"{layer}.W"], [f"{layer}/product"], name=f"{layer}/MatMul"),
            helper.make_node("Add", [f"{layer}/product", f"{layer}.b"], [f"{layer}/sum"], name=f"{layer}/Add"),
            helper.make_node("Add", [f"{layer}/sum", source], [f"h{index}"], name=f"Residual{index}"),
        ]
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["n", WIDTH]) for end in ("x", "h2")]
    graph = helper.make_graph(nodes, "tower", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = folder / f"{name}.onnx"
    onnx.save(model, path, save_as_external_data=True, location=f"{name}.data", size_threshold=0)
    return path


def compared(folder: Path, *, spoilt: int | None) -> LayerComparison:
    found = ProbedGraph(tower(folder, "found", spoilt=spoilt), "found.onnx")
    return LayerComparison(found, ProbedGraph(tower(folder, "float"), "float.onnx"), FEEDS, FEEDS)


def test_a_layer_is_everything_under_its_name_and_its_result_is_the_last_node(tmp_path: Path) -> None:
    model = onnx.load(tower(tmp_path, "float"), load_external_data=False)
    layers = find_layers(model)
    assert list(layers) == ["tower/fc0", "tower/fc1", "tower/fc2"]
    assert layers["tower/fc1"].outputs == ("tower/fc1/sum",)
    assert (layers["tower/fc1"].operator, layers["tower/fc1"].bits) == ("MatMul", 32)
    assert layers["tower/fc1"].nbytes == 4 * WIDTH * WIDTH  # the bias is too small to be a weight


def test_codes_in_the_body_of_an_if_count_for_its_bits() -> None:
    code = helper.make_node("MatMulNBits", ["x", "c", "s"], ["p"], domain="com.microsoft", K=16, N=4, bits=4)
    plain = helper.make_node("Identity", ["x"], ["q"])
    bodies = {
        branch: helper.make_graph([node], branch, [], [helper.make_tensor_value_info(end, TensorProto.FLOAT, None)])
        for branch, node, end in (("then_branch", code, "p"), ("else_branch", plain, "q"))
    }
    choice = helper.make_node("If", ["speech"], ["y"], name="tower/out/If", **bodies)
    weights = [numpy_helper.from_array(np.zeros((4, 8), np.uint8), "c")]
    model = helper.make_model(helper.make_graph([choice], "tower", [], [], weights))
    assert find_layers(model)["tower/out"].bits == 4


def test_only_the_spoilt_layer_makes_an_error_and_the_later_ones_carry_it(tmp_path: Path) -> None:
    rows = compared(tmp_path, spoilt=1).errors()
    assert [bool(row.made) for row in rows] == [False, True, False]
    assert [bool(row.accumulated) for row in rows] == [False, True, True]
    assert rows[1].made == rows[1].accumulated


def test_the_error_of_a_layer_is_that_of_numpy(tmp_path: Path) -> None:
    found, expected = tower(tmp_path, "found", spoilt=0), tower(tmp_path, "float")
    W, W_float = (numpy_helper.to_array(onnx.load(path).graph.initializer[0]) for path in (found, expected))
    b = numpy_helper.to_array(onnx.load(expected).graph.initializer[1])
    want = np.linalg.norm(FEEDS["x"] @ (W - W_float)) / np.linalg.norm(FEEDS["x"] @ W_float + b)
    assert compared(tmp_path, spoilt=0).errors()[0].made == pytest.approx(want, rel=1e-4)


def test_the_spoilt_layer_alone_explains_the_whole_error_of_the_output(tmp_path: Path) -> None:
    comparison = compared(tmp_path, spoilt=1)
    impacts = comparison.impacts(comparison.errors(), "h2", 5)
    runs = [ProbedGraph(tmp_path / f"{name}.onnx", name).read(FEEDS, ["h2"])["h2"] for name in ("found", "float")]
    assert [impact.layer for impact in impacts] == ["tower/fc1"]
    assert impacts[0].impact == pytest.approx(np.linalg.norm(runs[0] - runs[1]) / np.linalg.norm(runs[1]), rel=1e-4)


def test_small_groups_give_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compared(tmp_path, spoilt=1).errors()
    monkeypatch.setattr("phi4mm_export.checks.layers.MAX_NBYTES", 1)
    assert [(row.layer, bool(row.made)) for row in compared(tmp_path, spoilt=1).errors()] == [
        (row.layer, bool(row.made)) for row in whole
    ]


def test_graphs_of_different_makers_are_not_comparable(tmp_path: Path) -> None:
    found = ProbedGraph(tower(tmp_path, "found", prefix="other/"), "found.onnx")
    comparison = LayerComparison(found, ProbedGraph(tower(tmp_path, "float"), "float.onnx"), FEEDS, FEEDS)
    assert not comparison.comparable


def test_a_replaced_value_reaches_its_readers_and_its_own_name_tells_what_was_made(tmp_path: Path) -> None:
    graph = ProbedGraph(tower(tmp_path, "float"), "float.onnx")
    plain = graph.read(FEEDS, ["h0", "h1"])
    zeros = np.zeros_like(plain["h0"])
    replaced = graph.read(FEEDS, ["h0", "h1"], {"h0": zeros})
    assert np.array_equal(replaced["h0"], plain["h0"])
    b = numpy_helper.to_array(onnx.load(tmp_path / "float.onnx").graph.initializer[3])
    assert np.allclose(replaced["h1"], np.broadcast_to(b, zeros.shape), atol=1e-6)


def test_shapes_are_read_without_the_values(tmp_path: Path) -> None:
    graph = ProbedGraph(tower(tmp_path, "float"), "float.onnx")
    assert graph.shapes(FEEDS, ["h0", "tower/fc1/product"]) == {"h0": (4, WIDTH), "tower/fc1/product": (4, WIDTH)}


def test_a_graph_that_cannot_be_cut_names_its_file(tmp_path: Path) -> None:
    graph = ProbedGraph(tower(tmp_path, "float"), "vision/model.onnx")
    with pytest.raises(PackageError, match=r"vision/model\.onnx"):
        graph.read(FEEDS, ["nowhere"])


def test_nothing_is_written_beside_the_graph(tmp_path: Path) -> None:
    compared(tmp_path, spoilt=1).errors()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float.data", "float.onnx", "found.data", "found.onnx"]


def test_the_matrix_that_rotates_inputs_is_no_weight_of_a_layer() -> None:
    codes = numpy_helper.from_array(np.zeros((8, 1, 16), np.uint8), "layer.qweight")
    turn = numpy_helper.from_array(np.eye(16, dtype=np.float32), "rotation.16")
    nodes = [
        helper.make_node("MatMul", ["x", "rotation.16"], ["t"], name="model/layer/MatMul"),
        helper.make_node(
            "MatMulNBits", ["t", "layer.qweight"], ["y"], name="model/layer/MatMulNBits", domain="com.microsoft", bits=8
        ),
    ]
    graph = helper.make_graph(nodes, "g", [], [], [codes, turn])
    (layer,) = find_layers(helper.make_model(graph)).values()
    assert (layer.operator, layer.bits, layer.nbytes) == ("MatMulNBits", 8, 128)
