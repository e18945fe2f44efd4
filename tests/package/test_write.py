"""One graph and its data file on disk."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from phi4mm_export.package.write import PAGE, Effort, WrittenGraph, write_graph
from phi4mm_export.weights.streams import Band, Stream, TensorSpec

HEIGHT, WIDTH = 300, 64
VALUES = np.random.default_rng(0).standard_normal((HEIGHT, WIDTH)).astype(np.float32)
SUMS = VALUES.sum(axis=1, keepdims=True).astype(np.float32)


def _model() -> ir.Model:
    x = ir.val("x", ir.DataType.FLOAT, ["n", HEIGHT])
    initializers = [ir.val("w", ir.DataType.FLOAT, [HEIGHT, WIDTH]), ir.val("s", ir.DataType.FLOAT, [HEIGHT, 1])]
    y = ir.val("y", ir.DataType.FLOAT, ["n", WIDTH])
    z = ir.val("z", ir.DataType.FLOAT, ["n", 1])
    nodes = [
        ir.node("MatMul", [x, initializers[0]], outputs=[y]),
        ir.node("MatMul", [x, initializers[1]], outputs=[z]),
    ]
    graph = ir.Graph([x], [y, z], nodes=nodes, initializers=[], opset_imports={"": 20}, name="g")
    for value in initializers:
        graph.initializers[str(value.name)] = value
    return ir.Model(graph, ir_version=10)


def _stream(calls: list[tuple[int, int]] | None = None, band: int = 7) -> Stream:
    def compute(start: int, stop: int) -> Band:
        if calls is not None:
            calls.append((start, stop))
        return VALUES[start:stop], SUMS[start:stop]

    specs = (TensorSpec("w", ir.DataType.FLOAT, (HEIGHT, WIDTH)), TensorSpec("s", ir.DataType.FLOAT, (HEIGHT, 1)))
    return Stream(specs, HEIGHT, band, compute, 0)


def _write(folder: Path, jobs: int = 1, band: int = 7) -> WrittenGraph:
    folder.mkdir(exist_ok=True)
    return write_graph(_model(), [_stream(band=band)], folder, "g.onnx", effort=Effort(jobs))


def test_the_checker_accepts_the_graph_and_onnx_reads_the_values_back(tmp_path: Path) -> None:
    _write(tmp_path)
    onnx.checker.check_model(str(tmp_path / "g.onnx"))
    loaded = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "g.onnx").graph.initializer}
    assert np.array_equal(loaded["w"], VALUES)
    assert np.array_equal(loaded["s"], SUMS)


def test_large_tensors_start_on_a_page_and_the_gaps_are_zero(tmp_path: Path) -> None:
    written = _write(tmp_path)
    assert written.placed["w"].offset % PAGE == 0
    data = (tmp_path / "g.onnx.data").read_bytes()
    end, start = HEIGHT * WIDTH * 4, written.placed["s"].offset
    assert not any(data[end:start])
    assert len(data) == start + HEIGHT * 4


def test_sizes_and_digests_are_those_of_the_files(tmp_path: Path) -> None:
    for file in _write(tmp_path).files:
        data = (tmp_path / file.name).read_bytes()
        assert (file.nbytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(("jobs", "band"), [(1, 300), (2, 7), (4, 1), (3, 299)])
def test_threads_and_bands_change_no_byte(tmp_path: Path, jobs: int, band: int) -> None:
    plain, other = _write(tmp_path / "plain"), _write(tmp_path / "other", jobs=jobs, band=band)
    assert [f.sha256 for f in plain.files] == [f.sha256 for f in other.files]


def test_every_band_is_computed_exactly_once(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_graph(_model(), [_stream(calls)], tmp_path, "g.onnx", effort=Effort(3))
    assert sorted(calls) == _stream().bands()


def test_progress_adds_up_to_the_bytes_of_the_data_file(tmp_path: Path) -> None:
    seen: list[int] = []
    write_graph(_model(), [_stream()], tmp_path, "g.onnx", on_bytes=seen.append)
    assert sum(seen) == (tmp_path / "g.onnx.data").stat().st_size


def test_a_graph_can_refer_to_bytes_in_another_graphs_data_file(tmp_path: Path) -> None:
    first = _write(tmp_path)
    write_graph(_model(), [], tmp_path, "h.onnx", shared=first.placed)
    loaded = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "h.onnx").graph.initializer}
    assert np.array_equal(loaded["w"], VALUES)
    assert not (tmp_path / "h.onnx.data").exists()


def test_an_error_while_computing_reaches_the_caller(tmp_path: Path) -> None:
    def compute(start: int, stop: int) -> Band:
        raise ValueError(f"rows {start} to {stop}")

    stream = Stream(_stream().outputs, HEIGHT, 7, compute, 0)
    with pytest.raises(ValueError, match="rows 0 to 7"):
        write_graph(_model(), [stream], tmp_path, "g.onnx", effort=Effort(2))


@pytest.mark.parametrize("limit", [1, 4000, 1 << 20])
def test_a_memory_limit_changes_no_byte(tmp_path: Path, limit: int) -> None:
    plain = _write(tmp_path / "plain")
    (tmp_path / "other").mkdir()
    effort = Effort(jobs=3, memory_limit=limit)
    other = write_graph(_model(), [_stream()], tmp_path / "other", "g.onnx", effort=effort)
    assert [f.sha256 for f in plain.files] == [f.sha256 for f in other.files]


def test_bands_in_flight_stay_below_the_memory_limit(tmp_path: Path) -> None:
    alive, most, lock = 0, 0, threading.Lock()

    def compute(start: int, stop: int) -> Band:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        barrier.wait(timeout=30)
        with lock:
            alive -= 1
        return VALUES[start:stop], SUMS[start:stop]

    barrier = threading.Barrier(2)
    stream = Stream(_stream().outputs, HEIGHT, 25, compute, 0)
    write_graph(_model(), [stream], tmp_path, "g.onnx", effort=Effort(2, memory_limit=2 * stream.band_nbytes))
    assert most == 2
