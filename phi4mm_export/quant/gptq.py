"""GPTQ: round input channels one after another, each compensating the error of those before it.

With H = V V' (V upper triangular) the loss of an error E = W - Q is |V'E|^2, and row i of V'E is

    V[i, i] * (w[i] - q[i] + sum over j < i of (V[j, i] / V[i, i]) * (w[j] - q[j])),

so rounding w[i] plus that sum is the greedy choice. It equals the published algorithm, whose upper factor of inv(H)
is inv(V), but needs one factorisation and no inverse.
Sources: GPTQ (arXiv 2210.17323); its equivalence with this form, QuIP (arXiv 2307.13304), theorem 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.quant.arithmetic import PANEL, Arithmetic, solve_upper
from phi4mm_export.quant.codes import Codes, Grid, inverse_of
from phi4mm_export.quant.scales import Choice, Corner, best_choices
from phi4mm_export.quant.settings import Order
from phi4mm_export.weights.exact import F64

FINALISTS = 6
"""Scales of a block for which its rows are really rounded in turn, before one is taken."""


def channel_order(diagonal: F64, block_size: int, order: Order) -> NDArray[np.int64]:
    """The order in which channels are rounded.

    `act`: quantization blocks by falling energy, channels by falling energy inside a block, so that each block's
    scale is chosen when all that came before it is known, and nothing has to be stored. `natural`: 0 .. K-1.
    """
    if order is Order.NATURAL:
        return np.arange(len(diagonal))
    starts = range(0, len(diagonal), block_size)
    energy = np.array([float(np.add.reduce(diagonal[s : s + block_size])) for s in starts])
    pieces = []
    for block in np.argsort(-energy, kind="stable"):
        start = int(block) * block_size
        pieces.append(start + np.argsort(-diagonal[start : start + block_size], kind="stable"))
    return np.concatenate(pieces)


def blocks_in(order: NDArray[np.int64], block_size: int) -> Iterator[tuple[int, slice]]:
    """The quantization blocks as they are rounded: which one it is, and its place in the order."""
    start, size = 0, len(order)
    while start < size:
        number = int(order[start]) // block_size
        stop = start + min(block_size, size - number * block_size)
        yield number, slice(start, stop)
        start = stop


@dataclass(frozen=True)
class _Block:
    """One quantization block in the order of rounding: rows start .. stop, and what its rounding needs of V."""

    number: int
    start: int
    stop: int
    corner: Corner
    feedback: F64
    """[b, b], strictly lower: V[j, i] / V[i, i] in row i, what an error of row j adds to row i."""
    carry: Callable[[F64], F64]
    """Times inv(V's diagonal block)' [b, b]: from what earlier blocks left in V'E to a change of this block's rows."""
    later: Callable[[F64], F64]
    """Times V[start:stop, stop:]' [K - stop, b]: what this block's errors leave in the rows after it."""


class Solver:
    """Rounds weights of one input, any number of them.

    order: channels in the order of rounding; v: the factor of H in that order.
    """

    def __init__(self, block_size: int, math: Arithmetic, order: NDArray[np.int64], v: F64) -> None:
        self._block_size, self._math, self._order = block_size, math, order
        self._blocks = list(self._cut(v))

    def _cut(self, v: F64) -> Iterator[_Block]:
        size = len(v)
        for number, rows in blocks_in(self._order, self._block_size):
            start, stop = rows.start, rows.stop
            corner = v[rows, rows]
            inverse = solve_upper(corner, np.eye(stop - start), self._math.fine)
            yield _Block(
                number,
                start,
                stop,
                Corner.of(corner),
                np.ascontiguousarray((corner / np.diagonal(corner)).T),
                self._math.times(np.ascontiguousarray(inverse.T)),
                self._math.times(np.ascontiguousarray(v[start:stop, stop:].T)) if stop < size else np.asarray,
            )

    def quantize(self, weight: F64, grid: Grid) -> Codes:
        """weight [K, N] in natural order -> codes in natural order; outputs have nothing to do with each other."""
        size, width = weight.shape
        w = weight[self._order]
        left = np.zeros_like(w)
        """Rows of V'E after a block: what the errors so far leave in them."""
        codes = np.empty((size, width), np.uint8)
        scales, zeros = np.empty((grid.blocks(size), width)), np.empty((grid.blocks(size), width), np.uint8)
        for block in self._blocks:
            rows = slice(block.start, block.stop)
            target = w[rows]
            if block.start:
                target = target + block.carry(left[rows])
            q, scale, zero = _round_block(target, block, grid, self._math)
            if block.stop < size:
                left[block.stop :] += block.later(w[rows] - q * scale)
            codes[self._order[rows]] = (q + zero).astype(np.uint8)
            scales[block.number], zeros[block.number] = scale, zero.astype(np.uint8)
        return Codes(grid, codes, scales.astype(grid.scale_type), None if grid.symmetric else zeros)


def _round_block(target: F64, block: _Block, grid: Grid, math: Arithmetic) -> tuple[F64, F64, F64]:
    """Codes minus zero [b, N], scale [N] and zero point [N] of one block: of a few choices the one that ends best."""
    width = target.shape[1]
    choice = best_choices(target, block.corner, grid, math, FINALISTS)
    several = np.tile(target, (1, len(choice.scale)))
    scale, zero = choice.scale.ravel(), choice.zero.ravel()
    q, error = _round_rows(several, block.feedback, Choice(scale, zero), grid, math)
    gap = math.coarse(block.corner.turned, error)
    loss = np.add.reduce(np.multiply(gap, gap, out=gap), axis=0).reshape(len(choice.scale), width)
    best = np.argmin(loss, axis=0) * width + np.arange(width)
    return q[:, best], scale[best], zero[best]


def _round_rows(target: F64, feedback: F64, choice: Choice, grid: Grid, math: Arithmetic) -> tuple[F64, F64]:
    """Round the rows of one block in turn. target [b, N] -> codes minus zero, and the errors."""
    size = len(target)
    low, high = -choice.zero, grid.top - choice.zero
    inverse = inverse_of(choice.scale)
    q, error = np.empty_like(target), np.empty_like(target)
    change = np.empty((PANEL, target.shape[1]))
    for start in range(0, size, PANEL):
        stop = min(start + PANEL, size)
        wanted = target[start:stop].copy()
        if start:
            wanted += math.coarse(feedback[start:stop, :start], error[:start])
        for i in range(start, stop):
            code, gap = q[i], error[i]
            np.rint(np.multiply(wanted[i - start], inverse, out=code), out=code)
            np.minimum(np.maximum(code, low, out=code), high, out=code)
            np.subtract(target[i], np.multiply(code, choice.scale, out=gap), out=gap)
            after = wanted[i + 1 - start :]
            after += np.multiply(feedback[i + 1 : stop, i, None], gap, out=change[: len(after)])
    return q, error
