"""onnxruntime's and neural-compressor's quantizers behind our readers; and what ours does not share with them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from phi4mm_export.errors import CheckpointError, MissingExtraError, UsageError
from phi4mm_export.quant.arithmetic import PLAIN, upper_factor
from phi4mm_export.quant.codes import Grid
from phi4mm_export.quant.engine import QuantSettings, quantize_graph
from phi4mm_export.quant.engines.neural_compressor import gptq_layer
from phi4mm_export.quant.engines.onnxruntime import OrtAlgorithm, quantize_with_onnxruntime
from phi4mm_export.quant.gptq import Solver
from tests.quantize.small_graphs import Reader, feeds, matrix, nodes_of, relative, run, two_layers

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(
    not HAS_TORCH, reason="onnxruntime imports torch for its GPTQ; make test-reference has it"
)
HAS_INC = importlib.util.find_spec("neural_compressor") is not None
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def foreign(source: Path, name: str, algorithm: OrtAlgorithm, seed: int = 1) -> tuple[Path, str]:
    target = source.parent / f"{name}.onnx"
    reader = Reader(feeds(3, 64, seed=seed))
    _, warning = quantize_with_onnxruntime(source, target, algorithm=algorithm, reader=reader, block_size=32)
    return target, warning


def ours(source: Path, name: str, seed: int = 1) -> Path:
    target = source.parent / f"{name}.onnx"
    settings = QuantSettings(block_size=32)
    quantize_graph(source, target, reader=Reader(feeds(12, 64, seed=seed)), settings=settings)
    return target


def bytes_of(path: Path) -> bytes:
    return (path.parent / f"{path.name}.data").read_bytes()


@needs_torch
def test_calibration_data_do_not_reach_the_bundled_gptq_and_reach_ours(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    (a, warning), (b, _) = (foreign(source, f"f{seed}", OrtAlgorithm.GPTQ, seed) for seed in (1, 2))
    assert bytes_of(a) == bytes_of(b)
    assert "compensates no error" in warning
    assert bytes_of(ours(source, "o1", 1)) != bytes_of(ours(source, "o2", 2))


@needs_torch
def test_the_bundled_gptq_is_worse_than_rounding_and_ours_is_better(tmp_path: Path) -> None:
    source, test = two_layers(tmp_path / "m.onnx"), feeds(4, 64, seed=7)
    exact = run(source, test)
    bundled, nearest = (foreign(source, a, a)[0] for a in (OrtAlgorithm.GPTQ, OrtAlgorithm.RTN))
    errors = [relative(run(path, test), exact) for path in (bundled, nearest, ours(source, "ours"))]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize(
    "algorithm", [a for a in OrtAlgorithm if HAS_TORCH or a not in (OrtAlgorithm.HQQ, OrtAlgorithm.GPTQ)]
)
def test_every_bundled_algorithm_gives_a_graph_that_runs(tmp_path: Path, algorithm: OrtAlgorithm) -> None:
    source, test = two_layers(tmp_path / "m.onnx"), feeds(2, 64, seed=7)
    path, _ = foreign(source, "f", algorithm)
    assert [node.op_type for node in nodes_of(path)].count("MatMulNBits") == 2
    assert relative(run(path, test), run(source, test)) < 0.3


@needs_torch
def test_nodes_without_names_are_named_for_the_bundled_gptq_and_done_by_ours(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx", named=False)
    for path in (foreign(source, "f", OrtAlgorithm.GPTQ)[0], ours(source, "o")):
        assert [node.op_type for node in nodes_of(path)] == ["MatMulNBits", "Add", "Relu", "MatMulNBits"]


def test_odd_block_counts_stop_the_bundled_packer_and_not_ours(tmp_path: Path) -> None:
    source, samples = two_layers(tmp_path / "m.onnx", channels=96), feeds(6, 96, seed=1)
    with pytest.raises(CheckpointError, match="cannot pack zero points for an odd number of blocks"):
        quantize_with_onnxruntime(
            source, tmp_path / "f.onnx", algorithm=OrtAlgorithm.K_QUANT, reader=None, block_size=32, symmetric=False
        )
    settings = QuantSettings(block_size=32, symmetric=False)
    quantize_graph(source, tmp_path / "o.onnx", reader=Reader(samples), settings=settings)
    test = feeds(3, 96, seed=4)
    assert relative(run(tmp_path / "o.onnx", test), run(source, test)) < 0.1


def test_an_exhausted_reader_is_refused_for_the_bundled_gptq(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="without calibration samples"):
        quantize_with_onnxruntime(
            source, tmp_path / "f.onnx", algorithm=OrtAlgorithm.GPTQ, reader=Reader([]), block_size=32
        )


def test_eight_bits_are_eight_bits(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    settings = QuantSettings(bits=8, block_size=32)
    quantize_graph(source, tmp_path / "q.onnx", reader=Reader(feeds(3, 64, seed=1)), settings=settings)
    bits = [a.i for node in nodes_of(tmp_path / "q.onnx") for a in node.attribute if a.name == "bits"]
    assert bits == [8, 8]


@pytest.mark.skipif(HAS_INC, reason="neural-compressor is installed")
def test_without_neural_compressor_the_extra_is_named() -> None:
    with pytest.raises(MissingExtraError, match="needs neural-compressor") as caught:
        gptq_layer(matrix(32, 8), [matrix(4, 32)], Grid(4, 32, True, np.dtype(np.float32)), 0.01)
    assert "phi4mm[inc]" in caught.value.fix


@pytest.mark.reference
@pytest.mark.subprocess("its first import may look at the processor")
@pytest.mark.skipif(not HAS_INC, reason="neural-compressor is not installed (extra inc)")
@pytest.mark.parametrize("block", [32, 64])
def test_our_solver_is_no_worse_than_neural_compressors_on_one_layer(block: int) -> None:
    grid = Grid(4, block, True, np.dtype(np.float32))
    weight, x = matrix(128, 96), [feed["x"] for feed in feeds(8, 128, seed=1)]
    rows = np.concatenate(x).astype(np.float64)
    hessian = rows.T @ rows
    hessian[np.diag_indices(128)] += 0.01 * np.diag(hessian).mean()
    solver = Solver(block, PLAIN, np.arange(128), upper_factor(hessian, PLAIN))
    mine = solver.quantize(weight.astype(np.float64), grid)

    def error(values: NDArray[np.float64]) -> float:
        return relative(rows @ values, rows @ weight)

    assert error(mine.values()) <= 1.02 * error(gptq_layer(weight, x, grid, 0.01).values())
