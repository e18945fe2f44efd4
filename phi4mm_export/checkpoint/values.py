"""Checks on values, for whoever streams them: the headers cannot tell."""

from __future__ import annotations

import numpy as np

from phi4mm_export.checkpoint.source import Array, DType, TensorSource
from phi4mm_export.errors import CheckpointError, counted

LARGEST_PIECE_NBYTES = 16 << 20
"""Most bytes of one piece of a comparison or scan."""
_EXPONENT_BITS = {DType.BF16.numpy: np.uint16(0x7F80), DType.F16.numpy: np.uint16(0x7C00)}
"""Of the 16-bit types: all set in infinities and NaNs, and in nothing else."""


def count_non_finite(array: Array) -> int:
    """How many values are NaN or infinite."""
    exponent = _EXPONENT_BITS.get(array.dtype)
    if exponent is not None:  # ten times faster than isfinite of numpy and ml_dtypes
        return int(np.count_nonzero((array.view(np.uint16) & exponent) == exponent))
    return int(array.size - np.count_nonzero(np.isfinite(array)))


def check_finite(array: Array, source: TensorSource) -> None:
    """Raise CheckpointError naming tensor, file and count if `array`, read from `source`, holds NaN or infinity."""
    bad = count_non_finite(array)
    if bad:
        raise CheckpointError(
            f"{source.stored_name} holds {counted(bad, 'value')} other than finite numbers (NaN or infinity)",
            where=source.where,
            fix="the training diverged or the file is damaged: use an earlier checkpoint or fetch the file again",
        )


def rows_per_piece(source: TensorSource, nbytes: int = LARGEST_PIECE_NBYTES) -> int:
    """How many rows of `source` make a piece of at most `nbytes` bytes (at least one row)."""
    return max(1, nbytes // max(1, source.row_size * source.dtype.nbytes))


def largest_difference(left: TensorSource, right: TensorSource) -> tuple[int, float]:
    """How many values differ, and the largest absolute difference, of two tensors of one shape.

    Reads both in pieces. NaN counts as different from everything and gives a difference of NaN.
    """
    step = min(rows_per_piece(left), rows_per_piece(right))
    count, largest = 0, 0.0
    for start in range(0, left.row_count, step):
        stop = min(start + step, left.row_count)
        a, b = left.rows(start, stop), right.rows(start, stop)
        if left.dtype is right.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8)):
            continue
        gap = np.abs(a.astype(np.float32) - b.astype(np.float32))
        count += int(np.count_nonzero(gap != 0))
        largest = float(np.maximum(largest, gap.max()))
    return count, largest
