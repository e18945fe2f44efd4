"""Hidden layers that get the widths of CUDA's fast kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from phi4mm_export.quant.engine import Method, QuantSettings, quantize_graph
from tests.quantize.small_graphs import Reader, feeds, matrix, nodes_of, relative, run, save, two_layers


def quantized(source: Path, folder: Path, settings: QuantSettings) -> Path:
    folder.mkdir()
    quantize_graph(source, folder / "q.onnx", reader=Reader(feeds(6, 64, seed=1)), settings=settings)
    return folder / "q.onnx"


def widths(path: Path) -> list[tuple[int, int]]:
    """(K, N) of every quantized product."""
    nodes = [node for node in nodes_of(path) if node.op_type == "MatMulNBits"]
    numbers = [{attribute.name: attribute.i for attribute in node.attribute} for node in nodes]
    return [(number["K"], number["N"]) for number in numbers]


@pytest.mark.parametrize(
    "settings",
    [
        QuantSettings(block_size=32),
        QuantSettings(block_size=32, symmetric=False, rotate=True),
        QuantSettings(block_size=128, bits=8),
        QuantSettings(Method.RTN, block_size=32),
        QuantSettings(block_size=16, bias_correction=False),
    ],
)
def test_a_padded_graph_computes_what_the_unpadded_computes(tmp_path: Path, settings: QuantSettings) -> None:
    source = two_layers(tmp_path / "m.onnx")
    plain = quantized(source, tmp_path / "plain", settings)
    padded = quantized(source, tmp_path / "padded", QuantSettings(**{**vars(settings), "pad_for_cuda": True}))
    width = max(64, settings.block_size)
    assert widths(plain) == [(64, 48), (48, 40)]
    assert widths(padded) == [(64, width), (width, 40)]
    onnx.checker.check_model(str(padded))
    test = feeds(3, 64, seed=2)
    np.testing.assert_allclose(run(padded, test), run(plain, test), atol=1e-5)


def test_an_activation_of_several_operators_is_passed_and_its_stated_shape_forgotten(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["p"]),
        helper.make_node("Mul", ["p", "factor"], ["scaled"]),
        helper.make_node("Sigmoid", ["scaled"], ["gate"]),
        helper.make_node("Mul", ["p", "gate"], ["h"]),
        helper.make_node("MatMul", ["h", "w2"], ["y"]),
    ]
    weights = {"w1": matrix(64, 48), "b1": matrix(48), "w2": matrix(48, 40, seed=1), "factor": np.float32(1.7)}
    source = save(tmp_path / "m.onnx", nodes, weights, channels=64, width=40)
    model = onnx.load(source)
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["m", 48]))
    onnx.save(model, source)
    found = quantized(source, tmp_path / "out", QuantSettings(block_size=16, pad_for_cuda=True))
    assert widths(found) == [(64, 64), (64, 40)]
    assert [value.name for value in onnx.load(found).graph.value_info] == []
    test = feeds(3, 64, seed=2)
    assert relative(run(found, test), run(source, test)) < 0.2


def test_what_else_reads_a_hidden_layer_keeps_its_width(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["p"]),
        helper.make_node("Softmax", ["p"], ["h"]),
        helper.make_node("MatMul", ["h", "w2"], ["y"]),
    ]
    weights = {"w1": matrix(64, 48), "w2": matrix(48, 40, seed=1)}
    source = save(tmp_path / "m.onnx", nodes, weights, channels=64, width=40)
    found = quantized(source, tmp_path / "out", QuantSettings(block_size=16, pad_for_cuda=True))
    assert widths(found) == [(64, 48), (48, 40)]
