"""How far two outputs are apart, and how far they may be. numpy only.

Three measures of one pair of arrays, each blind to something the others see: the largest difference over the rms of
the expected values (one wrong row), relative L2 (the whole), cosine (direction, indifferent to scale).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Precision(StrEnum):
    """The coarsest number format a graph computes with."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"


class Measure(StrEnum):
    """The figures of `Errors` a tolerance can speak of."""

    PEAK = "largest difference / rms"
    RELATIVE_L2 = "relative L2"
    COSINE = "cosine"


@dataclass(frozen=True)
class Errors:
    """How far `found` is from `expected`; `fault` is a sentence when they cannot be compared, else empty."""

    peak: float
    relative_l2: float
    cosine: float
    fault: str = ""

    def of(self, measure: Measure) -> float:
        """The figure that `measure` names."""
        return {Measure.PEAK: self.peak, Measure.RELATIVE_L2: self.relative_l2, Measure.COSINE: self.cosine}[measure]


@dataclass(frozen=True)
class Tolerance:
    """The worst acceptable figure of one measure: an upper bound, or a lower bound for the cosine."""

    measure: Measure
    limit: float

    def holds(self, errors: Errors) -> bool:
        """Whether the arrays could be compared and are close enough."""
        figure = errors.of(self.measure)
        close = figure >= self.limit if self.measure is Measure.COSINE else figure <= self.limit
        return not errors.fault and close

    def __str__(self) -> str:
        return f"{self.measure} {'at least' if self.measure is Measure.COSINE else 'at most'} {self.limit:g}"


def errors(found: Array, expected: Array) -> Errors:
    """The three measures, computed in float64. Different shapes, empty arrays, NaN and infinity are faults."""
    fault = _fault(found, expected)
    if fault:
        return Errors(np.inf, np.inf, -1.0, fault)
    a, b = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    difference = a - b
    size = float(np.linalg.norm(b))
    if size == 0.0:
        distance = float(np.abs(difference).max())
        return Errors(distance, distance, 1.0 if distance == 0.0 else 0.0)
    length = float(np.linalg.norm(a))
    return Errors(
        peak=float(np.abs(difference).max()) * len(b) ** 0.5 / size,
        relative_l2=float(np.linalg.norm(difference)) / size,
        cosine=float(a @ b) / (length * size) if length else 0.0,
    )


def worst(all_errors: Iterable[Errors]) -> Errors:
    """The worst figure of every measure, and the first fault; none at all is a fault."""
    listed = list(all_errors)
    if not listed:
        return Errors(np.inf, np.inf, -1.0, "nothing was compared")
    return Errors(
        peak=max(e.peak for e in listed),
        relative_l2=max(e.relative_l2 for e in listed),
        cosine=min(e.cosine for e in listed),
        fault=next((e.fault for e in listed if e.fault), ""),
    )


def _fault(found: Array, expected: Array) -> str:
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, expected {list(expected.shape)}"
    if not found.size:
        return "the output is empty"
    bad = found.size - int(np.isfinite(found).sum())
    return f"{bad:,} of {found.size:,} values are NaN or infinite" if bad else ""
