"""Which products are found, and what happens to those that cannot be quantized."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from phi4mm_export.errors import CheckpointError, QualityError, UsageError
from phi4mm_export.quant.engine import LayerReport, Method, QuantSettings, quantize_graph
from tests.quantize.small_graphs import Reader, feeds, matrix, nodes_of, relative, run, save, two_layers

FINE = QuantSettings(bits=8, block_size=16)
"""Codes so fine that a wrong transposition, scale or bias shows."""


def quantized(source: Path, settings: QuantSettings, *, channels: int = 64) -> tuple[Path, tuple[LayerReport, ...]]:
    folder = source.parent / "out"
    folder.mkdir()
    result = quantize_graph(source, folder / "q.onnx", reader=Reader(feeds(6, channels, seed=1)), settings=settings)
    onnx.checker.check_model(str(folder / "q.onnx"))
    return folder / "q.onnx", result.layers


@pytest.mark.parametrize("method", [Method.GPTQ, Method.RTN])
def test_a_gemm_keeps_its_transposition_factors_and_addend(tmp_path: Path, method: Method) -> None:
    node = helper.make_node("Gemm", ["x", "w", "c"], ["y"], transB=1, alpha=0.5, beta=3.0)
    source = save(tmp_path / "m.onnx", [node], {"w": matrix(40, 64), "c": matrix(40, seed=5)}, channels=64, width=40)
    path, layers = quantized(source, QuantSettings(method=method, bits=8, block_size=16))
    assert [layer.method_used for layer in layers] == [str(method)]
    assert [n.op_type for n in nodes_of(path)] == ["MatMulNBits"]
    test = feeds(3, 64, seed=2)
    assert relative(run(path, test), run(source, test)) < 0.01


def test_a_gemm_that_transposes_its_input_gets_a_transpose(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("Gemm", ["t", "w"], ["y"], transA=1),
    ]
    source = save(tmp_path / "m.onnx", nodes, {"w": matrix(64, 40)}, channels=64, width=40)
    path, _ = quantized(source, FINE)
    assert [n.op_type for n in nodes_of(path)] == ["Transpose", "Transpose", "MatMulNBits"]
    test = feeds(3, 64, seed=2)
    assert relative(run(path, test), run(source, test)) < 0.01


def test_a_fused_product_with_a_transposed_weight_is_found(tmp_path: Path) -> None:
    node = helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft", transB=1, alpha=2.0)
    source = save(tmp_path / "m.onnx", [node], {"w": matrix(40, 64)}, channels=64, width=40)
    path, _ = quantized(source, FINE)
    test = feeds(3, 64, seed=2)
    assert relative(run(path, test), run(source, test)) < 0.01


def test_a_weight_in_a_constant_node_is_found(tmp_path: Path) -> None:
    value = numpy_helper.from_array(matrix(64, 40))
    nodes = [helper.make_node("Constant", [], ["w"], value=value), helper.make_node("MatMul", ["x", "w"], ["y"])]
    path, layers = quantized(save(tmp_path / "m.onnx", nodes, {}, channels=64, width=40), FINE)
    assert [n.op_type for n in nodes_of(path)] == ["MatMulNBits"]
    assert layers[0].weight == "w"


def test_float16_weights_stay_float16_around_the_codes(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    half = onnx.TensorProto.FLOAT16
    weights = {"w": matrix(64, 40).astype(np.float16)}
    source = save(tmp_path / "m.onnx", [node], weights, channels=64, width=40, element=half)
    samples = [{"x": feed["x"].astype(np.float16)} for feed in feeds(6, 64, seed=1)]
    target = tmp_path / "q.onnx"
    quantize_graph(source, target, reader=Reader(samples), settings=FINE)
    scales = next(t for t in onnx.load(target).graph.initializer if t.name.endswith("scales"))
    assert scales.data_type == half
    assert relative(run(target, samples), run(source, samples)) < 0.01


def test_inputs_narrower_than_their_last_block_are_padded(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    source = save(tmp_path / "m.onnx", [node], {"w": matrix(72, 40)}, channels=72, width=40)
    for symmetric in (True, False):
        target = tmp_path / f"q{symmetric}.onnx"
        settings = QuantSettings(bits=4, block_size=16, symmetric=symmetric)
        quantize_graph(source, target, reader=Reader(feeds(6, 72, seed=1)), settings=settings)
        test = feeds(3, 72, seed=2)
        assert relative(run(target, test), run(source, test)) < 0.1


def test_a_weight_with_two_readers_is_left_alone_and_reported(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="one"),
        helper.make_node("MatMul", ["h", "w"], ["g"], name="two"),
        helper.make_node("MatMul", ["g", "v"], ["y"], name="three"),
    ]
    weights = {"w": matrix(64, 64), "v": matrix(64, 40, seed=1)}
    path, layers = quantized(save(tmp_path / "m.onnx", nodes, weights, channels=64, width=40), FINE)
    assert [n.op_type for n in nodes_of(path)] == ["MatMul", "MatMul", "MatMulNBits"]
    kept = [layer for layer in layers if layer.method_used == "kept"]
    assert [layer.reason for layer in kept] == ["is used in 2 places"] * 2


@pytest.mark.parametrize("method", list(Method)[:2])
def test_a_weight_read_in_pieces_gives_the_bytes_of_one_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    nodes = [
        helper.make_node("FusedMatMul", ["x", "t"], ["h"], transB=1, domain="com.microsoft"),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    weights = {"t": matrix(48, 64), "w": matrix(48, 40, seed=1)}
    inline = save(tmp_path / "inline.onnx", nodes, weights, channels=64, width=40)
    external = tmp_path / "external.onnx"
    onnx.save(onnx.load(inline), external, save_as_external_data=True, location="weights", size_threshold=0)
    monkeypatch.setattr("phi4mm_export.quant.weight.TILE_OUTPUTS", 7)
    found = []
    for source, most in ((inline, 0), (external, 0), (external, 1 << 20)):
        monkeypatch.setattr("phi4mm_export.quant.weight.WHOLE_NBYTES", most)
        folder = tmp_path / f"{source.stem}-{most}"
        folder.mkdir()
        settings = QuantSettings(method, block_size=16)
        quantize_graph(source, folder / "q.onnx", reader=Reader(feeds(4, 64, seed=1)), settings=settings)
        found.append((folder / "q.onnx.data").read_bytes())
    assert found[0] == found[1] == found[2]


def test_exclude_and_include_match_node_and_weight_names(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    for number, (settings, expected) in enumerate(
        [
            (QuantSettings(bits=8, block_size=16, exclude=("first",)), ["kept", "gptq"]),
            (QuantSettings(bits=8, block_size=16, exclude=("w2*",)), ["gptq", "kept"]),
            (QuantSettings(bits=8, block_size=16, include=("sec*",)), ["kept", "gptq"]),
        ]
    ):
        target = tmp_path / f"q{number}.onnx"
        result = quantize_graph(source, target, reader=Reader(feeds(4, 64, seed=1)), settings=settings)
        assert [layer.method_used for layer in result.layers] == expected


def test_nothing_to_quantize_is_a_failure(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    with pytest.raises(QualityError, match="first is excluded, second is excluded"):
        quantize_graph(source, tmp_path / "q.onnx", reader=None, settings=QuantSettings(Method.RTN, exclude=("*",)))


def test_products_inside_an_if_see_only_the_samples_that_reach_them(tmp_path: Path) -> None:
    def body(name: str, weight: str, factor: str) -> onnx.GraphProto:
        nodes = [
            helper.make_node("MatMul", ["x", weight], [f"{name}.a"], name=f"{name}.product"),
            helper.make_node("Relu", [f"{name}.a"], [f"{name}.r"]),
            helper.make_node("MatMul", [f"{name}.r", factor], [f"{name}.y"], name=f"{name}.second"),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}.y", 1, None)])

    then, other = body("then", "w1", "u1"), body("else", "w2", "u2")
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Greater", ["top", "limit"], ["big"]),
        helper.make_node("If", ["big"], ["y"], then_branch=then, else_branch=other),
    ]
    weights = {
        "limit": np.array(1e9, np.float32),
        "w1": matrix(64, 32),
        "u1": matrix(32, 40),
        "w2": matrix(64, 32, seed=1),
        "u2": matrix(32, 40, seed=2),
    }
    source = save(tmp_path / "m.onnx", nodes, weights, channels=64, width=40)
    path, layers = quantized(source, FINE)
    assert {layer.name: layer.method_used for layer in layers} == {
        "then.product": "rtn",
        "then.second": "rtn",
        "else.product": "gptq",
        "else.second": "gptq",
    }
    assert next(layer for layer in layers if layer.method_used == "rtn").reason == "no calibration sample reaches it"
    test = feeds(3, 64, seed=2)
    assert relative(run(path, test), run(source, test)) < 0.02


def test_weights_that_stand_inside_a_body_are_reported_as_kept(tmp_path: Path) -> None:
    def body(name: str, weight: str) -> onnx.GraphProto:
        deep = helper.make_graph(
            [helper.make_node("MatMul", ["x", f"{name}.deep"], [f"{name}.z"], name=f"{name}.deepest")],
            f"{name}.inner",
            [],
            [helper.make_tensor_value_info(f"{name}.z", 1, None)],
            [numpy_helper.from_array(matrix(64, 40), f"{name}.deep")],
        )
        nodes = [
            helper.make_node("MatMul", ["x", weight], [f"{name}.a"], name=f"{name}.product"),
            helper.make_node("If", ["big"], [f"{name}.b"], then_branch=deep, else_branch=deep),
            helper.make_node("Add", [f"{name}.a", f"{name}.b"], [f"{name}.y"]),
        ]
        own = numpy_helper.from_array(matrix(64, 40, seed=1), f"{name}.own")
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}.y", 1, None)], [own])

    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Greater", ["top", "limit"], ["big"]),
        helper.make_node("If", ["big"], ["c"], then_branch=body("then", "then.own"), else_branch=body("else", "w")),
        helper.make_node("MatMul", ["c", "v"], ["y"], name="last"),
    ]
    weights = {"limit": np.array(0, np.float32), "w": matrix(64, 40), "v": matrix(40, 40, seed=1)}
    source = save(tmp_path / "m.onnx", nodes, weights, channels=64, width=40)
    _, layers = quantized(source, FINE)
    assert [(layer.name, layer.method_used, layer.reason) for layer in layers] == [
        ("else.product", "rtn", "no calibration sample reaches it"),
        ("else.deepest", "kept", "stands in a nested body"),
        ("else.deepest#2", "kept", "stands in a nested body"),
        ("then.product", "kept", "is a constant of a body"),
        ("then.deepest", "kept", "stands in a nested body"),
        ("then.deepest#2", "kept", "stands in a nested body"),
        ("last", "gptq", ""),
    ]


def test_a_sample_without_an_input_is_refused_by_name(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="sample 1 has no array for the graph's input x"):
        quantize_graph(source, tmp_path / "q.onnx", reader=Reader([{"z": np.zeros(3)}]), settings=QuantSettings())


def test_a_sample_of_a_wrong_shape_is_refused_in_one_sentence(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    wrong = [{"x": np.zeros((4, 7), np.float32)}]
    with pytest.raises(UsageError, match=r"got an input of shape \[4, 7\], expected 64"):
        quantize_graph(source, tmp_path / "q.onnx", reader=Reader(wrong), settings=QuantSettings())


def test_what_onnxruntime_refuses_is_reported_in_its_words(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["s"]), helper.make_node("MatMul", ["s", "w"], ["y"])]
    source = save(tmp_path / "m.onnx", nodes, {"b": matrix(64), "w": matrix(64, 40)}, channels=64, width=40)
    wrong = [{"x": np.zeros((4, 7), np.float32)}]
    with pytest.raises(CheckpointError, match="onnxruntime cannot run this graph on a calibration sample"):
        quantize_graph(source, tmp_path / "q.onnx", reader=Reader(wrong), settings=QuantSettings())
