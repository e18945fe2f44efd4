"""Graphs of unusual makes: what stays in float is named, and nothing is in the quantizer's way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from phi4mm_export.errors import CheckpointError
from phi4mm_export.package.graph_io import read_graph_io
from phi4mm_export.quant.engine import Method, QuantSettings, quantize_graph
from phi4mm_export.quant.graph import read_graph
from tests.quantize.small_graphs import Reader, feeds, matrix, nodes_of, relative, run, save, two_layers


def reasons(path: Path, tmp_path: Path) -> dict[str, str]:
    """Label -> why it stayed in float, after rounding the rest."""
    result = quantize_graph(path, tmp_path / "q.onnx", reader=None, settings=QuantSettings(method=Method.RTN))
    return {layer.name: layer.reason for layer in result.layers if layer.method_used == "kept"}


def one_more(tmp_path: Path, nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray]) -> Path:
    """A graph with the given nodes, which give `p`, before a product that can be quantized."""
    last = helper.make_node("MatMul", ["p", "last"], ["y"], name="last")
    return save(tmp_path / "m.onnx", [*nodes, last], {**weights, "last": matrix(64, 40)}, channels=64, width=40)


@pytest.mark.parametrize("op", ["Transpose", "Identity", "Abs"])
def test_a_weight_that_is_computed_from_constants_is_named_and_stays(tmp_path: Path, op: str) -> None:
    nodes = [helper.make_node(op, ["w0"], ["w"]), helper.make_node("MatMul", ["x", "w"], ["p"], name="first")]
    source = one_more(tmp_path, nodes, {"w0": matrix(64, 64)})
    assert reasons(source, tmp_path) == {"first": f"goes through {op} before its product"}


def test_a_constant_left_factor_is_named_and_stays(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"]),
        helper.make_node("MatMul", ["w", "t"], ["q"], name="first"),
        helper.make_node("Transpose", ["q"], ["p"]),
    ]
    source = one_more(tmp_path, nodes, {"w": matrix(64, 64)})
    assert reasons(source, tmp_path) == {"first": "is the left factor of its product"}


def test_a_product_of_two_constants_stays(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["w"], name="first"),
        helper.make_node("MatMul", ["x", "w"], ["p"], name="second"),
    ]
    source = one_more(tmp_path, nodes, {"a": matrix(64, 32), "b": matrix(32, 64)})
    assert reasons(source, tmp_path) == {
        "first": "its input is a constant too",
        "second": "goes through MatMul before its product",
    }
    settings = QuantSettings(block_size=32)
    quantize_graph(source, tmp_path / "g.onnx", reader=Reader(feeds(2, 64, seed=1)), settings=settings)


def test_weights_of_functions_in_the_model_are_named_and_stay(tmp_path: Path) -> None:
    nodes = [helper.make_node("Lin", ["x", "w"], ["p"], name="call", domain="local")]
    source = one_more(tmp_path, nodes, {"w": matrix(64, 64)})
    model = onnx.load(source)
    inside = [
        helper.make_node("Constant", [], ["v"], value=numpy_helper.from_array(matrix(64, 64), "any")),
        helper.make_node("MatMul", ["a", "b"], ["c"]),
        helper.make_node("MatMul", ["c", "v"], ["d"]),
    ]
    model.functions.append(
        helper.make_function("local", "Lin", ["a", "b"], ["d"], inside, [helper.make_opsetid("", 17)])
    )
    model.opset_import.append(helper.make_opsetid("local", 1))
    onnx.save(model, source)
    assert reasons(source, tmp_path) == {
        "call": "is used inside the function Lin",
        "Lin/v": "is a constant of the function Lin",
    }


def test_a_sparse_weight_is_named_and_the_rest_is_calibrated(tmp_path: Path) -> None:
    source = one_more(tmp_path, [helper.make_node("MatMul", ["x", "w"], ["p"], name="first")], {})
    model = onnx.load(source)
    index = np.arange(0, 64 * 64, 7)
    values = numpy_helper.from_array(np.ones(len(index), np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(index, "i"), [64, 64])
    model.graph.sparse_initializer.append(sparse)
    onnx.save(model, source)
    given = feeds(3, 64, seed=1)
    settings = QuantSettings(block_size=32, bits=8)
    result = quantize_graph(source, tmp_path / "q.onnx", reader=Reader(given), settings=settings)
    assert [(layer.name, layer.reason) for layer in result.layers] == [("first", "is sparse"), ("last", "")]
    assert relative(run(tmp_path / "q.onnx", given), run(source, given)) < 0.02


def test_nodes_of_one_name_get_labels_that_no_other_node_has(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["p1"], name="n"),
        helper.make_node("MatMul", ["p1", "b"], ["p2"], name="n"),
        helper.make_node("MatMul", ["p2", "c"], ["p"], name="n#2"),
    ]
    source = one_more(tmp_path, nodes, {"a": matrix(64, 48), "b": matrix(48, 32), "c": matrix(32, 64)})
    settings = QuantSettings(block_size=32)
    result = quantize_graph(source, tmp_path / "q.onnx", reader=Reader(feeds(2, 64, seed=1)), settings=settings)
    assert [layer.name for layer in result.layers] == ["n", "n#2", "n#2#2", "last"]


@pytest.mark.parametrize("name", ["w.codes", "w.scales", "x.rotated64", "first.bias_corrected", "w.input"])
def test_values_whose_names_the_quantizer_would_choose_are_not_in_its_way(tmp_path: Path, name: str) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], [name], name="first"),
        helper.make_node("Relu", [name], ["p"]),
    ]
    source = one_more(tmp_path, nodes, {"w": matrix(64, 64), "phi4mm.rotation.64.float32": matrix(2, 2)})
    given = feeds(3, 64, seed=1)
    settings = QuantSettings(block_size=32, bits=8)
    quantize_graph(source, tmp_path / "q.onnx", reader=Reader(given), settings=settings)
    onnx.checker.check_model(str(tmp_path / "q.onnx"))
    assert relative(run(tmp_path / "q.onnx", given), run(source, given)) < 0.02


def test_a_graph_can_be_quantized_in_two_goes(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    given = feeds(3, 64, seed=1)
    for number, (name, before) in enumerate([("first", source), ("second", tmp_path / "q0.onnx")]):
        settings = QuantSettings(block_size=32, bits=8, include=(name,))
        target = tmp_path / f"q{number}.onnx"
        quantize_graph(before, target, reader=Reader(given), settings=settings)
    onnx.checker.check_model(str(target))
    assert [node.op_type for node in nodes_of(target)].count("MatMulNBits") == 2
    assert relative(run(target, given), run(source, given)) < 0.02


def test_a_name_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    model = onnx.load(source)
    model.graph.initializer.append(numpy_helper.from_array(matrix(64, 48, seed=9), "w1"))
    onnx.save(model, source)
    with pytest.raises(CheckpointError, match="w1 is stored more than once, expected one tensor a name"):
        quantize_graph(source, tmp_path / "q.onnx", reader=None, settings=QuantSettings(method=Method.RTN))


@pytest.mark.parametrize("method", [Method.RTN, Method.GPTQ])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused_with_the_way_to_leave_it_out(
    tmp_path: Path, method: Method, value: float
) -> None:
    source = two_layers(tmp_path / "m.onnx")
    model = onnx.load(source)
    bad = matrix(64, 48)
    bad[3, 5] = value
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(bad, "w1"))
    onnx.save(model, source)
    given = Reader(feeds(2, 64, seed=1))
    message = r"m.onnx: w1: found values that are NaN or infinite \(1\), .* --exclude 'first'"
    with pytest.raises(CheckpointError, match=message):
        quantize_graph(source, tmp_path / "q.onnx", reader=given, settings=QuantSettings(method=method))
    settings = QuantSettings(method=method, exclude=("first",))
    result = quantize_graph(source, tmp_path / "q.onnx", reader=None, settings=settings) if method == "rtn" else None
    assert result is None or [layer.method_used for layer in result.layers] == ["kept", "rtn"]


@pytest.mark.parametrize("method", [Method.RTN, Method.GPTQ])
def test_weights_too_small_for_the_element_type_of_their_scales_are_refused(tmp_path: Path, method: Method) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="only")
    tiny = (matrix(64, 48) * 2e-6).astype(np.float16)
    source = save(tmp_path / "m.onnx", [node], {"w": tiny}, channels=64, width=48, element=onnx.TensorProto.FLOAT16)
    given = [{"x": feed["x"].astype(np.float16)} for feed in feeds(2, 64, seed=1)]
    settings = QuantSettings(method=method, bits=8)
    with pytest.raises(CheckpointError, match=r"m.onnx: w: the largest value is .*, too small for scales in float16"):
        quantize_graph(source, tmp_path / "q.onnx", reader=Reader(given), settings=settings)


def test_a_constant_of_an_unknown_element_type_is_refused_by_name(tmp_path: Path) -> None:
    tensor = onnx.TensorProto(name="w", dims=[2], data_type=33, raw_data=bytes(8))
    node = helper.make_node("Identity", ["w"], ["y"])
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "g", [], [output], [tensor])), path)
    with pytest.raises(CheckpointError, match=r"m\.onnx: w: .*33"):
        read_graph(path).constant("w")


def test_constants_that_an_old_graph_lists_among_its_inputs_are_quantized(tmp_path: Path) -> None:
    source = save(
        tmp_path / "m.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"w": matrix(64, 40)},
        channels=64,
        width=40,
    )
    model = onnx.load(source)
    model.ir_version = 3
    model.opset_import[0].version = 8
    model.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [64, 40]))
    onnx.save(model, source)
    result = quantize_graph(
        source, tmp_path / "q.onnx", reader=Reader(feeds(4, 64, seed=1)), settings=QuantSettings(block_size=32)
    )
    assert [layer.method_used for layer in result.layers] == ["gptq"]
    onnx.checker.check_model(str(tmp_path / "q.onnx"))
    inputs = feeds(1, 64, seed=2)
    assert relative(run(tmp_path / "q.onnx", inputs), run(source, inputs)) < 0.2
    assert read_graph_io(tmp_path / "q.onnx") == read_graph_io(source)
