"""From rows to the bytes of initializers, band by band.

A Stream yields one or more tensors whose rows come from the same bands: a quantized weight gives its codes and its
scales. `compute` is pure and thread-safe, so bands may be computed out of order; bytes never depend on how.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from phi4mm_export.checkpoint.values import count_non_finite
from phi4mm_export.errors import PackageError
from phi4mm_export.spec.model import LongRope
from phi4mm_export.weights.packing import quantize_rows
from phi4mm_export.weights.rope_tables import table_rows
from phi4mm_export.weights.rotation import rotated_rows
from phi4mm_export.weights.rows import Origin, Rows

BAND_NBYTES = 4 << 20
"""Float32 bytes of one band: large enough that threads pay (16-row bands lose all gain), small in memory."""
WORKING_COPIES = 3
"""Float32 arrays alive while a band is computed: as read, in work, and what is handed on."""
STRIPE_COLUMNS = 16
"""Columns copied at a time when a matrix is transposed: one cache line holds 16 float32 or 32 float16 values."""
Band = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to be written: its name in the graph, element type and shape."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the data file."""
        return self.num_values * self.dtype.bitwidth // 8


@dataclass(frozen=True)
class Stream:
    """Tensors written together: `compute(start, stop)` gives their rows start .. stop-1, one array per output."""

    outputs: tuple[TensorSpec, ...]
    height: int
    band: int
    compute: Callable[[int, int], Band]
    nbytes_read: int
    origin: Origin | None = None
    """What decides every byte; None when that is not known, and then nothing is ever resumed."""

    @property
    def nbytes(self) -> int:
        """Bytes of all outputs."""
        return sum(spec.nbytes for spec in self.outputs)

    @property
    def band_nbytes(self) -> int:
        """About the bytes that computing one band takes: its values as float32 three times (read, at work, result)."""
        values = sum(spec.num_values for spec in self.outputs)
        return WORKING_COPIES * 4 * values * min(self.band, self.height) // self.height

    def bands(self) -> list[tuple[int, int]]:
        """Row ranges in order."""
        return [(start, min(start + self.band, self.height)) for start in range(0, self.height, self.band)]


def dense_stream(spec: TensorSpec, rows: Rows, *, transposed: bool = False) -> Stream:
    """Rows as float16 or float32, [height, width] as stored or transposed to [width, height].

    Raises PackageError (when computed) where a finite value does not fit float16, naming tensor and value.
    """
    origin = rows.origin.and_then(kind="dense", transposed=transposed)
    if transposed:
        return Stream(
            (spec,),
            1,
            1,
            lambda _start, _stop: (narrow(rows.read(0, rows.height).T, spec, rows),),
            rows.nbytes_read,
            origin,
        )
    return Stream(
        (spec,),
        rows.height,
        _band_of(rows.width),
        lambda start, stop: (narrow(rows.read(start, stop), spec, rows),),
        rows.nbytes_read,
        origin,
    )


def packed_stream(
    qweight: TensorSpec, scales: TensorSpec, rows: Rows, *, bits: int, block_size: int, rotation: int = 0
) -> Stream:
    """Rows rounded to the nearest code of `bits` bits, with one scale per block.

    rotation: channels of a row that are mixed with each other first (weights/rotation.py), 0 for none.
    """
    scale_type = scales.dtype.numpy()

    def compute(start: int, stop: int) -> Band:
        values = rows.read(start, stop)
        if rotation:
            values = rotated_rows(values, rotation)
        try:
            return quantize_rows(values, bits, block_size, scale_type)
        except OverflowError as err:
            raise _overflow(scales, rows, float(np.abs(values).max())) from err

    origin = rows.origin.and_then(kind="packed", bits=bits, block_size=block_size, rotation=rotation)
    return Stream((qweight, scales), rows.height, _band_of(rows.width), compute, rows.nbytes_read, origin)


def rope_stream(cosine: TensorSpec, sine: TensorSpec, rope: LongRope, factors: tuple[float, ...]) -> Stream:
    """The two tables of one set of LongRoPE factors."""
    kind = cosine.dtype.numpy()

    def compute(start: int, stop: int) -> Band:
        cos, sin = table_rows(rope, factors, start, stop)
        return cos.astype(kind), sin.astype(kind)

    origin = Origin((), {"kind": "rope", "rope": dataclasses.asdict(rope), "factors": list(factors)})
    return Stream((cosine, sine), cosine.shape[0], _band_of(cosine.shape[1]), compute, 0, origin)


def narrow(values: NDArray[Any], spec: TensorSpec, rows: Rows) -> NDArray[Any]:
    """Values in the type of `spec`, rounded to nearest; a value beyond the type is an error, never an infinity."""
    with np.errstate(over="ignore"):
        out = values.astype(spec.dtype.numpy(), copy=False)
    if spec.dtype is ir.DataType.FLOAT16 and count_non_finite(out):
        raise _overflow(spec, rows, float(np.abs(values).max()))
    return out if out.flags.c_contiguous else _in_stripes(out)


def _in_stripes(columns: NDArray[Any]) -> NDArray[Any]:
    """A C-contiguous copy of a matrix that is stored by columns: few columns at a time stay in cache while the rows of
    the copy are filled (five times faster than one copy in float16)."""
    out = np.empty(columns.shape, columns.dtype)
    for start in range(0, columns.shape[1], STRIPE_COLUMNS):
        out[:, start : start + STRIPE_COLUMNS] = columns[:, start : start + STRIPE_COLUMNS]
    return out


def _overflow(spec: TensorSpec, rows: Rows, largest: float) -> PackageError:
    return PackageError(
        f"the value {largest:g} does not fit float16 (largest 65504) in which {spec.name} would be stored",
        where=rows.where,
        fix="export this part in float32: --encoder-precision fp32 for an encoder, --ep cpu for the whole package",
    )


def _band_of(width: int) -> int:
    return max(1, BAND_NBYTES // (4 * width))
