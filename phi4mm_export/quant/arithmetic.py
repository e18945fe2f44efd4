"""The linear algebra of the solver: one set of algorithms over two kinds of matrix product.

Inside a panel everything is + - * / sqrt on whole rows in a fixed order; between panels there are matrix products.
With `EXACT` these products are sums of integers below 2**53, so a factor has the same bits on every BLAS kernel and
for every thread count; with `PLAIN` they are the BLAS library's own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.weights.exact import (
    F64,
    LeftFactor,
    RightFactor,
    exact_product,
    integer_bits,
    scaled_to_bits,
    times_power_of_two,
    to_integers,
)

PANEL = 32
"""Rows that are eliminated one by one before a matrix product takes over."""
ROWS = 256
"""Rows of a factor that are multiplied together; a fixed number, so that bytes do not depend on how many workers."""
STRIPE = 128
"""Rows of a factor after which all earlier ones are taken into account at once."""


class NotPositiveDefiniteError(ArithmeticError):
    """A pivot of the Cholesky factor is zero, negative or not finite."""


@dataclass(frozen=True)
class Arithmetic:
    """How matrices are multiplied.

    fine: relative error near 1e-12 of the row maxima, for factors. coarse: near 1e-7, for what is rounded to codes.
    finely, coarsely: such products of many left factors with one right factor. times: coarse products of one left
    factor with many right ones.
    """

    fine: Callable[[F64, F64], F64]
    coarse: Callable[[F64, F64], F64]
    finely: Callable[[F64], Callable[[F64], F64]]
    coarsely: Callable[[F64], Callable[[F64], F64]]
    times: Callable[[F64], Callable[[F64], F64]]


def two_slice_product(left: NDArray[Any], right: NDArray[Any]) -> F64:
    """left [m, r] times right [r, n], each factor as two slices of integers; the same bits on every machine.

    Drops low times low: the error is near 2**-40 of the row and column maxima for r = 1024.
    Source: Ozaki's scheme (arXiv 2504.08009).
    """
    return _times_slices(right)(left)


def _times_slices(right: NDArray[Any]) -> Callable[[F64], F64]:
    """`two_slice_product` of many left factors with one right factor."""
    bits = integer_bits(right.shape[0]) - 1
    b_high, b_low, b_step = _slices(right, 0, bits)

    def product(left: F64) -> F64:
        a_high, a_low, a_step = _slices(left, 1, bits)
        small = a_high @ b_low
        small += a_low @ b_high
        small = times_power_of_two(small, np.array(-bits))
        small += a_high @ b_high
        scaled: F64 = np.ldexp(small, a_step + b_step)
        return scaled

    return product


def _slices(x: NDArray[Any], axis: int, bits: int) -> tuple[F64, F64, NDArray[np.int32]]:
    """x = (high + low * 2**-bits) * 2**step, both integers of `bits` bits."""
    low, exponent = scaled_to_bits(x, axis, bits)
    high = np.rint(low)
    low -= high
    low = times_power_of_two(low, np.array(bits))
    return high, np.rint(low, out=low), (exponent - bits).astype(np.int32)


def _before(right: F64) -> Callable[[F64], F64]:
    return lambda left: left @ right


def _after(left: F64) -> Callable[[F64], F64]:
    return lambda right: left @ right


PLAIN = Arithmetic(np.matmul, np.matmul, _before, _before, _after)
EXACT = Arithmetic(
    two_slice_product,
    exact_product,
    _times_slices,
    lambda right: RightFactor.of(right).product,
    lambda left: LeftFactor.of(left).product,
)


def kept_bits(x: F64, bits: int) -> F64:
    """Each row of x [m, r] rounded to `bits` bits after the point of its largest value."""
    integers, exponent = to_integers(x, 1, bits)
    return np.ldexp(integers, exponent - bits)


def upper_factor(h: F64, math: Arithmetic, *, jobs: int = 1) -> F64:
    """V upper triangular with H = V V', for symmetric positive definite H [K, K].

    It is the Cholesky factor of H read from the last row to the first, and the inverse of GPTQ's upper factor of
    inv(H): inv(H) = U'U with U = inv(V). Raises NotPositiveDefiniteError.
    """
    a = h[::-1, ::-1].copy()
    size = len(a)
    with ThreadPoolExecutor(jobs) as pool:
        for begin in range(0, size, STRIPE):
            end = min(begin + STRIPE, size)
            earlier = math.finely(a[begin:end, :begin].T) if begin else None
            if earlier is not None:
                a[begin:end, begin:end] -= earlier(a[begin:end, :begin])
            try:
                roots = _factor_corner(a[begin:end, begin:end], math)
            except NotPositiveDefiniteError as err:
                raise NotPositiveDefiniteError(f"{err}, {size - end} rows further on") from None
            below = partial(_factor_rows, a, begin, end, roots, math, earlier)
            for _ in pool.map(below, range(end, size, ROWS)):
                pass
    for start in range(0, size, STRIPE):
        stop = start + STRIPE
        a[start:stop, start:stop] = np.tril(a[start:stop, start:stop])
        a[start:stop, stop:] = 0.0
    return np.ascontiguousarray(a[::-1, ::-1])


def _factor_corner(a: F64, math: Arithmetic) -> F64:
    """The Cholesky factor of a [n, n] in its lower triangle, in place; -> what each column was divided by."""
    size = len(a)
    roots = np.empty(size)
    for start in range(0, size, PANEL):
        stop = min(start + PANEL, size)
        if start:
            a[start:, start:stop] -= math.fine(a[start:, :start], a[start:stop, :start].T)
        part = np.ascontiguousarray(a[start:, start:stop].T)
        for j in range(stop - start):
            pivot = float(part[j, j])
            if not 0 < pivot < np.inf:
                raise NotPositiveDefiniteError(f"pivot {size - 1 - start - j} is {pivot:g}")
            roots[start + j] = np.sqrt(pivot)
            part[j, j:] /= roots[start + j]
            part[j + 1 :, j:] -= part[j, j + 1 : stop - start, None] * part[j, j:]
        a[start:, start:stop] = part.T
    return roots


def _factor_rows(
    a: F64, begin: int, end: int, roots: F64, math: Arithmetic, earlier: Callable[[F64], F64] | None, first: int
) -> None:
    """Columns begin .. end of the factor in the `ROWS` rows from `first` on, in place; earlier rows have theirs."""
    rows = a[first : first + ROWS]
    if earlier is not None:
        rows[:, begin:end] -= earlier(rows[:, :begin])
    for start in range(begin, end, PANEL):
        stop = min(start + PANEL, end)
        corner = a[start:stop, begin:stop]
        if start > begin:
            rows[:, start:stop] -= math.fine(rows[:, begin:start], corner[:, : start - begin].T)
        part = np.ascontiguousarray(rows[:, start:stop].T)
        for j in range(stop - start):
            part[j] /= roots[start - begin + j]
            part[j + 1 :] -= corner[j + 1 :, start - begin + j, None] * part[j]
        rows[:, start:stop] = part.T


def in_parts(product: Callable[[F64], F64], jobs: int, left: F64) -> F64:
    """A product whose rows are computed some at a time, by `jobs` threads; what is between stays in the cache."""
    parts = [left[start : start + ROWS] for start in range(0, len(left), ROWS)]
    if len(parts) == 1:
        return product(left)
    with ThreadPoolExecutor(jobs) as pool:
        return np.concatenate(list(pool.map(product, parts)))


def solve_upper(v: F64, right: F64, product: Callable[[F64, F64], F64]) -> F64:
    """x with V x = right, V upper triangular [K, K], right [K, N]."""
    x = right.copy()
    size = len(v)
    for end in range(size, 0, -STRIPE):
        begin = max(0, end - STRIPE)
        if end < size:
            x[begin:end] -= product(v[begin:end, end:], x[end:])
        for stop in range(end, begin, -PANEL):
            start = max(begin, stop - PANEL)
            if stop < end:
                x[start:stop] -= product(v[start:stop, stop:end], x[stop:end])
            for i in range(stop - 1, start - 1, -1):
                x[i] /= v[i, i]
                x[start:i] -= v[start:i, i, None] * x[i]
    return x


def solve_upper_transposed(v: F64, right: F64, product: Callable[[F64, F64], F64]) -> F64:
    """x with V' x = right, V upper triangular [K, K], right [K, N]."""
    x = right.copy()
    size = len(v)
    for begin in range(0, size, STRIPE):
        end = min(begin + STRIPE, size)
        if begin:
            x[begin:end] -= product(np.ascontiguousarray(v[:begin, begin:end].T), x[:begin])
        for start in range(begin, end, PANEL):
            stop = min(start + PANEL, end)
            if start > begin:
                x[start:stop] -= product(np.ascontiguousarray(v[begin:start, start:stop].T), x[begin:start])
            for i in range(start, stop):
                x[i] /= v[i, i]
                x[i + 1 : stop] -= v[i, i + 1 : stop, None] * x[i]
    return x
