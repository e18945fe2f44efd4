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


_PEAK, _L2, _COSINE = Measure.PEAK, Measure.RELATIVE_L2, Measure.COSINE
GRAPHS = ("vision", "speech", "embedding", "decoder", "chain")
TOLERANCES: dict[Precision, dict[str, Tolerance]] = {
    # Rounding noise of float32 graphs on the CPU: 3e-6 vision, 5e-6 speech, 0 embedding, 8e-6 decoder, 1e-5 chain.
    # The least of the deliberate mistakes (erf for tanh in a GELU) costs 4e-4; what a CUDA kernel adds must fit too.
    Precision.FP32: {
        "vision": Tolerance(_PEAK, 1e-4),
        "speech": Tolerance(_PEAK, 1e-4),
        "embedding": Tolerance(_PEAK, 1e-6),
        "decoder": Tolerance(_PEAK, 2e-4),
        "chain": Tolerance(_PEAK, 3e-4),
    },
    # Measured on the CPU: 6e-4 vision, 5.3e-3 speech, 2e-4 embedding, 3.2e-3 decoder, 7.6e-3 chain of all four; the
    # original itself, computed in float16, is as far off (runs of the reference: 3e-3, 2.5e-2 and 3e-2 by its peaks).
    Precision.FP16: {
        "vision": Tolerance(_L2, 1e-3),
        "speech": Tolerance(_L2, 6e-3),
        "embedding": Tolerance(_L2, 1e-3),
        "decoder": Tolerance(_L2, 1.5e-2),
        "chain": Tolerance(_L2, 3e-2),
    },
    # Worst array of any case on the tiny checkpoint, whose 128 channels forgive less than real widths: 0.9926 with
    # int8 activations (accuracy level 4), 0.9981 or better with float ones.
    Precision.INT8: dict.fromkeys(GRAPHS, Tolerance(_COSINE, 0.99)),
    # Likewise 0.67 for blocks of 32 rounded to nearest; a wrong adapter or table gives 0.3 and less.
    Precision.INT4: dict.fromkeys(GRAPHS, Tolerance(_COSINE, 0.5)),
}
LONG_FP32 = Tolerance(_PEAK, 2e-3)
"""Over 4,000 tokens: rope tables computed in float64 instead of the original's float32 cost up to 4e-4 there."""
CLEAR_MARGIN = {Precision.FP32: 5e-4, Precision.FP16: 0.05, Precision.INT8: 0.25, Precision.INT4: 1.5}
"""Twice the largest error of a logit or more, in units of the logits' rms: below it, rounding decides the token."""


def tolerance_of(precision: Precision, graph: str, *, long: bool = False) -> Tolerance:
    """What `graph` (vision, speech, embedding, decoder, chain) may differ by; `long`: over 4,000 tokens."""
    if long and precision is Precision.FP32:
        return LONG_FP32
    return TOLERANCES[precision][graph]


def clear_margin(precision: Precision) -> float:
    """The lead of the best token, in units of the logits' rms, above which another greedy token is an error."""
    return CLEAR_MARGIN[precision]


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
