"""Integer grids of one quantization block: scales, zero points, rounding.

A weight is stored as (code - zero) * scale with codes 0 .. 2**bits - 1. Symmetric blocks have zero = 2**(bits - 1)
and scales of either sign, since the code range is lopsided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.weights.exact import F64
from phi4mm_export.weights.rotation import turned_back

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Grid:
    """The kind of codes of a weight. scale_type: the element type scales are stored in.

    rotation: channels of the input that are mixed with each other before the product; 0 for none.
    """

    bits: int
    block_size: int
    symmetric: bool
    scale_type: np.dtype[Any]
    rotation: int = 0

    @property
    def half(self) -> int:
        """The zero point of symmetric codes."""
        return 1 << (self.bits - 1)

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def stored(self, scales: F64) -> F64:
        """Scales as the file will hold them."""
        return scales.astype(self.scale_type).astype(np.float64)

    def blocks(self, in_features: int) -> int:
        """Blocks of one output."""
        return -(-in_features // self.block_size)

    def nbytes(self, in_features: int, out_features: int) -> int:
        """Bytes of codes, scales and zero points of a weight [K, N]."""
        blocks = self.blocks(in_features)
        codes = blocks * self.block_size * self.bits // 8
        zeros = 0 if self.symmetric else -(-blocks * self.bits // 8)
        return out_features * (codes + blocks * self.scale_type.itemsize + zeros)


@dataclass(frozen=True)
class Codes:
    """A quantized weight: codes uint8 [K, N], scales [B, N] as stored, zeros uint8 [B, N] (None if symmetric)."""

    grid: Grid
    codes: U8
    scales: NDArray[Any]
    zeros: U8 | None

    def some(self, outputs: slice) -> Codes:
        """The codes of a range of outputs."""
        zeros = None if self.zeros is None else self.zeros[:, outputs]
        return Codes(self.grid, self.codes[:, outputs], self.scales[:, outputs], zeros)

    def values(self) -> F64:
        """The weights these codes stand for, float64 [K, N], as they act on the input before its rotation."""
        values = self._stored_values()
        return turned_back(values, self.grid.rotation) if self.grid.rotation else values

    def _stored_values(self) -> F64:
        wide = np.repeat(self.scales.astype(np.float64), self.grid.block_size, axis=0)[: len(self.codes)]
        if self.zeros is None:
            return (self.codes.astype(np.float64) - self.grid.half) * wide
        zeros = np.repeat(self.zeros, self.grid.block_size, axis=0)[: len(self.codes)]
        return (self.codes.astype(np.float64) - zeros) * wide


def joined(parts: Sequence[Codes]) -> Codes:
    """One weight from the codes of ranges of its outputs."""
    if len(parts) == 1:
        return parts[0]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Codes(
        parts[0].grid,
        np.concatenate([part.codes for part in parts], axis=1),
        np.concatenate([part.scales for part in parts], axis=1),
        np.concatenate(zeros, axis=1) if zeros else None,
    )


def inverse_of(scale: NDArray[Any]) -> NDArray[Any]:
    """1 / scale, and 0 where the scale is 0."""
    inverse: NDArray[Any] = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)
    return inverse
