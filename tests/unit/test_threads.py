"""Our threads share the work, BLAS adds none of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from threadpoolctl import threadpool_info, threadpool_limits

from phi4mm_export.package.write import Effort, in_order
from phi4mm_export.quant.engine import QuantSettings, quantize_graph
from phi4mm_export.weights.streams import Stream, TensorSpec
from phi4mm_export.weights.threads import one_blas_thread
from tests.quantize.small_graphs import Reader, feeds, two_layers


def blas_threads() -> set[int]:
    """Threads of the BLAS libraries that are loaded."""
    _ = np.eye(2) @ np.eye(2)
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_blas_has_one_thread_inside_and_as_many_as_before_afterwards() -> None:
    with threadpool_limits(limits=2, user_api="blas"):
        with one_blas_thread():
            assert blas_threads() <= {1}
        assert blas_threads() <= {2}


def test_a_calibration_sees_one_blas_thread(tmp_path: Path) -> None:
    seen: list[set[int]] = []

    class Watching(Reader):
        def get_next(self) -> Any:
            seen.append(blas_threads())
            return super().get_next()

    with threadpool_limits(limits=2, user_api="blas"):
        source = two_layers(tmp_path / "m.onnx")
        quantize_graph(source, tmp_path / "q.onnx", reader=Watching(feeds(4, 64, seed=1)), settings=QuantSettings())
    assert seen
    assert set().union(*seen) <= {1}


def test_bands_of_an_export_are_computed_with_one_blas_thread() -> None:
    seen: list[set[int]] = []

    def compute(start: int, stop: int) -> tuple[np.ndarray]:
        seen.append(blas_threads())
        return (np.zeros((stop - start, 1), np.float32),)

    stream = Stream((TensorSpec("w", ir.DataType.FLOAT, (4, 1)),), 4, 1, compute, 0)
    with threadpool_limits(limits=2, user_api="blas"):
        assert len(list(in_order([stream], Effort(jobs=2)))) == 4
    assert set().union(*seen) <= {1}
