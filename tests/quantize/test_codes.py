"""Codes, scales and zero points as onnxruntime's kernel reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from phi4mm_export.quant.codes import Codes, Grid
from phi4mm_export.quant.rewrite import packed_codes, packed_zeros
from phi4mm_export.quant.rtn import round_to_nearest
from tests.quantize.small_graphs import matrix, relative, run


def random_codes(channels: int, outputs: int, grid: Grid) -> Codes:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, grid.top + 1, (channels, outputs), np.uint8)
    blocks = grid.blocks(channels)
    scales = rng.choice([-1.0, 1.0], (blocks, outputs)) * rng.uniform(0.5, 2, (blocks, outputs))
    zeros = None if grid.symmetric else rng.integers(0, grid.top + 1, (blocks, outputs), np.uint8)
    return Codes(grid, codes, scales.astype(grid.scale_type), zeros)


def kernel_values(tmp_path: Path, codes: Codes) -> NDArray[np.float64]:
    """What MatMulNBits multiplies by: its output for the identity matrix."""
    size, width = codes.codes.shape
    arrays = {"b": packed_codes(codes), "s": np.ascontiguousarray(codes.scales.T)}
    if codes.zeros is not None:
        arrays["z"] = packed_zeros(codes)
    node = helper.make_node(
        "MatMulNBits", ["x", *arrays], ["y"], domain="com.microsoft", K=size, N=width,
        bits=codes.grid.bits, block_size=codes.grid.block_size,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", 1, ["m", size])],
        [helper.make_tensor_value_info("y", 1, ["m", width])],
        [numpy_helper.from_array(value, name) for name, value in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "k.onnx")
    return run(tmp_path / "k.onnx", [{"x": np.eye(size, dtype=np.float32)}])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "block", "channels"), [(4, 16, 48), (4, 32, 96), (4, 32, 100), (4, 128, 144), (8, 32, 96), (8, 16, 40)]
)
def test_the_kernel_computes_the_values_of_the_codes(
    tmp_path: Path, bits: int, block: int, channels: int, symmetric: bool
) -> None:
    codes = random_codes(channels, 24, Grid(bits, block, symmetric, np.dtype(np.float32)))
    np.testing.assert_allclose(kernel_values(tmp_path, codes), codes.values(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_counted_are_the_bytes_written(bits: int, symmetric: bool) -> None:
    grid = Grid(bits, 32, symmetric, np.dtype(np.float16))
    codes = random_codes(96, 10, grid)
    written = packed_codes(codes).nbytes + codes.scales.nbytes
    written += 0 if codes.zeros is None else packed_zeros(codes).nbytes
    assert grid.nbytes(96, 10) == written


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "limit"), [(4, 0.12), (8, 0.008)])
def test_rounding_to_nearest_stays_within_half_a_step(bits: int, limit: float, symmetric: bool) -> None:
    weight = matrix(100, 16)
    codes = round_to_nearest(weight, Grid(bits, 32, symmetric, np.dtype(np.float32)))
    assert relative(codes.values(), weight) < limit


def test_zero_weights_become_exact_zeros() -> None:
    for symmetric in (True, False):
        codes = round_to_nearest(np.zeros((32, 4), np.float32), Grid(4, 16, symmetric, np.dtype(np.float32)))
        assert not codes.values().any()
