"""A data file that an interrupted run left is gone on with, and comes out byte for byte the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from phi4mm_export.checkpoint.digests import InputDigests
from phi4mm_export.checkpoint.source import DType, ShardFile, TensorSource
from phi4mm_export.package import resume
from phi4mm_export.package.resume import Journal, Resume, journal_path
from phi4mm_export.package.write import Effort, write_graph
from phi4mm_export.weights.rows import Origin, StoredRows
from phi4mm_export.weights.streams import Band, Stream, TensorSpec, dense_stream

HEIGHT, WIDTH, COUNT = 50, 96, 4
VALUES = np.random.default_rng(0).standard_normal((COUNT, HEIGHT, WIDTH)).astype("<f4")
DATA = "g.onnx.data"


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


def _shard(folder: Path, values: np.ndarray = VALUES) -> ShardFile:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shard").write_bytes(values.tobytes())
    return ShardFile(folder / "shard", "shard")


def _streams(
    shard: ShardFile, calls: list[int], *, fail_at: tuple[int, int] | None = None, scale: float = 1.0
) -> list[Stream]:
    def stream(i: int) -> Stream:
        source = TensorSource(f"t{i}", f"t{i}", shard.path, DType.F32, (HEIGHT, WIDTH), VALUES[0].nbytes * i, shard)
        plain = dense_stream(TensorSpec(f"w{i}", ir.DataType.FLOAT, (HEIGHT, WIDTH)), StoredRows(source, scale))

        def compute(start: int, stop: int) -> Band:
            if fail_at is not None and (i, start) >= fail_at:
                raise InterruptedRunError
            calls.append(i)
            return plain.compute(start, stop)

        return Stream(plain.outputs, HEIGHT, 10, compute, 0, plain.origin)

    return [stream(i) for i in range(COUNT)]


def _write(folder: Path, streams: list[Stream]) -> str:
    sources = [source for stream in streams if stream.origin for source in stream.origin.sources]
    with InputDigests({"shard": sources[0].file}, sources) as digests:
        effort = Effort(resume=Resume(folder, folder, digests.content_of))
        return write_graph(_model(), streams, folder, "g.onnx", effort=effort).files[0].sha256


def _interrupted(folder: Path, shard: ShardFile, at: tuple[int, int]) -> None:
    with pytest.raises(InterruptedRunError):
        _write(folder, _streams(shard, [], fail_at=at))


@pytest.fixture
def shard(tmp_path: Path) -> ShardFile:
    return _shard(tmp_path / "source")


@pytest.fixture
def plain(tmp_path: Path, shard: ShardFile) -> str:
    """The digest of the data file written in one go."""
    (tmp_path / "plain").mkdir()
    return write_graph(_model(), _streams(shard, []), tmp_path / "plain", "g.onnx").files[0].sha256


def test_finished_tensors_are_not_computed_again(tmp_path: Path, shard: ShardFile, plain: str) -> None:
    _interrupted(tmp_path, shard, (2, 20))
    calls: list[int] = []
    assert _write(tmp_path, _streams(shard, calls)) == plain
    assert set(calls) == {2, 3}
    assert hashlib.sha256((tmp_path / DATA).read_bytes()).hexdigest() == plain


def test_a_damaged_tensor_and_all_after_it_are_written_again(tmp_path: Path, shard: ShardFile, plain: str) -> None:
    _interrupted(tmp_path, shard, (3, 0))
    data = bytearray((tmp_path / DATA).read_bytes())
    data[VALUES[0].nbytes + 4096] ^= 1
    (tmp_path / DATA).write_bytes(data)
    calls: list[int] = []
    assert _write(tmp_path, _streams(shard, calls)) == plain
    assert set(calls) == {1, 2, 3}


def test_a_torn_journal_line_is_left_out(tmp_path: Path, shard: ShardFile, plain: str) -> None:
    _interrupted(tmp_path, shard, (2, 0))
    journal = journal_path(tmp_path, DATA)
    journal.write_text(journal.read_text()[:-20])
    calls: list[int] = []
    assert _write(tmp_path, _streams(shard, calls)) == plain
    assert set(calls) == {1, 2, 3}


def test_a_changed_input_is_written_again_from_there_on(tmp_path: Path, shard: ShardFile) -> None:
    _interrupted(tmp_path, shard, (3, 0))
    changed = VALUES.copy()
    changed[1, 0, 0] += 1
    other, calls = _shard(tmp_path / "changed", changed), list[int]()
    (tmp_path / "clean").mkdir()
    clean = write_graph(_model(), _streams(other, []), tmp_path / "clean", "g.onnx").files[0].sha256
    assert _write(tmp_path, _streams(other, calls)) == clean
    assert set(calls) == {1, 2, 3}


def test_a_changed_setting_starts_a_new_file(tmp_path: Path, shard: ShardFile) -> None:
    _interrupted(tmp_path, shard, (3, 0))
    kept_open = (tmp_path / DATA).open("r+b")
    (tmp_path / "clean").mkdir()
    halved = write_graph(_model(), _streams(shard, [], scale=0.5), tmp_path / "clean", "g.onnx").files[0].sha256
    calls: list[int] = []
    assert _write(tmp_path, _streams(shard, calls, scale=0.5)) == halved
    with kept_open:
        kept_open.write(b"what the displaced run still writes")
    assert set(calls) == set(range(COUNT))
    assert hashlib.sha256((tmp_path / DATA).read_bytes()).hexdigest() == halved


def test_another_version_of_the_code_reuses_nothing(
    tmp_path: Path, shard: ShardFile, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupted(tmp_path, shard, (3, 0))
    monkeypatch.setattr(resume, "code_version", lambda: "another")
    calls: list[int] = []
    assert _write(tmp_path, _streams(shard, calls)) == plain
    assert set(calls) == set(range(COUNT))


def test_a_journal_with_swapped_lines_proves_only_what_comes_before(
    tmp_path: Path, shard: ShardFile, plain: str
) -> None:
    _interrupted(tmp_path, shard, (3, 0))
    journal = journal_path(tmp_path, DATA)
    plan, first, second, third = journal.read_text().splitlines()
    journal.write_text("\n".join([plan, first, third, second]) + "\n")
    calls: list[int] = []
    assert _write(tmp_path, _streams(shard, calls)) == plain
    assert set(calls) == {1, 2, 3}


def test_without_a_data_file_the_journal_proves_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / DATA, tmp_path / "journal", "plan", lambda index: f"stream {index}")
    assert journal.recover() is None
    journal.note(1, 10, "0" * 64)
    assert journal.recover() is None


def test_a_finished_file_is_only_hashed(tmp_path: Path, shard: ShardFile, plain: str) -> None:
    _write(tmp_path, _streams(shard, []))
    calls: list[int] = []
    assert _write(tmp_path, _streams(shard, calls)) == plain
    assert calls == []


def test_a_stream_that_does_not_say_what_it_is_made_from_is_never_resumed() -> None:
    unknown = Stream((TensorSpec("w0", ir.DataType.FLOAT, (1, 1)),), 1, 1, lambda _a, _b: (VALUES[0],), 0)
    with pytest.raises(ValueError, match="w0 does not say"):
        resume.plan_identity([unknown])


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "setting"])
def test_everything_that_decides_bytes_is_part_of_the_identity(change: str) -> None:
    def made(name: str, dtype: ir.DataType, width: int, block_size: int) -> str:
        origin = Origin((), {"block_size": block_size})
        spec = TensorSpec(name, dtype, (1, width))
        return resume.identity(Stream((spec,), 1, 1, lambda _start, _stop: (), 0, origin), str)

    plain = made("w", ir.DataType.FLOAT, 8, 32)
    assert plain == made("w", ir.DataType.FLOAT, 8, 32)
    assert plain != made(
        "v" if change == "name" else "w",
        ir.DataType.FLOAT16 if change == "dtype" else ir.DataType.FLOAT,
        9 if change == "shape" else 8,
        64 if change == "setting" else 32,
    )


def test_the_order_of_settings_is_no_difference() -> None:
    spec = TensorSpec("w", ir.DataType.FLOAT, (1, 1))
    one, other = ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    made = [Stream((spec,), 1, 1, lambda _start, _stop: (), 0, Origin((), settings)) for settings in (one, other)]
    assert resume.identity(made[0], str) == resume.identity(made[1], str)


def test_any_change_of_a_source_file_is_another_version_of_the_code(tmp_path: Path) -> None:
    def digest(files: dict[str, str]) -> str:
        root = tmp_path / f"code{len(list(tmp_path.iterdir()))}"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return resume.code_digest(root)

    plain = digest({"a.py": "x", "data/t.json": "y"})
    assert plain == digest({"data/t.json": "y", "a.py": "x", "a.pyc": "compiled"})
    changes: list[dict[str, str]] = [
        {"a.py": "z", "data/t.json": "y"},
        {"a.py": "x", "data/t.json": "z"},
        {"b.py": "x", "data/t.json": "y"},
        {"a.py": "x"},
        {"a.py": "x", "data/t.json": "y", "new.py": ""},
    ]
    assert len({plain, *map(digest, changes)}) == len(changes) + 1
