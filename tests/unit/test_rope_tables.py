"""LongRoPE tables against the definition, evaluated with many digits."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal, getcontext

import numpy as np
import pytest

from phi4mm_export.spec.model import LongRope
from phi4mm_export.weights.rope_tables import attention_scale, inverse_frequencies, table_rows

ROPE = LongRope(10000.0, 96, tuple([1.0] * 48), tuple(1 + i * 0.99 for i in range(48)), 131072, 4096)


def test_the_scale_of_the_real_model_is_1_19023807() -> None:
    assert attention_scale(ROPE) == pytest.approx(1.19023807, abs=5e-9)


def test_a_model_whose_context_was_never_extended_has_no_scale() -> None:
    assert attention_scale(replace(ROPE, max_positions=4096)) == 1.0


def test_frequencies_are_float32_divisions_of_float32_powers() -> None:
    got = inverse_frequencies(ROPE, ROPE.long_factor)
    getcontext().prec = 40
    for i in (0, 1, 17, 47):
        exponent = float(np.float32(2 * i) / np.float32(96))
        power = np.float32(float(Decimal(10000) ** Decimal(exponent)))
        assert got[i] == np.float32(1) / (np.float32(ROPE.long_factor[i]) * power)


@pytest.mark.parametrize("position", [0, 1, 4095, 4096, 131071])
def test_rows_hold_the_scaled_cosine_and_sine_of_the_float32_angle(position: int) -> None:
    cosine, sine = table_rows(ROPE, ROPE.long_factor, position, position + 1)
    angles = np.float32(position) * inverse_frequencies(ROPE, ROPE.long_factor)
    scale = attention_scale(ROPE)
    for i in (0, 5, 47):
        assert cosine[0, i] == pytest.approx(scale * math.cos(float(angles[i])), abs=1e-7)
        assert sine[0, i] == pytest.approx(scale * math.sin(float(angles[i])), abs=1e-7)


def test_rows_do_not_depend_on_the_band_they_are_computed_in() -> None:
    whole, _ = table_rows(ROPE, ROPE.short_factor, 0, 64)
    part, _ = table_rows(ROPE, ROPE.short_factor, 40, 64)
    assert np.array_equal(whole[40:], part)
