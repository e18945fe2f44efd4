"""Numbers of a synthetic checkpoint, the same on every machine.

A tensor's tag seeds one Philox stream. Every 64-bit word of it is cut into four 16-bit integers; their sum, an integer
of 0 .. 262140 with a bell-shaped distribution, is looked up in a table of the numbers of the tensor's type. A table
is made with + - * / and one correctly rounded square root: no function of the math library, whose last bit differs
between machines. All numbers are bfloat16 numbers, whatever type they are stored in.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LARGEST_SUM = 4 * 0xFFFF
CENTRE = LARGEST_SUM // 2
UNIT = 1.7320508075688772 / 65536.0
"""1 / standard deviation of the sum of four uniform 16-bit integers: sqrt(3) / 2**16."""
BLOCK_WORDS = 1 << 16
"""Words drawn at once: 512 KiB, which stays in a core's cache (4 times faster than blocks of 8 MiB)."""

DEGREES_OF_FREEDOM = 3
"""Student's t with 3 degrees of freedom; here with a kurtosis of 6.2 and a largest value of 9 standard deviations."""
STUDENT_RMS = 1.5018
"""Root mean square of `_student` over the distribution of the sums: heavy tails keep the deviation asked for."""
CHANNELS_PER_OUTLIER = 64
OUTLIER_FACTOR = 6.0


@dataclass(frozen=True)
class Numbers:
    """Distribution of one tensor: standard deviation and mean, tails, and whether some channels stand out.

    With a mean of 0 the deviation is that of the whole tensor, channels that stand out included.
    """

    std: float
    mean: float = 0.0
    student: bool = False
    outliers: bool = False


def blocks(tag: str, shape: tuple[int, ...], numbers: Numbers, dtype: DTypeLike) -> Iterator[NDArray[Any]]:
    """The tensor named by `tag` in row order, as consecutive flat blocks of `dtype`, each at most about 64 Ki values.

    A block holds whole rows (all of a row's axes but the first); a one-dimensional tensor is one row. The blocks of a
    tag do not depend on the block size.
    """
    columns = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
    rows = shape[0] if len(shape) > 1 else 1
    outliers = outlier_channels(tag, columns) if numbers.outliers else np.empty(0, np.int64)
    power = 1.0 + (OUTLIER_FACTOR * OUTLIER_FACTOR - 1.0) * len(outliers) / columns
    std = numbers.std if numbers.mean else numbers.std / math.sqrt(power)
    table = _table(std, numbers.mean, numbers.student, np.dtype(dtype))
    stream = np.random.Philox(key=_key(tag))
    rows_per_block = max(1, BLOCK_WORDS // columns)
    for start in range(0, rows, rows_per_block):
        count = min(rows_per_block, rows - start)
        sums = _sums(stream.random_raw(count * columns))
        block = table.take(sums, mode="clip")
        if len(outliers):
            _raise_channels(block.reshape(count, columns), outliers)
        yield block


def tensor(tag: str, shape: tuple[int, ...], numbers: Numbers, dtype: DTypeLike = BFLOAT16) -> NDArray[Any]:
    """The whole tensor at once."""
    return np.concatenate(list(blocks(tag, shape, numbers, dtype))).reshape(shape)


def outlier_channels(tag: str, columns: int) -> NDArray[np.int64]:
    """The input channels of a tensor that stand out: one of 64, at least one, chosen by the tag."""
    count = max(1, columns // CHANNELS_PER_OUTLIER)
    words = np.random.Philox(key=_key(f"{tag}/outliers")).random_raw(count)
    return np.unique((words % np.uint64(columns)).astype(np.int64))


def _key(tag: str) -> int:
    return int.from_bytes(hashlib.sha256(tag.encode()).digest()[:16], "little")


def _sums(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Sum of the four 16-bit parts of each word; overwrites `words`."""
    pairs, low = np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFFFFFF)
    upper = np.right_shift(words, np.uint64(16))
    np.bitwise_and(upper, pairs, out=upper)
    np.bitwise_and(words, pairs, out=words)
    np.add(words, upper, out=words)
    np.right_shift(words, np.uint64(32), out=upper)
    np.add(words, upper, out=words)
    np.bitwise_and(words, low, out=words)
    return words.view(np.int64)


def _raise_channels(rows: NDArray[Any], channels: NDArray[np.int64]) -> None:
    # The product is rounded to bfloat16 first, so that every stored type holds the same numbers.
    raised = rows[:, channels].astype(np.float32) * np.float32(OUTLIER_FACTOR)
    rows[:, channels] = raised.astype(BFLOAT16).astype(rows.dtype)


@lru_cache(maxsize=64)
def _table(std: float, mean: float, student: bool, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The number that each sum stands for: [262141] of `dtype`."""
    centred = (np.arange(LARGEST_SUM + 1, dtype=np.int64) - CENTRE).astype(np.float64)
    scaled = _student(centred * UNIT) * (std / STUDENT_RMS) if student else centred * (UNIT * std)
    rounded = (scaled + mean).astype(np.float32).astype(BFLOAT16)
    table = rounded if dtype == BFLOAT16 else rounded.astype(np.float32).astype(dtype)
    table.setflags(write=False)
    return table


def _student(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard normal quantiles to those of Student's t: Abramowitz and Stegun, 26.7.5, four terms."""
    n, square = float(DEGREES_OF_FREEDOM), z * z
    first = (square + 1.0) / 4.0
    second = ((5.0 * square + 16.0) * square + 3.0) / 96.0
    third = (((3.0 * square + 19.0) * square + 17.0) * square - 15.0) / 384.0
    result: NDArray[np.float64] = z * (1.0 + (first + (second + third / n) / n) / n)
    return result
