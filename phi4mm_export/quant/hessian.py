"""Second moments of a product's inputs, over all calibration tokens.

Products of one sample are float32 sums over its tokens; sums over samples are float64 in sample order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.weights.exact import F32, F64

ROWS = 256
"""Tokens multiplied at once. BLAS libraries sum so few in one sweep, whatever the number of their threads."""


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

    flip: the arrays are [K, T].
    """
    total, sum_exact, sum_x = 0, np.zeros(channels), np.zeros(channels)
    gram, drift = np.zeros((channels, channels)), np.zeros((channels, channels))
    same = True
    for exact, quantized in pairs:
        x = _rows(quantized, channels, flip)
        moved = exact is not quantized
        e = _rows(exact, channels, flip) if moved else x
        same = same and not moved
        for start in range(0, len(x), ROWS):
            part, reference = x[start : start + ROWS], e[start : start + ROWS]
            total += len(part)
            sum_x += np.add.reduce(part, axis=0, dtype=np.float64)
            sum_exact += np.add.reduce(reference, axis=0, dtype=np.float64)
            gram += part.T @ part
            if moved:
                drift += part.T @ (reference - part)
    if not total:
        return None
    mean, mean_exact = sum_x / total, sum_exact / total
    gram -= np.multiply.outer(sum_x, mean)
    if not same:
        drift -= np.multiply.outer(sum_x, mean_exact - mean)
    return Moments(total, mean_exact, mean, gram, None if same else drift)


def _rows(x: NDArray[Any], channels: int, flip: bool) -> F32:
    """Tokens as rows, float32 [T, K]."""
    rows = x.T if flip else x
    if not rows.size:
        return np.zeros((0, channels), np.float32)
    return np.ascontiguousarray(rows.reshape(-1, channels), np.float32)
