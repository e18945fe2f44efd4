"""Arithmetic whose bits depend on nothing but its inputs."""

from __future__ import annotations

import math
import subprocess
import sys
from decimal import Decimal, getcontext
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phi4mm_export.weights.exact import LeftFactor, RightFactor, cos_sin, exact_product, integer_bits

PROBE = """
import hashlib, numpy as np
from phi4mm_export.weights.exact import cos_sin, exact_product
rng = np.random.default_rng(0)
b, a = rng.standard_normal((512, 256)).astype('f4'), rng.standard_normal((256, 384)).astype('f4')
h = hashlib.sha256(exact_product(b, a).tobytes())
for part in cos_sin(rng.uniform(0, 131072, 20000).astype('f4')):
    h.update(part.tobytes())
print(h.hexdigest())
"""


def _digest(**environment: str) -> str:
    import os

    result = subprocess.run(
        [sys.executable, "-c", PROBE], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


@pytest.mark.parametrize("terms", [1, 2, 3, 16, 20, 256, 320, 512])
def test_the_largest_possible_sum_of_products_stays_an_exact_integer(terms: int) -> None:
    assert terms * (2 ** integer_bits(terms)) ** 2 <= 2**53


def test_factors_of_rank_256_keep_22_bits() -> None:
    assert integer_bits(256) == 22


def test_a_product_of_small_integers_is_exact() -> None:
    rng = np.random.default_rng(1)
    left, right = rng.integers(-100, 100, (7, 9)), rng.integers(-100, 100, (9, 5))
    assert np.array_equal(exact_product(left.astype(np.float32), right.astype(np.float32)), left @ right)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(-300, 300), st.integers(0, 2**32 - 1))
def test_products_of_integers_are_exact_at_any_scale(terms: int, width: int, exponent: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = rng.integers(-1000, 1001, (3, terms)), rng.integers(-1000, 1001, (terms, width))
    scaled = np.ldexp(left.astype(np.float64), exponent)
    expected = np.ldexp((left @ right).astype(np.float64), exponent)
    assert np.array_equal(exact_product(scaled, right), expected)


@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
def test_a_product_has_the_same_bits_in_any_order_of_its_terms_rows_and_columns(
    terms: int, seed: int, shuffle: Random
) -> None:
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((4, terms)), rng.standard_normal((terms, 5))
    whole = exact_product(left, right)
    order = list(range(terms))
    shuffle.shuffle(order)
    assert np.array_equal(exact_product(left[:, order], right[order]), whole)
    assert np.array_equal(exact_product(left[1:3], right[:, 2:]), whole[1:3, 2:])
    assert np.array_equal(LeftFactor.of(left).product(right), whole)
    assert np.array_equal(RightFactor.of(right).product(left), whole)


@given(st.floats(-1e6, 1e6))
def test_cosine_and_sine_of_any_angle_are_those_of_libm(angle: float) -> None:
    cosine, sine = cos_sin(np.array([angle]))
    assert cosine[0] == pytest.approx(math.cos(angle), abs=4e-16)
    assert sine[0] == pytest.approx(math.sin(angle), abs=4e-16)


def test_a_product_is_as_close_as_its_rounded_factors_allow() -> None:
    rng = np.random.default_rng(2)
    left, right = rng.standard_normal((40, 256)), rng.standard_normal((256, 30))
    error = exact_product(left, right) - left @ right
    assert np.sqrt((error**2).mean()) < 1e-6 * np.sqrt(((left @ right) ** 2).mean())


def test_rows_of_very_different_size_keep_their_own_precision() -> None:
    left = np.array([[1e-20, 3e-21], [1e20, 3e19]])
    right = np.array([[1.0, -2.0], [0.5, 4.0]])
    assert np.allclose(exact_product(left, right), left @ right, rtol=1e-6, atol=0)


def test_zero_rows_give_zeros() -> None:
    assert not exact_product(np.zeros((2, 3)), np.ones((3, 4))).any()


@pytest.mark.parametrize("angle", [0.0, 1e-6, 0.7853, 1.5707964, 3.1415927, 100.25, 4095.0, 65537.3, 131071.0])
def test_cosine_and_sine_agree_with_libm_to_the_last_digits(angle: float) -> None:
    cosine, sine = cos_sin(np.array([angle, -angle]))
    assert cosine == pytest.approx([math.cos(angle)] * 2, abs=4e-16)
    assert sine == pytest.approx([math.sin(angle), -math.sin(angle)], abs=4e-16)


def test_the_reduction_constants_add_up_to_half_pi() -> None:
    from phi4mm_export.weights import exact

    getcontext().prec = 60
    half_pi = Decimal("1.57079632679489661923132169163975144209858469968755291048747")
    parts = sum(Fraction(x) for x in (exact._HALF_PI_1, exact._HALF_PI_2, exact._HALF_PI_3))
    assert abs(Decimal(parts.numerator) / Decimal(parts.denominator) - half_pi) < Decimal("1e-36")


@pytest.mark.subprocess
@pytest.mark.parametrize(
    "environment",
    [
        {"OPENBLAS_NUM_THREADS": "1"},
        {"OPENBLAS_NUM_THREADS": "2"},
        {"NPY_DISABLE_CPU_FEATURES": "X86_V4 X86_V3 AVX512_ICL AVX512_SPR AVX512F AVX512_SKX AVX2 FMA3"},
        {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA"},
    ],
    ids=["one thread", "two threads", "no AVX2 in numpy", "no FMA in libm"],
)
def test_threads_vector_width_and_libm_change_no_bit(environment: dict[str, str]) -> None:
    assert _digest(**environment) == "9c1402783b87b4cf491051ce3c2e3cffc684a63eab6c656c0c0a06ff2e5a902d"
