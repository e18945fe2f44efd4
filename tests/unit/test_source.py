"""Reading one stored tensor in pieces."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from phi4mm_export.checkpoint.source import DType, ShardFile, TensorSource
from phi4mm_export.checkpoint.values import check_finite, count_non_finite, largest_difference, rows_per_piece
from phi4mm_export.errors import CheckpointError


def source(path: Path, values: np.ndarray, dtype: DType, *, offset: int = 0) -> TensorSource:
    """`values` written after `offset` bytes of noise, as a source."""
    path.write_bytes(b"\xa5" * offset + values.tobytes())
    return TensorSource("w", "module.w", path, dtype, values.shape, offset, ShardFile(path, path.name))


@pytest.mark.parametrize(
    ("dtype", "numpy_type"), [(DType.BF16, ml_dtypes.bfloat16), (DType.F16, np.float16), (DType.F32, np.float32)]
)
def test_rows_are_the_stored_values_in_the_stored_type(tmp_path: Path, dtype: DType, numpy_type: type) -> None:
    values = np.arange(60, dtype=np.float32).reshape(5, 3, 4).astype(numpy_type)
    tensor = source(tmp_path / "a.safetensors", values, dtype, offset=24)
    rows = tensor.rows(1, 4)
    assert rows.dtype == np.dtype(numpy_type)
    np.testing.assert_array_equal(rows, values.reshape(5, 12)[1:4])
    np.testing.assert_array_equal(tensor.whole(), values)
    assert tensor.nbytes == values.nbytes


def test_a_vector_has_rows_of_width_one_and_a_scalar_one_row(tmp_path: Path) -> None:
    vector = source(tmp_path / "v", np.arange(6, dtype=np.float32), DType.F32)
    assert vector.rows(2, 4).tolist() == [[2.0], [3.0]]
    scalar = source(tmp_path / "s", np.float32(7).reshape(()), DType.F32)
    assert scalar.whole().shape == ()
    assert float(scalar.whole()) == 7.0


def test_no_rows_is_an_empty_piece_and_rows_outside_are_our_bug(tmp_path: Path) -> None:
    tensor = source(tmp_path / "a", np.zeros((3, 2), np.float32), DType.F32)
    assert tensor.rows(3, 3).shape == (0, 2)
    for start, stop in ((-1, 2), (0, 4), (2, 1)):
        with pytest.raises(IndexError):
            tensor.rows(start, stop)


def test_threads_read_different_rows_of_one_file_at_once(tmp_path: Path) -> None:
    values = np.arange(4000 * 16, dtype=np.float32).reshape(4000, 16)
    tensor = source(tmp_path / "a", values, DType.F32)
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(lambda i: tensor.rows(i * 10, i * 10 + 10), range(400)))
    np.testing.assert_array_equal(np.concatenate(pieces), values)


def test_without_positioned_reads_the_values_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    tensor = source(tmp_path / "a", values, DType.F32, offset=8)
    monkeypatch.delattr(os, "preadv", raising=False)
    with ThreadPoolExecutor(4) as pool:
        pieces = list(pool.map(lambda i: tensor.rows(i, i + 1), range(64)))
    np.testing.assert_array_equal(np.concatenate(pieces), values)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(100, dtype=np.float32).reshape(10, 10)
    tensor = source(tmp_path / "a", values, DType.F32)
    whole_read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole_read(fd, [buffers[0][:7]], offset))
    np.testing.assert_array_equal(tensor.whole(), values)


def test_a_file_that_shrinks_after_opening_is_an_error_with_both_sizes(tmp_path: Path) -> None:
    tensor = source(tmp_path / "a.safetensors", np.zeros((8, 8), np.float32), DType.F32)
    os.truncate(tmp_path / "a.safetensors", 100)
    with pytest.raises(CheckpointError, match="opened with 256 bytes, now 100") as caught:
        tensor.whole()
    assert caught.value.where == "a.safetensors"


def test_a_file_rewritten_in_place_is_an_error_although_its_size_stayed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensor = source(path, np.zeros((8, 8), np.float32), DType.F32)
    later = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(later, later))
    with pytest.raises(CheckpointError, match="changed while it was read"):
        tensor.rows(0, 1)


def test_a_read_after_closing_is_an_error_and_closing_twice_is_not(tmp_path: Path) -> None:
    tensor = source(tmp_path / "a", np.zeros((2, 2), np.float32), DType.F32)
    tensor.shard.close()
    tensor.shard.close()
    with pytest.raises(CheckpointError, match="closed before this read"):
        tensor.whole()


def test_an_input_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_args: object) -> int:
        raise OSError(5, "Input/output error")

    tensor = source(tmp_path / "a.safetensors", np.zeros((2, 2), np.float32), DType.F32)
    monkeypatch.setattr(os, "preadv", failing, raising=False)
    with pytest.raises(CheckpointError, match="Input/output error") as caught:
        tensor.whole()
    assert caught.value.where == "a.safetensors"


@pytest.mark.parametrize(
    ("dtype", "numpy_type"), [(DType.BF16, ml_dtypes.bfloat16), (DType.F16, np.float16), (DType.F32, np.float32)]
)
def test_values_that_are_not_finite_are_counted_and_named(tmp_path: Path, dtype: DType, numpy_type: type) -> None:
    values = np.ones((4, 4), np.float32)
    values[1, 2], values[3, 3], values[0, 0] = np.nan, np.inf, -np.inf
    tensor = source(tmp_path / "a.safetensors", values.astype(numpy_type), dtype)
    assert count_non_finite(tensor.whole()) == 3
    with pytest.raises(CheckpointError, match=r"module\.w holds 3 values other than finite") as caught:
        check_finite(tensor.whole(), tensor)
    assert caught.value.where == "a.safetensors: module.w"
    check_finite(tensor.rows(2, 3), tensor)


def test_two_tensors_are_compared_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(50, dtype=np.float32).reshape(10, 5)
    other = values.copy()
    other[3, 1] += 0.5
    other[9, 4] -= 2.0
    left, right = source(tmp_path / "l", values, DType.F32), source(tmp_path / "r", other, DType.F32)
    monkeypatch.setattr("phi4mm_export.checkpoint.values.rows_per_piece", lambda _source: 4)
    assert largest_difference(left, right) == (2, 2.0)
    assert largest_difference(left, left) == (0, 0.0)


def test_a_difference_across_element_types_counts_values_not_bytes(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    left = source(tmp_path / "l", values, DType.F32)
    right = source(tmp_path / "r", values.astype(ml_dtypes.bfloat16), DType.BF16)
    assert largest_difference(left, right) == (0, 0.0)


def test_a_piece_has_at_least_one_row(tmp_path: Path) -> None:
    tensor = source(tmp_path / "a", np.zeros((3, 100), np.float32), DType.F32)
    assert rows_per_piece(tensor, 1) == 1
    assert rows_per_piece(tensor, 800) == 2


def test_equal_bytes_of_two_element_types_are_different_values(tmp_path: Path) -> None:
    ones = np.ones((2, 2), np.float16)
    left = source(tmp_path / "l", ones, DType.F16)
    right = source(tmp_path / "r", ones.view(ml_dtypes.bfloat16), DType.BF16)
    assert largest_difference(left, right)[0] == 4
