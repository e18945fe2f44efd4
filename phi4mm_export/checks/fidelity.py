"""How much of the float model's signal another package keeps: measures of arrays, and of next-token distributions.

Everything is accumulated row by row in float64, so that 36 crops or 200,064 logits a position never stand in memory
twice. Figures are None where they cannot be: other shapes, NaN, nothing compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]

QUIET_ROW = 1e-3
"""A position whose norm is below this share of the rms norm is measured against that share: no division by silence."""


@dataclass(frozen=True)
class Fidelity:
    """How far `found` is from `expected` over all positions (rows), and at the worst of them.

    relative_l2: ||found - expected|| / ||expected||. worst_position: its number from 0; worst_position_l2: relative L2
    of that row alone. `fault` says why there are no figures, else it is empty.
    """

    relative_l2: float | None
    cosine: float | None
    max_abs: float | None
    positions: int
    worst_position: int | None
    worst_position_l2: float | None
    fault: str = ""


class RowComparison:
    """Fidelity of two arrays that come in pieces of rows [..., D]."""

    def __init__(self) -> None:
        self._difference = self._expected = self._found = self._dot = self._max_abs = 0.0
        self._row_differences: list[float] = []
        self._row_norms: list[float] = []
        self._fault = ""

    def add(self, found: Array, expected: Array) -> None:
        """Compare the next rows. A fault sticks: the result then has no figures."""
        if found.shape != expected.shape:
            self._fault = self._fault or f"shape {list(found.shape)}, expected {list(expected.shape)}"
            return
        for a, b in zip(found.reshape(-1, found.shape[-1]), expected.reshape(-1, expected.shape[-1]), strict=True):
            self._add_row(a.astype(np.float64), b.astype(np.float64))

    def _add_row(self, found: F64, expected: F64) -> None:
        bad = found.size - int(np.isfinite(found).sum())
        if bad:
            self._fault = self._fault or f"{bad:,} of {found.size:,} values of a position are NaN or infinite"
            return
        difference = found - expected
        squares = float(difference @ difference), float(expected @ expected)
        self._difference += squares[0]
        self._expected += squares[1]
        self._found += float(found @ found)
        self._dot += float(found @ expected)
        self._max_abs = max(self._max_abs, float(np.abs(difference).max(initial=0.0)))
        self._row_differences.append(squares[0])
        self._row_norms.append(squares[1])

    def position_errors(self) -> F64:
        """Relative L2 of every position [P], in order."""
        norms = np.sqrt(np.array(self._row_norms, np.float64))
        differences = np.sqrt(np.array(self._row_differences, np.float64))
        floor = QUIET_ROW * float(np.sqrt(np.mean(norms**2))) if norms.size else 0.0
        return np.asarray(differences / np.maximum(norms, floor if floor > 0 else 1.0))

    def result(self) -> Fidelity:
        """The figures over all rows so far."""
        rows = self.position_errors()
        if self._fault or not rows.size:
            return Fidelity(None, None, None, rows.size, None, None, self._fault or "nothing was compared")
        size = self._expected**0.5
        product = (self._found * self._expected) ** 0.5
        worst = int(rows.argmax())
        return Fidelity(
            relative_l2=self._difference**0.5 / size if size else self._difference**0.5,
            cosine=min(1.0, self._dot / product) if product else float(self._difference == 0.0),
            max_abs=self._max_abs,
            positions=rows.size,
            worst_position=worst,
            worst_position_l2=float(rows[worst]),
        )


def fidelity(found: Array, expected: Array) -> Fidelity:
    """Fidelity of two whole arrays [..., D]."""
    rows = RowComparison()
    rows.add(found, expected)
    return rows.result()


@dataclass(frozen=True)
class TokenFigures:
    """How two models' next-token distributions differ over `positions` positions.

    kl: divergence of the found distribution from the float model's, nats, mean and largest. top1: share of positions
    with the same most likely token. nll: mean negative log-likelihood of the tokens that really come next, nats
    (None where none were given); nll_float: the float model's.
    """

    positions: int
    kl_mean: float | None
    kl_max: float | None
    top1: float | None
    nll: float | None = None
    nll_float: float | None = None
    fault: str = ""

    @property
    def perplexity(self) -> float | None:
        """exp(nll)."""
        return _exp(self.nll)

    @property
    def perplexity_float(self) -> float | None:
        """exp(nll_float)."""
        return _exp(self.nll_float)


class TokenComparison:
    """TokenFigures and Fidelity of logits that come position by position."""

    def __init__(self) -> None:
        self.rows = RowComparison()
        self._kl: list[float] = []
        self._same: list[bool] = []
        self._nll: list[tuple[float, float]] = []
        self._fault = ""

    def add(self, found: Array, expected: Array, target: int | None = None) -> None:
        """The logits [V] of one position; `target` is the token that really comes next."""
        self.rows.add(found[None], expected[None])
        if found.shape != expected.shape:
            self._fault = self._fault or f"{found.shape[-1]:,} logits, expected {expected.shape[-1]:,}"
            return
        if not np.isfinite(found).all():
            self._fault = self._fault or "logits are NaN or infinite"
            return
        log_q, log_p = log_softmax(found), log_softmax(expected)
        self._kl.append(max(0.0, float(np.exp(log_p) @ (log_p - log_q))))
        self._same.append(int(found.argmax()) == int(expected.argmax()))
        if target is not None:
            self._nll.append((-float(log_q[target]), -float(log_p[target])))

    def result(self) -> TokenFigures:
        """The figures over all positions so far."""
        if self._fault or not self._kl:
            return TokenFigures(len(self._kl), None, None, None, fault=self._fault or "nothing was compared")
        nll = np.mean(self._nll, axis=0) if self._nll else (None, None)
        return TokenFigures(
            positions=len(self._kl),
            kl_mean=float(np.mean(self._kl)),
            kl_max=max(self._kl),
            top1=float(np.mean(self._same)),
            nll=None if nll[0] is None else float(nll[0]),
            nll_float=None if nll[1] is None else float(nll[1]),
        )


def pooled(figures: Sequence[TokenFigures]) -> TokenFigures:
    """The figures over the positions of several comparisons; the first fault, if there is one."""
    good = [each for each in figures if each.kl_mean is not None]
    fault = next((each.fault for each in figures if each.fault), "")
    total = sum(each.positions for each in good)
    if not total:
        return TokenFigures(0, None, None, None, fault=fault or "nothing was compared")

    def mean(name: str) -> float | None:
        values = [(getattr(each, name), each.positions) for each in good]
        if any(value is None for value, _ in values):
            return None
        return float(sum(value * count for value, count in values) / total)

    kl_max = max(each.kl_max for each in good if each.kl_max is not None)
    return TokenFigures(total, mean("kl_mean"), kl_max, mean("top1"), mean("nll"), mean("nll_float"), fault)


def log_softmax(logits: Array) -> F64:
    """Natural logarithm of softmax over the last axis, float64."""
    shifted = logits.astype(np.float64) - float(np.max(logits))
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def common_prefix(found: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens two answers share from their beginning."""
    shorter = min(len(found), len(expected))
    return next((i for i in range(shorter) if found[i] != expected[i]), shorter)


def _exp(value: float | None) -> float | None:
    return None if value is None else float(np.exp(min(value, 700.0)))
