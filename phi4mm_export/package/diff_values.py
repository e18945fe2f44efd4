"""How far two constants are apart: by value, and for quantized weights by code and by what the codes stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import PackageError
from phi4mm_export.package.tensor_bytes import CHUNK, TensorBytes
from phi4mm_export.spec.on_disk import is_file
from phi4mm_export.weights.packing import unpack
from phi4mm_export.weights.rotation import turned_back

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Distance:
    """Two arrays of the same shape. `differing` counts values (bytes, where several values share one); `rel_l2` is
    |a - b| / |a|, 0 for equal arrays, infinite for a zero `a` or values that are no numbers."""

    count: int
    differing: int
    max_abs: float
    rel_l2: float

    @property
    def equal(self) -> bool:
        return self.differing == 0

    def as_json(self) -> dict[str, float | int | None]:
        """Plain figures; what is not finite becomes null."""
        return {
            "count": self.count,
            "differing": self.differing,
            "max_abs": self.max_abs if math.isfinite(self.max_abs) else None,
            "rel_l2": self.rel_l2 if math.isfinite(self.rel_l2) else None,
        }


class _Sums:
    """Running figures over pieces."""

    def __init__(self) -> None:
        self.count = self.differing = 0
        self.largest = self.error = self.norm = 0.0

    def add(self, a: NDArray[Any], b: NDArray[Any], differing: int) -> None:
        """One piece, as float64."""
        self.count += a.size
        self.differing += differing
        with np.errstate(all="ignore"):
            gap = a.astype(np.float64) - b.astype(np.float64)
            self.norm += float(np.square(a.astype(np.float64)).sum())
            if differing and gap.size:
                self.largest = max(self.largest, float(np.nan_to_num(np.abs(gap), nan=math.inf).max()))
                self.error += float(np.square(gap).sum())

    def distance(self) -> Distance:
        if self.differing == 0:
            return Distance(self.count, 0, 0.0, 0.0)
        rel = math.sqrt(self.error / self.norm) if self.norm > 0 and math.isfinite(self.error) else math.inf
        return Distance(self.count, self.differing, self.largest, rel)


def same_bytes(a: TensorBytes, b: TensorBytes) -> bool:
    """Whether two tensors hold the same bytes; the same place of the same file is not read."""
    if a.nbytes != b.nbytes:
        return False
    if a.path is not None and b.path is not None and a.offset == b.offset:
        known = is_file(a.path) and is_file(b.path)
        if known and a.path.samefile(b.path) and a.path.stat().st_size >= a.offset + a.nbytes:
            return True
    return all(data == b.read(start, len(data)) for start, data in a.chunks())


def value_distance(a: TensorBytes, b: TensorBytes) -> Distance:
    """The distance of two tensors of equal dims; values of different types are compared as float64.

    Tensors of packed or text type are compared byte by byte.
    """
    first, second = a.numpy_type, b.numpy_type
    if first is None or second is None:
        first = second = np.dtype(np.uint8)
    sums, step = _Sums(), max(1, CHUNK // max(first.itemsize, second.itemsize))
    count = a.nbytes // first.itemsize
    for start in range(0, count, step):
        stop = min(start + step, count)
        x = np.frombuffer(a.read(start * first.itemsize, (stop - start) * first.itemsize), first)
        y = np.frombuffer(b.read(start * second.itemsize, (stop - start) * second.itemsize), second)
        same_type = first == second
        if same_type and x.tobytes() == y.tobytes():
            sums.add(x, x, 0)
            continue
        if same_type:
            width = first.itemsize
            unequal = (x.view(np.uint8).reshape(-1, width) != y.view(np.uint8).reshape(-1, width)).any(axis=1)
        else:
            unequal = x.astype(np.float64) != y.astype(np.float64)
        sums.add(x, y, int(unequal.sum()))
    return sums.distance()


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight in blocks of integers: rows of `width` values, codes packed along the row.

    codes: uint8 [rows, blocks * block * bits / 8]; scales: [rows, blocks]; zeros: packed like the codes, one per block
    and row padded to whole bytes, or None for 2 ** (bits - 1). rotation: channels that the stored rows are mixed by, as
    the graph does with the input; values are read without it.
    Source: ONNX Runtime, docs/ContribOperators.md, MatMulNBits and GatherBlockQuantized.
    """

    rows: int
    width: int
    bits: int
    block: int
    codes: TensorBytes
    scales: TensorBytes
    zeros: TensorBytes | None = None
    rotation: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of a row, the last one perhaps partly used."""
        return -(-self.width // self.block)

    @property
    def parts(self) -> tuple[TensorBytes, ...]:
        """The tensors that make the weight up."""
        return (self.codes, self.scales) + ((self.zeros,) if self.zeros else ())

    def read(self, start: int, stop: int) -> tuple[NDArray[np.uint8], F32]:
        """Codes uint8 and dequantized values float32 of some rows, both [stop - start, width]."""
        n, blocks = stop - start, self.blocks
        packed = np.frombuffer(
            self.codes.read(start * self._row_nbytes, n * self._row_nbytes), np.uint8
        )  # whatever the element type, the bytes are the packed codes
        codes = unpack(packed.reshape(n, blocks, -1), self.bits)
        scales = self.scales.rows(start, stop, blocks).astype(np.float32)
        values = (codes.astype(np.float32) - self._zero_points(start, stop)) * scales[..., None]
        rows: F32 = values.reshape(n, -1)[:, : self.width]
        if self.rotation:
            rows = turned_back(rows.T.astype(np.float64), self.rotation).T.astype(np.float32)
        return codes.reshape(n, -1)[:, : self.width], rows

    @property
    def _row_nbytes(self) -> int:
        return self.blocks * self.block * self.bits // 8

    def _zero_points(self, start: int, stop: int) -> F32:
        """[stop - start, blocks, 1], or one number for all."""
        if self.zeros is None:
            return np.array(2 ** (self.bits - 1), np.float32)
        n, kind = stop - start, self.zeros.numpy_type
        if kind is not None and kind.kind == "f":
            return self.zeros.rows(start, stop, self.blocks).astype(np.float32)[..., None]
        width = -(-self.blocks * self.bits // 8)
        packed = np.frombuffer(self.zeros.read(start * width, n * width), np.uint8).reshape(n, width)
        return unpack(packed, self.bits)[:, : self.blocks].astype(np.float32)[..., None]


MOST_TURNED_NBYTES = 256 << 20
"""A weight stored column by column is read whole up to this size; larger ones are not compared."""


@dataclass(frozen=True)
class DenseWeight:
    """A float weight as rows of `width` values; `turned` if it is stored as [width, rows]."""

    rows: int
    width: int
    values: TensorBytes
    turned: bool

    @property
    def parts(self) -> tuple[TensorBytes, ...]:
        """The tensor that holds it."""
        return (self.values,)

    def read(self, start: int, stop: int) -> tuple[None, F32]:
        """No codes, and values float32 [stop - start, width].

        Raises PackageError for a weight that would have to be turned and is too large to hold.
        """
        if not self.turned:
            return None, self.values.rows(start, stop, self.width).astype(np.float32)
        if self.values.nbytes > MOST_TURNED_NBYTES:
            raise PackageError(f"{self.values.nbytes:,} bytes are too many to turn", where=self.values.place)
        return None, self.values.rows(0, self.width, self.rows)[:, start:stop].T.astype(np.float32)


Weight = QuantizedWeight | DenseWeight


@dataclass(frozen=True)
class CodeDistance:
    """Two quantized weights. `codes` counts codes, None where their formats differ so that codes cannot be compared;
    `steps` is the largest difference of two codes; `values` compares what they stand for."""

    codes: int | None
    differing: int | None
    steps: int | None
    values: Distance

    @property
    def equal(self) -> bool:
        return self.values.equal and not self.differing

    def as_json(self) -> Mapping[str, Any]:
        """Plain figures."""
        return {
            "codes": self.codes,
            "codes_differing": self.differing,
            "largest_code_step": self.steps,
            **{f"dequantized_{key}": value for key, value in self.values.as_json().items()},
        }


def weight_distance(a: Weight, b: Weight) -> CodeDistance:
    """The distance of two weights of equal rows and width, in pieces of a few megabytes.

    Codes are compared where both are quantized in one format, what they stand for always.
    """
    sums, codes, steps = _Sums(), 0, 0
    formats = [(side.bits, side.block, side.rotation) if isinstance(side, QuantizedWeight) else None for side in (a, b)]
    alike = formats[0] is not None and formats[0] == formats[1]
    whole = any(isinstance(side, DenseWeight) and side.turned for side in (a, b))
    step = a.rows if whole else max(1, CHUNK // (8 * a.width))
    for start in range(0, a.rows, step):
        stop = min(start + step, a.rows)
        (x_codes, x), (y_codes, y) = a.read(start, stop), b.read(start, stop)
        if x_codes is not None and y_codes is not None and alike:
            apart = np.abs(x_codes.astype(np.int16) - y_codes.astype(np.int16))
            codes += int(np.count_nonzero(apart))
            steps = max(steps, int(apart.max(initial=0)))
        sums.add(x, y, int(np.count_nonzero(x != y)))
    total = a.rows * a.width
    if not alike:
        return CodeDistance(None, None, None, sums.distance())
    return CodeDistance(total, codes, steps, sums.distance())
