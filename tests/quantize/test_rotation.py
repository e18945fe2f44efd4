"""Products whose inputs are rotated before they meet the rounded weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from phi4mm_export.quant.engine import Method, QuantSettings, quantize_graph
from phi4mm_export.quant.hessian import moments, rotated_moments
from phi4mm_export.weights.rotation import rotated, rotated_both, rotation_matrix, rotation_size, turned_back
from tests.quantize.small_graphs import Feed, Reader, feeds, matrix, nodes_of, relative, run, save, two_layers


def quantized(source: Path, folder: Path, samples: list[Feed], settings: QuantSettings) -> Path:
    folder.mkdir()
    quantize_graph(source, folder / "q.onnx", reader=Reader(samples), settings=settings)
    return folder / "q.onnx"


@pytest.mark.parametrize(("channels", "size"), [(384, 128), (1152, 128), (4304, 16), (48, 16), (40, 0), (7, 0)])
def test_groups_are_the_largest_power_of_two_that_divides_the_channels(channels: int, size: int) -> None:
    assert rotation_size(channels) == size


def test_the_rotation_is_orthogonal_and_turns_back() -> None:
    matrix_of_inputs = rotation_matrix(64).astype(np.float64)
    np.testing.assert_allclose(matrix_of_inputs @ matrix_of_inputs.T, np.eye(64), atol=1e-6)
    weight = np.random.default_rng(0).standard_normal((128, 5))
    np.testing.assert_allclose(turned_back(rotated(weight, 64), 64), weight, atol=1e-14)
    x = np.random.default_rng(1).standard_normal((3, 128))
    turned = (x.reshape(-1, 64) @ matrix_of_inputs).reshape(3, 128)
    np.testing.assert_allclose(turned @ rotated(weight, 64), x @ weight, atol=1e-5)


def test_moments_can_be_rotated_in_place_of_the_inputs() -> None:
    samples = [feed["x"] for feed in feeds(3, 64, seed=1)]
    exact = [x + 0.1 for x in samples]
    turn = rotation_matrix(64)
    seen = moments(zip(exact, samples, strict=True), 64, flip=False)
    direct = moments(((e @ turn, x @ turn) for e, x in zip(exact, samples, strict=True)), 64, flip=False)
    assert seen is not None
    assert direct is not None
    found = rotated_moments(seen, 64)
    scale = np.abs(direct.hessian).max()
    np.testing.assert_allclose(found.hessian, direct.hessian, atol=1e-5 * scale)
    np.testing.assert_array_equal(found.hessian, found.hessian.T)
    np.testing.assert_allclose(found.mean, direct.mean, atol=1e-5)


@pytest.mark.parametrize("method", [Method.GPTQ, Method.RTN])
def test_a_rotated_graph_computes_the_same_products(tmp_path: Path, method: Method) -> None:
    source, samples = two_layers(tmp_path / "m.onnx"), feeds(6, 64, seed=1)
    settings = QuantSettings(method=method, bits=8, block_size=32, rotate=True)
    found = quantized(source, tmp_path / "out", samples, settings)
    onnx.checker.check_model(str(found))
    assert relative(run(found, samples), run(source, samples)) < 0.01


def test_products_of_one_input_share_one_rotation(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", name], [f"p{name}"]) for name in ("w1", "w2")]
    nodes.append(helper.make_node("Add", ["pw1", "pw2"], ["y"]))
    weights = {"w1": matrix(64, 24, seed=1), "w2": matrix(64, 24, seed=2)}
    source = save(tmp_path / "m.onnx", nodes, weights, channels=64, width=24)
    samples = feeds(4, 64, seed=1)
    found = quantized(source, tmp_path / "out", samples, QuantSettings(block_size=32, rotate=True))
    kinds = [node.op_type for node in nodes_of(found)]
    assert kinds.count("Shape") == 1
    assert kinds.count("MatMulNBits") == 2
    assert relative(run(found, samples), run(source, samples)) < 0.3


def test_inputs_with_one_large_channel_come_out_better_rotated(tmp_path: Path) -> None:
    weights = {"w": matrix(64, 48, seed=1)}
    weights["w"][5] *= 20
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    source = save(tmp_path / "m.onnx", nodes, weights, channels=64, width=48)
    samples, others = feeds(8, 64, seed=1), feeds(4, 64, seed=2)
    for feed in (*samples, *others):
        feed["x"][:, 5] *= 0.05
    exact = run(source, others)
    plain, turned = (
        relative(
            run(quantized(source, tmp_path / str(r), samples, QuantSettings(block_size=64, rotate=r)), others), exact
        )
        for r in (False, True)
    )
    assert turned < plain


def test_widths_without_a_group_of_channels_stay_unrotated(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    source = save(tmp_path / "m.onnx", nodes, {"w": matrix(40, 24)}, channels=40, width=24)
    found = quantized(source, tmp_path / "out", feeds(4, 40, seed=1), QuantSettings(block_size=16, rotate=True))
    assert [node.op_type for node in nodes_of(found)] == ["MatMulNBits"]


def test_a_matrix_turned_on_both_sides_at_once_has_the_bits_of_one_side_after_the_other() -> None:
    x = np.random.default_rng(0).standard_normal((304, 304))
    one_by_one = rotated(rotated(x, 16).T, 16).T
    for jobs in (1, 2):
        np.testing.assert_array_equal(rotated_both(x, 16, jobs=jobs), one_by_one)
