"""The linear algebra of the solver: one set of algorithms over two kinds of matrix product.

Inside a panel everything is + - * / sqrt on whole rows in a fixed order; between panels there are matrix products.
With `EXACT` these products are sums of integers below 2**53, so a factor has the same bits on every BLAS kernel and
for every thread count; with `PLAIN` they are the BLAS library's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.weights.exact import F64, exact_product, integer_bits, to_integers

PANEL = 32
"""Rows that are eliminated one by one before a matrix product takes over."""


class NotPositiveDefiniteError(ArithmeticError):
    """A pivot of the Cholesky factor is zero, negative or not finite."""


@dataclass(frozen=True)
class Arithmetic:
    """How matrices are multiplied.

    fine: relative error near 1e-12 of the row maxima, for factors. coarse: near 1e-7, for what is rounded to codes.
    """

    fine: Callable[[F64, F64], F64]
    coarse: Callable[[F64, F64], F64]


def two_slice_product(left: NDArray[Any], right: NDArray[Any]) -> F64:
    """left [m, r] times right [r, n], each factor as two slices of integers; the same bits on every machine.

    Drops low times low: the error is near 2**-40 of the row and column maxima for r = 1024.
    Source: Ozaki's scheme (arXiv 2504.08009).
    """
    bits = integer_bits(left.shape[1]) - 1
    a_high, a_low, a_step = _slices(left, 1, bits)
    b_high, b_low, b_step = _slices(right, 0, bits)
    small = a_high @ b_low + a_low @ b_high
    product: F64 = np.ldexp(a_high @ b_high + np.ldexp(small, -bits), a_step + b_step)
    return product


def _slices(x: NDArray[Any], axis: int, bits: int) -> tuple[F64, F64, NDArray[np.int32]]:
    """x = (high + low * 2**-bits) * 2**step, both integers of `bits` bits."""
    high, exponent = to_integers(x, axis, bits)
    step = (exponent - bits).astype(np.int32)
    low = np.rint(np.ldexp(np.ldexp(np.asarray(x, np.float64), -step) - high, bits))
    return high, low, step


PLAIN = Arithmetic(np.matmul, np.matmul)
EXACT = Arithmetic(two_slice_product, exact_product)


def upper_factor(h: F64, math: Arithmetic) -> F64:
    """V upper triangular with H = V V', for symmetric positive definite H [K, K].

    It is the Cholesky factor of H read from the last row to the first, and the inverse of GPTQ's upper factor of
    inv(H): inv(H) = U'U with U = inv(V). Raises NotPositiveDefiniteError.
    """
    a = h[::-1, ::-1].copy()
    size = len(a)
    for start in range(0, size, PANEL):
        stop = min(start + PANEL, size)
        if start:
            a[start:, start:stop] -= math.fine(a[start:, :start], a[start:stop, :start].T)
        for j in range(start, stop):
            pivot = float(a[j, j])
            if not 0 < pivot < np.inf:
                raise NotPositiveDefiniteError(f"pivot {size - 1 - j} is {pivot:g}")
            root = np.sqrt(pivot)
            a[j:, j] /= root
            a[j + 1 :, j + 1 : stop] -= a[j + 1 :, j, None] * a[j + 1 : stop, j]
    return np.ascontiguousarray(np.tril(a)[::-1, ::-1])


def solve_upper(v: F64, right: F64, math: Arithmetic) -> F64:
    """x with V x = right, V upper triangular [K, K], right [K, N]."""
    x = right.copy()
    size = len(v)
    for stop in range(size, 0, -PANEL):
        start = max(0, stop - PANEL)
        if stop < size:
            x[start:stop] -= math.fine(v[start:stop, stop:], x[stop:])
        for i in range(stop - 1, start - 1, -1):
            x[i] /= v[i, i]
            x[start:i] -= v[start:i, i, None] * x[i]
    return x


def solve_upper_transposed(v: F64, right: F64, math: Arithmetic) -> F64:
    """x with V' x = right, V upper triangular [K, K], right [K, N]."""
    x = right.copy()
    size = len(v)
    for start in range(0, size, PANEL):
        stop = min(start + PANEL, size)
        if start:
            x[start:stop] -= math.fine(np.ascontiguousarray(v[:start, start:stop].T), x[:start])
        for i in range(start, stop):
            x[i] /= v[i, i]
            x[i + 1 : stop] -= v[i, i + 1 : stop, None] * x[i]
    return x
