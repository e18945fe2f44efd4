"""Integer weights: rounding by blocks, and the byte layout of MatMulNBits and GatherBlockQuantized.

A row of K values is cut into ceil(K / block) blocks, each with one scale. Codes are unsigned around a zero point of
2**(bits - 1), which both operators assume when none is given: value = (code - zero) * scale.
Source: ONNX Runtime, docs/ContribOperators.md, MatMulNBits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

_SEARCH_8TH = (6.1, 6.6, 7.1, 7.5, 8.0, 8.5)
"""INT4 candidates: the largest value of a block lands at -8 * (8 / x) ... : its magnitude divided by each of these."""
_SEARCH_7TH = (6.0, 6.5, 7.0, 7.5)
"""INT4 candidates of the other sign, where only +7 is there."""


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
    half = 2 ** (bits - 1)
    peak = signed_peak(blocks)
    best_gain = np.full(peak.shape, -1.0, np.float32)
    best = np.zeros(peak.shape, np.float32)
    levels = [-x * half / 8 for x in _SEARCH_8TH] + [x * half / 8 for x in _SEARCH_7TH]
    for level in levels:
        scale = peak / np.float32(level)
        q = _signed_codes(blocks, scale, half)
        wq = np.add.reduce(blocks * q, axis=-1)
        qq = np.add.reduce(q * q, axis=-1)
        safe = np.where(qq > 0, qq, np.float32(1))
        gain = wq * wq / safe
        better = gain > best_gain
        best_gain = np.where(better, gain, best_gain)
        best = np.where(better, wq / safe, best)
    return best


def encode(blocks: F32, scales: F32, bits: int) -> U8:
    """Codes of every value for given scales, uint8 [n, b, block]; a block with scale 0 is all zero point."""
    half = 2 ** (bits - 1)
    return (_signed_codes(blocks, scales, half) + np.float32(half)).astype(np.uint8)


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


def _signed_codes(blocks: F32, scales: F32, half: int) -> F32:
    """clip(rint(w / s)) to -half .. half - 1, 0 where the scale is 0."""
    live = scales != 0
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=live)
    return np.clip(np.rint(blocks * inverse[..., None]), -half, half - 1)
