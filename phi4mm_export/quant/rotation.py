"""A rotation of a product's input that spreads large channels over their neighbours before the weight is rounded.

x W = (x R') (R W) for an orthogonal R: the weight R W is rounded instead of W, and the graph multiplies the input by
R'. R is the Walsh-Hadamard matrix of 128 channels after a change of signs, the same for every group of 128 channels, so
that it costs 128 multiplications a value and 64 KiB a graph.
Sources: QuIP (arXiv 2307.13304), QuaRot (arXiv 2404.00456).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from phi4mm_export.weights.exact import F32, F64

ROTATED = 128
"""Channels that are mixed with each other, at most."""
CACHED_COLUMNS = 32
MIN_ROTATED = 16
"""Below this many mixing does not help."""
_SEED = 128


def rotation_size(channels: int) -> int:
    """The largest power of two up to 128 that divides the number of channels, or 0 when it is too small."""
    size = ROTATED
    while channels % size:
        size //= 2
    return size if size >= MIN_ROTATED else 0


def rotated(x: F64, size: int) -> F64:
    """R x for x [K, N], K a multiple of `size`; only additions and multiplications of single elements."""
    result = np.empty(x.shape)
    for columns in _columns(x):
        part = x[:, columns]
        result[:, columns] = _spread(part.reshape(-1, size, part.shape[1]) * _signs(size)[:, None], size)
    return result


def turned_back(y: F64, size: int) -> F64:
    """R' y for y [K, N]."""
    result, signs = np.empty(y.shape), np.tile(_signs(size), len(y) // size)[:, None]
    for columns in _columns(y):
        part = y[:, columns]
        result[:, columns] = _spread(part.reshape(-1, size, part.shape[1]), size) * signs
    return result


def rotation_matrix(size: int) -> F32:
    """R' [size, size]: what a row of inputs is multiplied by."""
    return turned_back(np.eye(size), size).astype(np.float32)


def _columns(x: F64) -> Iterator[slice]:
    """Ranges of columns that a core's cache holds."""
    return (slice(start, start + CACHED_COLUMNS) for start in range(0, x.shape[1], CACHED_COLUMNS))


def _spread(groups: F64, size: int) -> F64:
    """The Walsh-Hadamard transform over the second axis of [groups, size, N], over sqrt(size): [groups * size, N]."""
    count, _, width = groups.shape
    step = 1
    while step < size:
        pairs = groups.reshape(count, size // (2 * step), 2, step, width)
        mixed = np.empty_like(pairs)
        np.add(pairs[:, :, 0], pairs[:, :, 1], out=mixed[:, :, 0])
        np.subtract(pairs[:, :, 0], pairs[:, :, 1], out=mixed[:, :, 1])
        groups, step = mixed, 2 * step
    result: F64 = groups.reshape(count * size, width) * float(1.0 / np.sqrt(np.float64(size)))
    return result


def _signs(size: int) -> F64:
    """Fixed signs: constant inputs must not meet in one channel."""
    return np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2, size).astype(np.float64) * 2.0 - 1.0
