"""A data file that an interrupted run left is gone on with, and comes out byte for byte the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from phi4mm_export.package.resume import Journal, journal_path
from phi4mm_export.package.write import Effort, write_graph
from phi4mm_export.weights.streams import Band, Stream, TensorSpec

HEIGHT, WIDTH, COUNT = 50, 96, 4
VALUES = np.random.default_rng(0).standard_normal((COUNT, HEIGHT, WIDTH)).astype(np.float32)


class InterruptedRunError(Exception):
    """What stops a run in these tests."""


def _model() -> ir.Model:
    x = ir.val("x", ir.DataType.FLOAT, ["n", HEIGHT])
    graph = ir.Graph([x], [], nodes=[], initializers=[], opset_imports={"": 20}, name="g")
    for i in range(COUNT):
        weight = ir.val(f"w{i}", ir.DataType.FLOAT, [HEIGHT, WIDTH])
        graph.initializers[f"w{i}"] = weight
        y = ir.val(f"y{i}", ir.DataType.FLOAT, ["n", WIDTH])
        graph.append(ir.node("MatMul", [x, weight], outputs=[y]))
        graph.outputs.append(y)
    return ir.Model(graph, ir_version=10)


def _streams(calls: list[int], fail_at: tuple[int, int] | None = None) -> list[Stream]:
    def stream(i: int) -> Stream:
        def compute(start: int, stop: int) -> Band:
            if fail_at is not None and (i, start) >= fail_at:
                raise InterruptedRunError
            calls.append(i)
            return (VALUES[i, start:stop],)

        return Stream((TensorSpec(f"w{i}", ir.DataType.FLOAT, (HEIGHT, WIDTH)),), HEIGHT, 10, compute, 0)

    return [stream(i) for i in range(COUNT)]


def _resumed(folder: Path, calls: list[int], fail_at: tuple[int, int] | None = None) -> str:
    effort = Effort(resume=True)
    written = write_graph(_model(), _streams(calls, fail_at), folder, "g.onnx", effort=effort)
    return written.files[0].sha256


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """The digest of the data file written in one go."""
    (tmp_path / "plain").mkdir()
    return write_graph(_model(), _streams([]), tmp_path / "plain", "g.onnx").files[0].sha256


def test_finished_tensors_are_not_computed_again(tmp_path: Path, plain: str) -> None:
    with pytest.raises(InterruptedRunError):
        _resumed(tmp_path, [], fail_at=(2, 20))
    calls: list[int] = []
    assert _resumed(tmp_path, calls) == plain
    assert set(calls) == {2, 3}
    assert hashlib.sha256((tmp_path / "g.onnx.data").read_bytes()).hexdigest() == plain


def test_a_damaged_tensor_and_all_after_it_are_written_again(tmp_path: Path, plain: str) -> None:
    with pytest.raises(InterruptedRunError):
        _resumed(tmp_path, [], fail_at=(3, 0))
    data = bytearray((tmp_path / "g.onnx.data").read_bytes())
    data[VALUES[0].nbytes + 4096] ^= 1
    (tmp_path / "g.onnx.data").write_bytes(data)
    calls: list[int] = []
    assert _resumed(tmp_path, calls) == plain
    assert set(calls) == {1, 2, 3}


def test_a_torn_journal_line_is_left_out(tmp_path: Path, plain: str) -> None:
    with pytest.raises(InterruptedRunError):
        _resumed(tmp_path, [], fail_at=(2, 0))
    journal = journal_path(tmp_path / "g.onnx.data")
    journal.write_text(journal.read_text()[:-20])
    calls: list[int] = []
    assert _resumed(tmp_path, calls) == plain
    assert set(calls) == {1, 2, 3}


def test_without_a_data_file_the_journal_proves_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "g.onnx.data")
    journal.note(1, 10, "0" * 64)
    assert journal.recover() is None


def test_a_finished_file_is_only_hashed(tmp_path: Path, plain: str) -> None:
    _resumed(tmp_path, [])
    calls: list[int] = []
    assert _resumed(tmp_path, calls) == plain
    assert calls == []
