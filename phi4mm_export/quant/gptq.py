"""GPTQ: round input channels one after another, each compensating the error of those before it.

With H = V V' (V upper triangular) the loss of an error E = W - Q is |V'E|^2, and row i of V'E is

    V[i, i] * (w[i] - q[i] + sum over j < i of (V[j, i] / V[i, i]) * (w[j] - q[j])),

so rounding w[i] plus that sum is the greedy choice. It equals the published algorithm, whose upper factor of inv(H)
is inv(V), but needs one factorisation and no inverse.
Sources: GPTQ (arXiv 2210.17323); its equivalence with this form, QuIP (arXiv 2307.13304), theorem 6.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.quant.arithmetic import PANEL, Arithmetic, solve_upper
from phi4mm_export.quant.codes import Codes, Grid, round_to
from phi4mm_export.quant.scales import Choice, best_choices
from phi4mm_export.quant.settings import Order
from phi4mm_export.weights.exact import F64

FINALISTS = 3
"""Scales of a block for which its rows are really rounded in turn, before one is taken."""
COLUMNS = 512
"""Outputs solved together; a fixed number, so that bytes do not depend on how many workers there are."""


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


@dataclass(frozen=True)
class Solver:
    """Rounds weights of one input. order: channels in the order of rounding; v: the factor of H in that order."""

    grid: Grid
    math: Arithmetic
    order: NDArray[np.int64]
    v: F64

    def quantize(self, weight: F64, *, jobs: int = 1) -> Codes:
        """weight [K, N] in natural order -> codes in natural order."""
        starts = range(0, weight.shape[1], COLUMNS)
        with ThreadPoolExecutor(jobs) as pool:
            parts = list(pool.map(lambda at: self._columns(weight[:, at : at + COLUMNS]), starts))
        codes, scales, zeros = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
        return Codes(self.grid, codes, scales.astype(self.grid.scale_type), None if self.grid.symmetric else zeros)

    def _columns(self, weight: F64) -> tuple[NDArray[np.uint8], F64, NDArray[np.uint8]]:
        grid, v = self.grid, self.v
        size, width = weight.shape
        blocks = grid.blocks(size)
        w = weight[self.order]
        error = np.empty_like(w)
        codes = np.empty((size, width), np.uint8)
        scales, zeros = np.empty((blocks, width)), np.empty((blocks, width), np.uint8)
        start = 0
        while start < size:
            block = int(self.order[start]) // grid.block_size
            stop = start + min(grid.block_size, size - block * grid.block_size)
            corner = v[start:stop, start:stop]
            target = w[start:stop].copy()
            if start:
                carried = self.math.coarse(np.ascontiguousarray(v[:start, start:stop].T), error[:start])
                inverse = solve_upper(corner, np.eye(stop - start), self.math)
                target += self.math.coarse(np.ascontiguousarray(inverse.T), carried)
            q, scale, zero = _round_block(target, corner, grid, self.math)
            error[start:stop] = w[start:stop] - q * scale
            codes[self.order[start:stop]] = (q + zero).astype(np.uint8)
            scales[block], zeros[block] = scale, zero.astype(np.uint8)
            start = stop
        return codes, scales, zeros


def _round_block(target: F64, corner: F64, grid: Grid, math: Arithmetic) -> tuple[F64, F64, F64]:
    """Codes minus zero [b, N], scale [N] and zero point [N] of one block: of a few choices the one that ends best."""
    turned = np.ascontiguousarray(corner.T)
    best: tuple[F64, ...] | None = None
    for choice in best_choices(target, corner, grid, math, FINALISTS):
        q = _round_rows(target, corner, choice, grid, math)
        left = math.coarse(turned, target - q * choice.scale)
        found = (q, choice.scale, choice.zero, np.add.reduce(left * left, axis=0))
        better = best is None or found[3] < best[3]
        best = found if best is None else tuple(np.where(better, n, o) for n, o in zip(found, best, strict=True))
    assert best is not None
    return best[0], best[1], best[2]


def _round_rows(target: F64, corner: F64, choice: Choice, grid: Grid, math: Arithmetic) -> F64:
    """Round the rows of one block in turn. target [b, N], corner: V's diagonal block [b, b] -> codes minus zero."""
    size = len(target)
    low, high = -choice.zero, grid.top - choice.zero
    feedback = np.ascontiguousarray((corner / np.diagonal(corner)).T)
    q = np.empty_like(target)
    error = np.empty_like(target)
    for start in range(0, size, PANEL):
        stop = min(start + PANEL, size)
        wanted = target[start:stop].copy()
        if start:
            wanted += math.coarse(feedback[start:stop, :start], error[:start])
        for i in range(start, stop):
            q[i] = round_to(wanted[i - start], choice.scale, low, high)
            error[i] = target[i] - q[i] * choice.scale
            if i + 1 < stop:
                wanted[i + 1 - start :] += feedback[i + 1 : stop, i, None] * error[i]
    return q
