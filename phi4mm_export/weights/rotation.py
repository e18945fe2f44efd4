"""A rotation of a product's input that spreads large channels over their neighbours before the weight is rounded.

x W = (x R') (R W) for an orthogonal R: the weight R W is rounded instead of W, and the graph multiplies the input by
R'. R is the Walsh-Hadamard matrix of 128 channels after a change of signs, the same for every group of 128 channels, so
that it costs 128 multiplications a value and 64 KiB a graph.
Sources: QuIP (arXiv 2307.13304), QuaRot (arXiv 2404.00456).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.weights.exact import F32, F64

ROTATED = 128
"""Channels that are mixed with each other, at most."""
TILE_ROWS, TILE_COLUMNS = 128, 512
"""Of what is worked on together; it stays in a core's cache. Whole groups: every size divides the rows."""
MIN_ROTATED = 16
"""Below this many mixing does not help."""
EXPORTED_NAME, QUANTIZED_NAME = "rotation.", "phi4mm.rotation."
"""How constants of a rotation begin, in a graph of the export and of `phi4mm quantize`; the size follows."""
_SEED = 128
Floats = NDArray[Any]
"""float32 or float64."""


def rotation_size(channels: int) -> int:
    """The largest power of two up to 128 that divides the number of channels, or 0 when it is too small."""
    size = ROTATED
    while channels % size:
        size //= 2
    return size if size >= MIN_ROTATED else 0


def is_rotation(name: str) -> bool:
    """Whether a graph's constant of this name is a rotation."""
    return name.startswith((EXPORTED_NAME, QUANTIZED_NAME))


def rotated(x: F64, size: int) -> F64:
    """R x for x [K, N], K a multiple of `size`; only additions and multiplications of single elements."""
    result = np.empty(x.shape)
    for tile in _tiles(x):
        _spread(_signed(x[tile], size), size, result[tile])
    return result


def turned_back(y: F64, size: int) -> F64:
    """R' y for y [K, N]."""
    result = np.empty(y.shape)
    for tile in _tiles(y):
        rows = result[tile]
        _spread(y[tile].copy(), size, rows)
        rows *= _row_signs(len(rows), size)
    return result


def rotated_both(x: F64, size: int, *, jobs: int = 1) -> F64:
    """R x R' for x [K, K]: the bits of `rotated` of the transposed `rotated(x)`, transposed."""
    result = np.empty(x.shape)

    def some(start: int) -> None:
        rows = slice(start, start + TILE_ROWS)
        turned = rotated(x[rows], size)
        for tile in _tiles(turned.T):
            _spread(_signed(turned.T[tile], size), size, result[rows].T[tile])

    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(some, range(0, len(x), TILE_ROWS)):
            pass
    return result


def rotated_rows(rows: F32, size: int) -> F32:
    """W R' for the rows of a weight W [n, K] in float32: the inputs of every output are mixed.

    Each value is the result of log2(size) additions, a change of sign and one multiplication, in this order.
    """
    result = np.empty(rows.shape, np.float32)
    for tile in _tiles(rows.T):
        turned = _signed(rows.T[tile], size)
        _spread(turned, size, out=turned)
        result.T[tile] = turned
    return result


def rotation_matrix(size: int) -> F32:
    """R' [size, size]: what a row of inputs is multiplied by."""
    return turned_back(np.eye(size), size).astype(np.float32)


def _tiles(x: Floats) -> Iterator[tuple[slice, slice]]:
    """Parts of an array [K, N] that a core's cache holds, of whole groups."""
    for start in range(0, x.shape[0], TILE_ROWS):
        for left in range(0, x.shape[1], TILE_COLUMNS):
            yield slice(start, start + TILE_ROWS), slice(left, left + TILE_COLUMNS)


def _spread(x: Floats, size: int, out: Floats) -> None:
    """The Walsh-Hadamard transform over every `size` rows of x [K, N], over sqrt(size), into `out`; overwrites x."""
    other, step = np.empty_like(x), 1
    while step < size:
        pairs = x.reshape(len(x) // (2 * step), 2, step, -1)
        mixed = other.reshape(pairs.shape)
        np.add(pairs[:, 0], pairs[:, 1], out=mixed[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=mixed[:, 1])
        x, other, step = other, x, 2 * step
    np.multiply(x, float(1.0 / np.sqrt(np.float64(size))), out=out)


def _signed(x: Floats, size: int) -> Floats:
    """x [K, N] with the signs of its rows changed, row by row in memory, in the type of x."""
    signed: Floats = np.multiply(x, _row_signs(len(x), size).astype(x.dtype), order="C")
    return signed


def _row_signs(count: int, size: int) -> F64:
    return np.tile(_signs(size), count // size)[:, None]


def _signs(size: int) -> F64:
    """Fixed signs: constant inputs must not meet in one channel."""
    return np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2, size).astype(np.float64) * 2.0 - 1.0
