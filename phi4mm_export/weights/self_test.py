"""Does this process compute as IEEE 754 says? Asked before anything is written; takes microseconds.

Libraries built with -ffast-math switch a whole process to flushing small numbers to zero when they are loaded, and
others change the rounding mode. The results would look sound and have other bits than anybody else's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from phi4mm_export.errors import SystemLimitError
from phi4mm_export.weights.exact import exact_product

SUM_BITS = 0x3FD3333333333334
"""0.1 + 0.2 in float64, rounded to nearest."""
LANES = 16
"""Long enough for the widest vector instructions, whose settings are those of the scalar ones."""


def check_arithmetic() -> None:
    """Raise SystemLimitError, naming every rule that this process breaks."""
    broken = [rule for rule, holds in RULES if not holds()]
    if broken:
        raise SystemLimitError(
            f"expected arithmetic as in IEEE 754, found that {' and '.join(broken)}",
            where="this process",
            fix="run phi4mm in a process of its own: a library in this one has changed the processor's settings",
        )


def _denormals_survive() -> bool:
    """Results below the normal range, and inputs from there."""
    for kind in (np.float32, np.float64):
        smallest = np.full(LANES, np.finfo(kind).smallest_normal)
        half = smallest * kind(0.5)
        if not (np.all(half > 0) and np.array_equal(half + half, smallest)):
            return False
    return True


def _sums_round_to_nearest() -> bool:
    total = np.full(LANES, 0.1) + np.full(LANES, 0.2)
    ties = np.rint(np.array([0.5, 1.5, 2.5, -0.5, -1.5]))
    return bool(np.all(total.view(np.int64) == SUM_BITS)) and ties.tolist() == [0.0, 2.0, 2.0, 0.0, -2.0]


def _float32_is_narrow() -> bool:
    """No wider registers: 2**24 + 1 is not a float32."""
    return bool(np.all(np.full(LANES, 2**24, np.float32) + np.float32(1) == np.float32(2**24)))


def _products_are_exact() -> bool:
    """The exact product of integers is that of int64."""
    left = (np.arange(5 * LANES).reshape(5, LANES) * 7919) % 1009 - 504
    right = (np.arange(LANES * 3).reshape(LANES, 3) * 6007) % 997 - 498
    whole = np.add.reduce(left[:, :, None] * right[None], axis=1)
    return np.array_equal(exact_product(left, right), whole)


RULES: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("numbers below the normal range become zero", _denormals_survive),
    ("0.1 + 0.2 or halves are not rounded to nearest", _sums_round_to_nearest),
    ("float32 sums keep more than 24 bits", _float32_is_narrow),
    ("a product of integers is not exact", _products_are_exact),
)
"""What is said when a rule does not hold, and the rule."""
