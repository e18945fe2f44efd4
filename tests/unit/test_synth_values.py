"""Numbers of synthetic checkpoints."""

from __future__ import annotations

import hashlib

import ml_dtypes
import numpy as np
import pytest

from phi4mm_export.checkpoint.synth_values import Numbers, blocks, outlier_channels, tensor


def test_a_number_is_the_rescaled_sum_of_the_four_quarters_of_its_philox_word() -> None:
    key = int.from_bytes(hashlib.sha256(b"tag").digest()[:16], "little")
    words = np.random.Philox(key=key).random_raw(1000).tolist()
    sums = [sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48)) for word in words]
    expected = np.array([(s - 131070) * (3**0.5 / 65536 * 0.25) + 2.0 for s in sums], np.float32)

    found = tensor("tag", (1000,), Numbers(std=0.25, mean=2.0))

    np.testing.assert_array_equal(found, expected.astype(ml_dtypes.bfloat16))


def test_the_blocks_of_a_tensor_are_one_stream_whatever_its_shape() -> None:
    wide = tensor("tag", (5, 50_000), Numbers(std=1.0))
    flat = tensor("tag", (250_000,), Numbers(std=1.0))

    assert len(list(blocks("tag", (5, 50_000), Numbers(std=1.0), np.float32))) == 5
    np.testing.assert_array_equal(wide.reshape(-1), flat)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_every_stored_type_holds_the_same_numbers(dtype: type[np.floating]) -> None:
    numbers = Numbers(std=0.3, student=True, outliers=True)

    other = tensor("tag", (64, 256), numbers, dtype)

    assert other.dtype == dtype
    np.testing.assert_array_equal(other.astype(np.float64), tensor("tag", (64, 256), numbers).astype(np.float64))


def test_other_tags_give_other_numbers() -> None:
    first, second = (tensor(tag, (10_000,), Numbers(std=1.0)).astype(np.float64) for tag in ("a", "b"))

    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_heavy_tails_keep_the_deviation_and_reach_nine_times_as_far() -> None:
    plain = tensor("tag", (1_000_000,), Numbers(std=0.5)).astype(np.float64)
    heavy = tensor("tag", (1_000_000,), Numbers(std=0.5, student=True)).astype(np.float64)

    assert plain.std() == pytest.approx(0.5, rel=0.01)
    assert heavy.std() == pytest.approx(0.5, rel=0.01)
    assert np.mean(plain**4) / plain.var() ** 2 == pytest.approx(2.7, abs=0.1)
    assert np.mean(heavy**4) / heavy.var() ** 2 > 5.5
    assert np.abs(plain).max() < 3.5 * 0.5
    assert np.abs(heavy).max() > 7 * 0.5


def test_outlier_channels_are_one_of_sixty_four_and_six_times_as_large() -> None:
    rows = tensor("tag", (2000, 256), Numbers(std=0.5, outliers=True)).astype(np.float64)
    channels = outlier_channels("tag", 256)
    others = np.setdiff1d(np.arange(256), channels)

    assert 1 <= len(channels) <= 4
    assert rows[:, channels].std() / rows[:, others].std() == pytest.approx(6.0, rel=0.03)
    assert np.sqrt(np.mean(rows**2)) == pytest.approx(0.5, rel=0.01)


def test_outlier_channels_of_a_norm_keep_its_mean() -> None:
    weight = tensor("tag", (64,), Numbers(std=0.2, mean=1.0, outliers=True)).astype(np.float64)
    plain = tensor("tag", (64,), Numbers(std=0.2, mean=1.0)).astype(np.float64)
    channels = outlier_channels("tag", 64)

    np.testing.assert_allclose(weight[channels], 6.0 * plain[channels], rtol=2**-8)
    np.testing.assert_array_equal(np.delete(weight, channels), np.delete(plain, channels))
