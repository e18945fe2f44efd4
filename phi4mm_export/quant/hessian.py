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
from phi4mm_export.quant.rotation import rotated
from phi4mm_export.weights.exact import F32, F64

ROWS = 256
"""Tokens multiplied at once. BLAS libraries sum so few in one sweep, whatever the number of their threads."""
PARTS = 4
"""Products summed in float32 before they enter the float64 sum."""
TRIANGLE = 384
"""Rows of a symmetric product computed together, from the diagonal on."""


@dataclass(frozen=True)
class Moments:
    """tokens: rows seen. paired: those of them that both streams have.

    mean_exact, mean: [K] of the float and the quantized stream, over the paired tokens. hessian: [K, K], sum of
    (x - mean x)(x - mean x)' of the quantized stream over all tokens. drift: [K, K], sum of (x - mean x)(d - mean d)'
    with d = exact - x over the paired tokens; None when the streams are the same.
    """

    tokens: int
    paired: int
    mean_exact: F64
    mean: F64
    hessian: F64
    drift: F64 | None


Pairs = Iterable[tuple[NDArray[Any] | None, NDArray[Any]]]


def moments(pairs: Pairs, channels: int, *, flip: bool) -> Moments | None:
    """Over pairs (exact, quantized) of arrays [..., K]; None when they hold no token.

    The last pairs may lack the exact array. flip: the arrays are [K, T]. Values that are not finite make the moments
    so, without a warning.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return _moments(pairs, channels, flip)


def _moments(pairs: Pairs, channels: int, flip: bool) -> Moments | None:
    total, paired = 0, 0
    sum_exact, sum_paired, sum_x = np.zeros(channels), np.zeros(channels), np.zeros(channels)
    gram, drift = _Sum(channels), _Sum(channels)
    same = True
    for exact, x in _chunks(pairs, channels, flip):
        total += len(x)
        found = np.add.reduce(x, axis=0, dtype=np.float64)
        sum_x += found
        gram.add(x, x)
        if exact is None:
            continue
        paired += len(x)
        sum_paired += found
        if exact is x:
            sum_exact += found
            continue
        same = False
        sum_exact += np.add.reduce(exact, axis=0, dtype=np.float64)
        drift.add(x, exact - x)
    if not total:
        return None
    hessian = gram.total() - np.multiply.outer(sum_x, sum_x / total)
    if not paired:
        return Moments(total, 0, sum_x / total, sum_x / total, _narrow(hessian), None)
    mean, mean_exact = sum_paired / paired, sum_exact / paired
    moved = None if same else _narrow(drift.total() - np.multiply.outer(sum_paired, mean_exact - mean))
    return Moments(total, paired, mean_exact, mean, _narrow(hessian), moved)


def rotated_moments(seen: Moments, size: int) -> Moments:
    """The moments of the rotated inputs."""

    def both(matrix: F64) -> F64:
        return np.ascontiguousarray(rotated(rotated(matrix, size).T, size).T)

    mean_exact, mean = (rotated(mean[:, None], size)[:, 0] for mean in (seen.mean_exact, seen.mean))
    drift = None if seen.drift is None else both(seen.drift)
    hessian = both(seen.hessian)
    return Moments(seen.tokens, seen.paired, mean_exact, mean, np.triu(hessian) + np.triu(hessian, 1).T, drift)


def _narrow(values: F64) -> F64:
    """Rounded to float32, as `statistics` stores it."""
    return values.astype(np.float32).astype(np.float64)


class _Sum:
    """The sum of left' right over chunks of rows; when left is right, of its upper triangle."""

    def __init__(self, channels: int) -> None:
        self._wide = np.zeros((channels, channels))
        self._part, self._count = np.zeros((channels, channels), np.float32), 0
        self._product = np.zeros((channels, channels), np.float32)
        self._symmetric = False

    def add(self, left: F32, right: F32) -> None:
        """One more chunk of at most `ROWS` rows."""
        self._symmetric = left is right
        width = TRIANGLE if self._symmetric else len(self._part)
        for start in range(0, len(self._part), width):
            rows = slice(start, start + width)
            columns = slice(start if self._symmetric else 0, None)
            product = np.matmul(left[:, rows].T, right[:, columns], out=self._product[rows, columns])
            self._part[rows, columns] += product
        self._count += 1
        if self._count == PARTS:
            self._flush()

    def total(self) -> F64:
        """Everything added."""
        self._flush()
        return np.triu(self._wide) + np.triu(self._wide, 1).T if self._symmetric else self._wide

    def _flush(self) -> None:
        if self._count:
            self._wide += self._part
            self._part[...] = 0
            self._count = 0


def _chunks(pairs: Pairs, channels: int, flip: bool) -> Iterator[tuple[F32 | None, F32]]:
    """(exact, quantized) in chunks of `ROWS` rows, across samples; the same array twice while the streams agree."""
    buffers = np.empty((2, ROWS, channels), np.float32)
    filled, moved, lacking = 0, False, False
    for exact, quantized in pairs:
        x = _rows(quantized, channels, flip)
        if exact is None and not lacking:
            if filled:
                yield _chunk(buffers, filled, moved, lacking)
            filled, lacking = 0, True
        moved = moved or exact is not quantized
        e = x if exact is quantized or exact is None else _rows(exact, channels, flip)
        at = 0
        while at < len(x):
            count = min(ROWS - filled, len(x) - at)
            if not lacking:
                buffers[0, filled : filled + count] = e[at : at + count]
            buffers[1, filled : filled + count] = x[at : at + count]
            filled, at = filled + count, at + count
            if filled == ROWS:
                yield _chunk(buffers, filled, moved, lacking)
                filled = 0
    if filled:
        yield _chunk(buffers, filled, moved, lacking)


def _chunk(buffers: F32, filled: int, moved: bool, lacking: bool) -> tuple[F32 | None, F32]:
    x = buffers[1, :filled]
    return (None if lacking else buffers[0, :filled] if moved else x), x


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
