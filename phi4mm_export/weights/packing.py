"""Integer weights: rounding by blocks, and the byte layout of MatMulNBits and GatherBlockQuantized.

A row of K values is cut into ceil(K / block) blocks, each with one scale. Codes are unsigned around a zero point of
2**(bits - 1), which both operators assume when none is given: value = (code - zero) * scale.
Source: ONNX Runtime, docs/ContribOperators.md, MatMulNBits.

The search for scales works on tiles in which a block is a column: numpy then runs along thousands of blocks instead of
along the 32 values of one (10 times faster), and a tile stays in a core's cache from one candidate to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

_SEARCH_8TH = (6.1, 6.6, 7.1, 7.5, 8.0, 8.5)
"""INT4 candidates: the largest value of a block lands at -8 * (8 / x) ... : its magnitude divided by each of these."""
_SEARCH_7TH = (6.0, 6.5, 7.0, 7.5)
"""INT4 candidates of the other sign, where only +7 is there."""
TILE_VALUES = 1 << 16
"""Values of one tile: 256 KiB, so that values, codes and products of a tile fit a core's second-level cache."""
_PAIRWISE_ROWS = 128
"""numpy's pairwise sum splits longer rows in two (PW_BLOCKSIZE)."""


def blocks_of(rows: F32, block: int) -> F32:
    """[n, K] -> [n, ceil(K / block), block], the last block filled with zeros."""
    n, width = rows.shape
    count = -(-width // block)
    if count * block == width:
        return rows.reshape(n, count, block)
    padded = np.zeros((n, count * block), np.float32)
    padded[:, :width] = rows
    return padded.reshape(n, count, block)


def signed_peak(blocks: F32) -> F32:
    """The value of largest magnitude in every block, with its sign.  [n, b, block] -> [n, b]."""
    high, low = blocks.max(axis=-1), blocks.min(axis=-1)
    peak: F32 = np.where(high >= -low, high, low)
    return peak


def absmax_scales(blocks: F32, bits: int) -> F32:
    """Scale so that the largest magnitude of each block is the largest positive code.  [n, b, block] -> [n, b]."""
    peak: F32 = np.abs(signed_peak(blocks))
    return peak / np.float32(2 ** (bits - 1) - 1)


def least_squares_scales(blocks: F32, bits: int) -> F32:
    """Per block the scale, of ten tried and each refined in closed form, with the least squared rounding error.

    A candidate s gives codes q = clip(rint(w / s)); the best scale for these codes is (w . q) / (q . q), and its
    error |w|^2 - (w . q)^2 / (q . q), so the candidate with the largest (w . q)^2 / (q . q) wins. Scales may be
    negative: the code range is lopsided (-8 .. 7).  [n, b, block] -> [n, b].
    """
    flat = blocks.reshape(-1, blocks.shape[-1])
    scales = np.empty(flat.shape[0], np.float32)
    for start, stop in _tiles(flat):
        scales[start:stop] = _search(np.ascontiguousarray(flat[start:stop].T), 2 ** (bits - 1))
    return scales.reshape(blocks.shape[:-1])


def column_sums(columns: F32) -> F32:
    """Sum of every column, rounded as numpy's pairwise sum of a row rounds.  [block, n] -> [n]; overwrites `columns`.

    Eight running sums, then a tree; above 128 rows two halves. The order is fixed, so the bits depend on no machine.
    """
    block = columns.shape[0]
    if block > _PAIRWISE_ROWS:
        half = block // 2 - block // 2 % 8
        return column_sums(columns[:half]) + column_sums(columns[half:])
    whole = block - block % 8
    total: F32
    if whole == 0:
        total, rest = columns[0].copy(), 1
    else:
        r, rest = columns[:8], whole
        for i in range(8, whole, 8):
            r += columns[i : i + 8]
        total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]))
    for i in range(rest, block):
        total += columns[i]
    return total


def encode(blocks: F32, scales: F32, bits: int) -> U8:
    """Codes of every value for given scales, uint8 [n, b, block]; a block with scale 0 is all zero point."""
    half = 2 ** (bits - 1)
    flat, each = blocks.reshape(-1, blocks.shape[-1]), scales.reshape(-1, 1)
    codes = np.empty(flat.shape, np.uint8)
    work = np.empty((min(_tile_rows(flat), flat.shape[0]), flat.shape[1]), np.float32)
    for start, stop in _tiles(flat):
        q = _signed_codes(flat[start:stop], _inverse(each[start:stop]), half, work[: stop - start])
        np.add(q, np.float32(half), out=q)
        codes[start:stop] = q
    return codes.reshape(blocks.shape)


def decode(codes: U8, scales: F32, bits: int) -> F32:
    """(code - zero) * scale, float32 [n, b, block]."""
    return (codes.astype(np.float32) - np.float32(2 ** (bits - 1))) * scales[..., None]


def pack(codes: U8, bits: int) -> U8:
    """uint8 codes [..., block] -> bytes [..., block * bits / 8]; of two 4-bit codes the first is the low nibble."""
    if bits == 8:
        return codes
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack(packed: U8, bits: int) -> U8:
    """The reverse of `pack`."""
    if bits == 8:
        return packed
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = packed & np.uint8(15)
    codes[..., 1::2] = packed >> np.uint8(4)
    return codes


def quantize_rows(rows: F32, bits: int, block: int, scale_type: np.dtype[Any]) -> tuple[U8, NDArray[Any]]:
    """Round rows to the nearest code, scale chosen per block: absmax for 8 bits, least squares for 4.

    rows: float32 [n, K]. Returns bytes uint8 [n, ceil(K/block), block*bits/8] and scales [n, ceil(K/block)] in
    `scale_type`; codes are chosen for the scales as they are stored.
    Raises OverflowError when a scale does not fit `scale_type`.
    """
    blocks = blocks_of(rows, block)
    scales = absmax_scales(blocks, bits) if bits == 8 else least_squares_scales(blocks, bits)
    with np.errstate(over="ignore"):
        stored = scales.astype(scale_type)
    if not np.isfinite(stored).all():
        raise OverflowError(f"a scale does not fit {scale_type}")
    return pack(encode(blocks, stored.astype(np.float32), bits), bits), stored


def _search(columns: F32, half: int) -> F32:
    """The scale of every column of `columns` [block, n] by the rule of `least_squares_scales`, [n]."""
    high, low = columns.max(axis=0), columns.min(axis=0)
    peak = np.where(high >= -low, high, low)
    best_gain, best = np.full(peak.shape, -1.0, np.float32), np.zeros(peak.shape, np.float32)
    codes, products = np.empty_like(columns), np.empty_like(columns)
    for level in [-x * half / 8 for x in _SEARCH_8TH] + [x * half / 8 for x in _SEARCH_7TH]:
        q = _signed_codes(columns, _inverse(peak / np.float32(level)), half, codes)
        wq = column_sums(np.multiply(columns, q, out=products))
        qq = np.add.reduce(np.multiply(q, q, out=products), axis=0)  # integers below 2**24: exact in any order
        safe = np.where(qq > 0, qq, np.float32(1))
        gain = wq * wq / safe
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best, wq / safe, where=better)
    return best


def _signed_codes(values: F32, inverse: F32, half: int, out: F32) -> F32:
    """clip(rint(w / s)) to -half .. half - 1, written to `out`; `inverse` is 1 / s and broadcasts against `values`."""
    np.multiply(values, inverse, out=out)
    np.rint(out, out=out)
    return np.clip(out, np.float32(-half), np.float32(half - 1), out=out)


def _inverse(scales: F32) -> F32:
    """1 / s, and 0 where the scale is 0."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)


def _tile_rows(flat: F32) -> int:
    return max(1, TILE_VALUES // int(flat.shape[1]))


def _tiles(flat: F32) -> Iterator[tuple[int, int]]:
    """Ranges of rows of [blocks, block] of TILE_VALUES values each."""
    step = _tile_rows(flat)
    return ((start, min(start + step, flat.shape[0])) for start in range(0, flat.shape[0], step))
