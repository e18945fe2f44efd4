"""Rounding to nearest: least squares scales for symmetric 4-bit codes, absmax for 8 bits, min and max else."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.quant.codes import Codes, Grid
from phi4mm_export.weights.packing import absmax_scales, blocks_of, encode, least_squares_scales
from phi4mm_export.weights.rotation import rotated

SHRINK = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
"""Tried shares of the range from the smallest to the largest value; the least squared error wins."""


def round_to_nearest(weight: NDArray[np.float32], grid: Grid) -> Codes:
    """weight float32 [K, N] -> codes; no calibration enters."""
    size = len(weight)
    if grid.rotation:
        weight = rotated(weight.astype(np.float64), grid.rotation).astype(np.float32)
    blocks = blocks_of(np.ascontiguousarray(weight.T), grid.block_size)
    if not grid.symmetric:
        return _asymmetric(blocks, size, grid)
    scales = absmax_scales(blocks, grid.bits) if grid.bits == 8 else least_squares_scales(blocks, grid.bits)
    stored = scales.astype(grid.scale_type)
    codes = encode(blocks, stored.astype(np.float32), grid.bits)
    flat = codes.reshape(len(codes), -1)[:, :size]
    return Codes(grid, np.ascontiguousarray(flat.T), np.ascontiguousarray(stored.T), None)


def _asymmetric(blocks: NDArray[np.float32], size: int, grid: Grid) -> Codes:
    """blocks [N, B, block]; the zeros that fill the last block are within every range."""
    wide = blocks.astype(np.float64)
    low = np.minimum(np.minimum.reduce(wide, axis=-1), 0)
    high = np.maximum(np.maximum.reduce(wide, axis=-1), 0)
    best = np.full(low.shape, np.inf)
    scale, zero = np.zeros_like(low), np.zeros_like(low)
    for share in SHRINK:
        step = grid.stored((high - low) * share / grid.top)
        inverse = np.divide(1.0, step, out=np.zeros_like(step), where=step > 0)
        origin = np.clip(np.rint(-low * share * inverse), 0, grid.top)
        q = np.clip(np.rint(wide * inverse[..., None]) + origin[..., None], 0, grid.top)
        gap = wide - (q - origin[..., None]) * step[..., None]
        loss = np.add.reduce(gap * gap, axis=-1)
        better = loss < best
        best, scale, zero = np.where(better, loss, best), np.where(better, step, scale), np.where(better, origin, zero)
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.clip(np.rint(wide * inverse[..., None]) + zero[..., None], 0, grid.top).astype(np.uint8)
    flat = codes.reshape(len(codes), -1)[:, :size]
    return Codes(grid, np.ascontiguousarray(flat.T), scale.T.astype(grid.scale_type), zero.T.astype(np.uint8))
