"""From rows of a checkpoint to the arrays of initializers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest

from phi4mm_export.errors import PackageError
from phi4mm_export.weights.packing import decode
from phi4mm_export.weights.rotation import rotated, rotated_rows, turned_back
from phi4mm_export.weights.rows import Origin
from phi4mm_export.weights.streams import TensorSpec, dense_stream, packed_stream


@dataclass(frozen=True)
class Matrix:
    """Rows held in memory."""

    values: np.ndarray
    where: str = "model.safetensors: some.weight"

    @property
    def height(self) -> int:
        return int(self.values.shape[0])

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    @property
    def nbytes_read(self) -> int:
        return int(self.values.nbytes)

    @property
    def origin(self) -> Origin:
        return Origin((), {})

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.values[start:stop]


def _matrix(height: int = 6, width: int = 4) -> Matrix:
    return Matrix(np.random.default_rng(0).standard_normal((height, width)).astype(np.float32))


def _all(stream: object, output: int = 0) -> np.ndarray:
    return np.concatenate([stream.compute(*band)[output] for band in stream.bands()])  # type: ignore[attr-defined]


def test_dense_rows_are_rounded_to_the_nearest_float16() -> None:
    rows = _matrix()
    stream = dense_stream(TensorSpec("w", ir.DataType.FLOAT16, (6, 4)), rows)
    assert np.array_equal(_all(stream), rows.values.astype(np.float16))


@pytest.mark.parametrize("kind", [ir.DataType.FLOAT, ir.DataType.FLOAT16])
@pytest.mark.parametrize(("height", "width"), [(6, 4), (16, 33), (37, 5), (1, 3), (3, 1)])
def test_a_transposed_weight_comes_out_contiguous(height: int, width: int, kind: ir.DataType) -> None:
    rows = _matrix(height, width)
    (out,) = dense_stream(TensorSpec("w", kind, (width, height)), rows, transposed=True).compute(0, 1)
    assert out.flags.c_contiguous
    assert np.array_equal(out, rows.values.T.astype(kind.numpy()))


def test_a_value_beyond_float16_is_refused_by_tensor_and_value_and_never_becomes_infinity() -> None:
    rows = Matrix(np.array([[1.0, 98304.0]], np.float32))
    with pytest.raises(PackageError) as caught:
        dense_stream(TensorSpec("w", ir.DataType.FLOAT16, (1, 2)), rows).compute(0, 1)
    assert "some.weight" in str(caught.value)
    assert "98304" in str(caught.value)
    assert "--encoder-precision fp32" in str(caught.value)


def test_a_scale_beyond_float16_is_refused_likewise() -> None:
    rows = Matrix(np.full((1, 32), 1e7, np.float32))
    scales = TensorSpec("w.scales", ir.DataType.FLOAT16, (1, 1))
    stream = packed_stream(TensorSpec("w.qweight", ir.DataType.UINT8, (1, 1, 32)), scales, rows, bits=8, block_size=32)
    with pytest.raises(PackageError, match=r"some\.weight"):
        stream.compute(0, 1)


def test_bands_cover_every_row_once_and_hold_at_most_four_mebibytes() -> None:
    rows = Matrix(np.zeros((3000, 1024), np.float32))
    stream = dense_stream(TensorSpec("w", ir.DataType.FLOAT, (3000, 1024)), rows)
    bands = stream.bands()
    assert [start for start, _ in bands[1:]] == [stop for _, stop in bands[:-1]]
    assert bands[-1][1] == 3000
    assert max(stop - start for start, stop in bands) * 1024 * 4 <= 4 << 20


def test_a_packed_weight_yields_codes_and_scales_of_the_same_rows() -> None:
    rows = _matrix(5, 64)
    codes, scales = TensorSpec("q", ir.DataType.UINT8, (5, 2, 16)), TensorSpec("s", ir.DataType.FLOAT, (5, 2))
    stream = packed_stream(codes, scales, rows, bits=4, block_size=32)
    assert _all(stream, 0).shape == codes.shape
    assert _all(stream, 1).shape == scales.shape
    assert stream.nbytes == 5 * 32 + 5 * 2 * 4


def test_a_rotated_weight_is_packed_turned_and_turns_back_within_half_a_step() -> None:
    rows = _matrix(7, 256)
    codes, scales = TensorSpec("q", ir.DataType.UINT8, (7, 2, 128)), TensorSpec("s", ir.DataType.FLOAT, (7, 2))
    stream = packed_stream(codes, scales, rows, bits=8, block_size=128, rotation=128)
    steps = _all(stream, 1)
    stored = decode(_all(stream, 0), steps, 8).reshape(7, 256).astype(np.float64)
    assert np.abs(stored - rows.values).max() > 0.5
    error = stored - rotated(rows.values.T.astype(np.float64), 128).T
    assert (np.abs(error).reshape(7, 2, 128) <= 0.501 * steps[..., None]).all()
    found = turned_back(np.ascontiguousarray(stored.T), 128).T
    assert np.linalg.norm(found - rows.values) < 0.01 * np.linalg.norm(rows.values)


def test_rows_are_rotated_alike_whatever_the_band() -> None:
    rows = np.random.default_rng(3).standard_normal((600, 384)).astype(np.float32)
    whole = rotated_rows(rows, 128)
    assert np.array_equal(np.concatenate([rotated_rows(rows[a : a + 37], 128) for a in range(0, 600, 37)]), whole)
    assert np.abs(whole - rotated(rows.T.astype(np.float64), 128).T).max() < 2e-6
