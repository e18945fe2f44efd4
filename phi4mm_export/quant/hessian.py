"""Second moments of a product's inputs, over all calibration tokens.

Products of 256 tokens are float32; their sums are float64, in sample order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import UsageError
from phi4mm_export.weights.exact import F32, F64

ROWS = 256
"""Tokens multiplied at once. BLAS libraries sum so few in one sweep, whatever the number of their threads."""
PARTS = 4
"""Products summed in float32 before they enter the float64 sum."""


@dataclass(frozen=True)
class Moments:
    """tokens: rows seen. mean_exact, mean: [K] of the float and the quantized stream. hessian: [K, K], sum of
    (x - mean)(x - mean)' of the quantized stream. drift: [K, K], sum of (x - mean)(d - mean d)' with d = exact - x;
    None when the streams are the same.
    """

    tokens: int
    mean_exact: F64
    mean: F64
    hessian: F64
    drift: F64 | None


def moments(pairs: Iterable[tuple[NDArray[Any], NDArray[Any]]], channels: int, *, flip: bool) -> Moments | None:
    """Over pairs (exact, quantized) of arrays [..., K]; None when they hold no token.

    flip: the arrays are [K, T]. Values that are not finite make the moments so, without a warning.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return _moments(pairs, channels, flip)


def _moments(pairs: Iterable[tuple[NDArray[Any], NDArray[Any]]], channels: int, flip: bool) -> Moments | None:
    total, sum_exact, sum_x = 0, np.zeros(channels), np.zeros(channels)
    gram, drift = _Sum(channels), _Sum(channels)
    same = True
    for exact, x in _chunks(pairs, channels, flip):
        total += len(x)
        sum_x += np.add.reduce(x, axis=0, dtype=np.float64)
        gram.add(x, x)
        if exact is x:
            sum_exact += np.add.reduce(x, axis=0, dtype=np.float64)
            continue
        same = False
        sum_exact += np.add.reduce(exact, axis=0, dtype=np.float64)
        drift.add(x, exact - x)
    if not total:
        return None
    mean, mean_exact = sum_x / total, sum_exact / total
    hessian = gram.total() - np.multiply.outer(sum_x, mean)
    moved = None if same else drift.total() - np.multiply.outer(sum_x, mean_exact - mean)
    return Moments(total, mean_exact, mean, _narrow(hessian), None if moved is None else _narrow(moved))


def _narrow(values: F64) -> F64:
    """Rounded to float32, as `statistics` stores it."""
    return values.astype(np.float32).astype(np.float64)


class _Sum:
    """The sum of left' right over chunks of rows."""

    def __init__(self, channels: int) -> None:
        self._wide = np.zeros((channels, channels))
        self._part, self._count = np.zeros((channels, channels), np.float32), 0
        self._product = np.empty((channels, channels), np.float32)

    def add(self, left: F32, right: F32) -> None:
        """One more chunk of at most `ROWS` rows."""
        self._part += np.matmul(left.T, right, out=self._product)
        self._count += 1
        if self._count == PARTS:
            self._flush()

    def total(self) -> F64:
        """Everything added."""
        self._flush()
        return self._wide

    def _flush(self) -> None:
        if self._count:
            self._wide += self._part
            self._part[...] = 0
            self._count = 0


def _chunks(pairs: Iterable[tuple[NDArray[Any], NDArray[Any]]], channels: int, flip: bool) -> Iterator[tuple[F32, F32]]:
    """(exact, quantized) in chunks of `ROWS` rows, across samples; the same array twice while the streams agree."""
    buffers = np.empty((2, ROWS, channels), np.float32)
    filled, moved = 0, False
    for exact, quantized in pairs:
        x = _rows(quantized, channels, flip)
        e = x if exact is quantized else _rows(exact, channels, flip)
        moved = moved or exact is not quantized
        at = 0
        while at < len(x):
            count = min(ROWS - filled, len(x) - at)
            buffers[0, filled : filled + count] = e[at : at + count]
            buffers[1, filled : filled + count] = x[at : at + count]
            filled, at = filled + count, at + count
            if filled == ROWS:
                yield (buffers[0], buffers[1]) if moved else (buffers[1], buffers[1])
                filled = 0
    if filled:
        yield (buffers[0, :filled], buffers[1, :filled]) if moved else (buffers[1, :filled],) * 2


def _rows(x: NDArray[Any], channels: int, flip: bool) -> NDArray[Any]:
    """Tokens as rows [T, K]. Raises UsageError for arrays of another width."""
    rows = x.T if flip else x
    if rows.size and rows.shape[-1] != channels:
        raise UsageError(
            f"a product got an input of shape {list(rows.shape)}, expected {channels} in the last dim",
            where="calibration samples",
            fix="give the graph's inputs the shapes it was made for",
        )
    return rows.reshape(-1, channels) if rows.size else np.zeros((0, channels), np.float32)
