"""Second moments of a product's inputs, over all calibration tokens.

Products of 256 tokens are float32; their sums are float64, in sample order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import UsageError
from phi4mm_export.weights.exact import F32, F64
from phi4mm_export.weights.rotation import rotated, rotated_both

ROWS = 256
"""Tokens multiplied at once. BLAS libraries sum so few in one sweep, whatever the number of their threads."""
PARTS = 4
"""Products summed in float32 before they enter the float64 sum."""
STRIPE = 384
"""Rows of a sum computed together, of a symmetric one from the diagonal on."""


@dataclass(frozen=True)
class Moments:
    """tokens: rows seen. paired: those of them that both streams have.

    mean_exact, mean: [K] of the float and the quantized stream, over the paired tokens. hessian: [K, K], sum of
    (x - mean x)(x - mean x)' of the quantized stream over all tokens. drift: sum of (x - mean x)(d - mean d)' with
    d = exact - x over the paired tokens, [K, K], or where `moments` was told the weights [K, N], times these; None when
    the streams are the same.
    """

    tokens: int
    paired: int
    mean_exact: F64
    mean: F64
    hessian: F64
    drift: F64 | None


Pairs = Iterable[tuple[NDArray[Any] | None, NDArray[Any]]]


class Sums(Protocol):
    """The sum of left' right over chunks of rows, or of left' (right weights)."""

    @property
    def rows(self) -> int:
        """Rows of a chunk, at most."""
        ...

    def steps(self, left: F32, right: F32) -> list[Callable[[], None]]:
        """What adds one more chunk; the steps do not touch each other."""
        ...

    def total(self, sums: F64, mean: F64) -> F64:
        """Everything added, less the product of sums and mean, rounded to float32 as `statistics` stores it."""
        ...

    def behind(self) -> F64 | None:
        """The sum over the rows of right times weights; None without weights."""
        ...


Summing = Callable[[int, F32 | None], Sums]
"""Makes an empty sum for so many channels, behind weights if there are any."""


def sums_in_numpy(channels: int, weights: F32 | None) -> Sums:
    """An empty sum in this process's memory."""
    return _Sum(channels, channels) if weights is None else _Through(weights)


def moments(
    pairs: Pairs,
    channels: int,
    *,
    flip: bool,
    weights: F32 | None = None,
    jobs: int = 1,
    summing: Summing = sums_in_numpy,
) -> Moments | None:
    """Over pairs (exact, quantized) of arrays [..., K]; None when they hold no token.

    The last pairs may lack the exact array. flip: the arrays are [K, T]. weights: [K, N]; with less than K outputs in
    all, their drift takes less time and memory than that of the inputs. Values that are not finite make the moments so,
    without a warning.
    """
    gram, drift = summing(channels, None), summing(channels, weights)
    with np.errstate(invalid="ignore", over="ignore"), ThreadPoolExecutor(jobs) as pool:
        return _moments(_chunks(pairs, channels, flip, gram.rows), channels, gram, drift, pool)


def _moments(
    chunks: Iterator[tuple[F32 | None, F32]], channels: int, gram: Sums, drift: Sums, pool: ThreadPoolExecutor
) -> Moments | None:
    total, paired = 0, 0
    sum_exact, sum_paired, sum_x = np.zeros(channels), np.zeros(channels), np.zeros(channels)
    same, waiting = True, list[Future[None]]()
    for exact, x in chunks:
        total += len(x)
        found = np.add.reduce(x, axis=0, dtype=np.float64)
        sum_x += found
        if exact is not None:
            paired += len(x)
            sum_paired += found
            sum_exact += found if exact is x else np.add.reduce(exact, axis=0, dtype=np.float64)
        moved = None if exact is None or exact is x else exact - x
        _wait(waiting)
        steps = gram.steps(x, x)
        if moved is not None:
            same = False
            steps = drift.steps(x, moved) + steps
        waiting = [pool.submit(step) for step in steps]
    _wait(waiting)
    if not total:
        return None
    hessian = _mirrored(gram.total(sum_x, sum_x / total))
    if not paired:
        return Moments(total, 0, sum_x / total, sum_x / total, hessian, None)
    mean, mean_exact = sum_paired / paired, sum_exact / paired
    if same:
        return Moments(total, paired, mean_exact, mean, hessian, None)
    behind = drift.behind()
    gone = mean_exact - mean if behind is None else behind / paired
    return Moments(total, paired, mean_exact, mean, hessian, drift.total(sum_paired, gone))


def _wait(steps: Iterable[Future[None]]) -> None:
    for step in steps:
        step.result()


def rotated_moments(seen: Moments, size: int, *, jobs: int = 1) -> Moments:
    """The moments of the rotated inputs."""
    mean_exact, mean = (rotated(mean[:, None], size)[:, 0] for mean in (seen.mean_exact, seen.mean))
    drift = None if seen.drift is None else _rotated_drift(seen.drift, size, jobs)
    hessian = _mirrored(rotated_both(seen.hessian, size, jobs=jobs))
    return Moments(seen.tokens, seen.paired, mean_exact, mean, hessian, drift)


def _rotated_drift(drift: F64, size: int, jobs: int) -> F64:
    return rotated_both(drift, size, jobs=jobs) if drift.shape[0] == drift.shape[1] else rotated(drift, size)


def _mirrored(values: F64) -> F64:
    """The upper triangle in place of the lower one; overwrites `values`."""
    for start in range(0, len(values), STRIPE):
        stop = min(start + STRIPE, len(values))
        corner = values[start:stop, start:stop]
        corner[...] = np.triu(corner) + np.triu(corner, 1).T
        values[stop:, start:stop] = values[start:stop, stop:].T
    return values


class _Sum:
    """The sum of left' right over chunks of rows; when left is right, only its upper triangle is computed."""

    rows = ROWS

    def __init__(self, channels: int, outputs: int) -> None:
        self._wide = np.zeros((channels, outputs))
        self._part, self._count = np.zeros((channels, outputs), np.float32), 0
        self._product = np.zeros((channels, outputs), np.float32)

    def steps(self, left: F32, right: F32) -> list[Callable[[], None]]:
        """One step for each stripe of the sum."""
        self._count += 1
        return [partial(self._add, left, right, start) for start in range(0, len(self._part), STRIPE)]

    def total(self, sums: F64, mean: F64) -> F64:
        """As `Sums` says, in place."""
        for start in range(0, len(self._part), STRIPE):
            rows = slice(start, start + STRIPE)
            if self._count % PARTS:
                self._wide[rows] += self._part[rows]
            self._wide[rows] -= np.multiply.outer(sums[rows], mean)
            self._wide[rows] = self._wide[rows].astype(np.float32)
        return self._wide

    def behind(self) -> F64 | None:
        """There are no weights."""
        return None

    def _add(self, left: F32, right: F32, start: int) -> None:
        rows = slice(start, start + STRIPE)
        columns = slice(start if left is right else 0, None)
        self._add_product(left[:, rows], right[:, columns], rows, columns)

    def _add_product(self, left: F32, right: F32, rows: slice, columns: slice) -> None:
        product, part = self._product[rows, columns], self._part[rows, columns]
        with np.errstate(invalid="ignore", over="ignore"):  # of this thread
            if self._count % PARTS == 1:
                np.matmul(left.T, right, out=part)
            else:
                part += np.matmul(left.T, right, out=product)
        if self._count % PARTS == 0:
            self._wide[rows, columns] += part


class _Through(_Sum):
    """The sum of left' (right weights) over chunks of rows."""

    def __init__(self, weights: F32) -> None:
        super().__init__(*weights.shape)
        self._weights, self._behind = weights, np.zeros(weights.shape[1])

    def steps(self, left: F32, right: F32) -> list[Callable[[], None]]:
        """One step for each stripe of outputs."""
        self._count += 1
        return [partial(self._add, left, right, start) for start in range(0, len(self._behind), STRIPE)]

    def behind(self) -> F64 | None:
        """As summed so far."""
        return self._behind

    def _add(self, left: F32, right: F32, start: int) -> None:
        columns = slice(start, start + STRIPE)
        moved = np.zeros((len(right), len(self._behind[columns])), np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # of this thread
            for channel in range(0, len(self._weights), ROWS):
                channels = slice(channel, channel + ROWS)
                moved += np.matmul(right[:, channels], self._weights[channels, columns])
        self._behind[columns] += np.add.reduce(moved, axis=0, dtype=np.float64)
        self._add_product(left, moved, slice(None), columns)


def _chunks(pairs: Pairs, channels: int, flip: bool, size: int) -> Iterator[tuple[F32 | None, F32]]:
    """(exact, quantized) in chunks of `size` rows, across samples; the same array twice while the streams agree.

    A chunk stays as it is while the next one is made.
    """
    spare = np.empty((2, 2, size, channels), np.float32)
    buffers, spare = spare[0], spare[1]
    filled, moved, lacking = 0, False, False
    for exact, quantized in pairs:
        x = _rows(quantized, channels, flip)
        if exact is None and not lacking:
            if filled:
                yield _chunk(buffers, filled, moved, lacking)
                buffers, spare = spare, buffers
            filled, lacking = 0, True
        moved = moved or exact is not quantized
        e = x if exact is quantized or exact is None else _rows(exact, channels, flip)
        at = 0
        while at < len(x):
            if not filled and len(x) - at >= size and x.dtype == e.dtype == np.float32:
                rows = slice(at, at + size)
                part = x[rows]
                yield (None if lacking else e[rows] if moved else part), part
                at += size
                continue
            count = min(size - filled, len(x) - at)
            if not lacking:
                buffers[0, filled : filled + count] = e[at : at + count]
            buffers[1, filled : filled + count] = x[at : at + count]
            filled, at = filled + count, at + count
            if filled == size:
                yield _chunk(buffers, filled, moved, lacking)
                buffers, spare = spare, buffers
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
