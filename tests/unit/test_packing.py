"""Codes, scales and bytes of MatMulNBits and GatherBlockQuantized."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phi4mm_export.weights.packing import (
    absmax_scales,
    blocks_of,
    column_sums,
    decode,
    encode,
    least_squares_scales,
    pack,
    quantize_rows,
    unpack,
)


def _rows(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _error(rows: np.ndarray, scales: np.ndarray, bits: int, block: int) -> float:
    blocks = blocks_of(rows, block)
    return float(((decode(encode(blocks, scales, bits), scales, bits) - blocks) ** 2).sum())


@pytest.mark.parametrize("width", [5, 6, 7])
def test_the_last_block_of_a_row_is_filled_with_zeros(width: int) -> None:
    blocks = blocks_of(np.ones((2, width), np.float32), 4)
    assert blocks.shape == (2, 2, 4)
    assert blocks[0, 1].tolist() == [1] * (width - 4) + [0] * (8 - width)


@pytest.mark.parametrize("block", [1, 2, 7, 8, 9, 16, 31, 32, 100, 128, 129, 136, 200, 256, 300, 1000])
def test_column_sums_have_the_bits_of_numpys_sums_of_rows(block: int) -> None:
    rows = _rows((40, block), seed=block) * np.float32(1000)
    assert column_sums(rows.T.copy()).tobytes() == rows.sum(axis=1).tobytes()


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_end_at_the_type_although_values_lie_beyond(bits: int) -> None:
    codes = encode(np.array([[[-300.0, -1.0, 1.0, 300.0]]], np.float32), np.array([[0.5]], np.float32), bits)
    half = 2 ** (bits - 1)
    assert codes.tolist() == [[[0, half - 2, half + 2, 2 * half - 1]]]


def test_blocks_beyond_the_first_tile_are_encoded_like_the_first() -> None:
    blocks = _rows((3, 1)).repeat(32, axis=1).reshape(3, 1, 32).repeat(1000, axis=1)
    codes = encode(blocks, absmax_scales(blocks, 4), 4)
    assert set(codes[blocks > 0].tolist()) == {15}
    assert set(codes[blocks < 0].tolist()) == {1}


def test_the_first_of_two_codes_is_the_low_nibble() -> None:
    assert pack(np.array([[1, 2, 15, 0]], np.uint8), 4).tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize("bits", [4, 8])
def test_unpacking_gives_the_codes_back(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 2, 32)).astype(np.uint8)
    assert np.array_equal(unpack(pack(codes, bits), bits), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_values_on_the_grid_survive_unchanged(bits: int) -> None:
    half = 2 ** (bits - 1)
    grid = np.random.default_rng(0).integers(-half + 1, half, (4, 64)).astype(np.float32)
    grid[:, ::32] = half - 1
    packed, scales = quantize_rows(grid * np.float32(0.125), bits, 32, np.dtype(np.float32))
    assert np.array_equal(decode(unpack(packed, bits), scales, bits).reshape(4, 64), grid * np.float32(0.125))


def test_least_squares_beats_absmax_by_more_than_a_tenth_at_four_bits() -> None:
    rows = _rows((64, 512))
    blocks = blocks_of(rows, 32)
    searched = _error(rows, least_squares_scales(blocks, 4), 4, 32)
    assert searched < 0.8 * _error(rows, absmax_scales(blocks, 4), 4, 32)


def test_no_nearby_scale_is_better_than_the_one_found_by_more_than_two_percent() -> None:
    rows = _rows((8, 64))
    found = least_squares_scales(blocks_of(rows, 32), 4)
    best = min(_error(rows, found * np.float32(f), 4, 32) for f in np.linspace(0.8, 1.2, 81))
    assert _error(rows, found, 4, 32) <= 1.02 * best


def test_the_scale_found_is_the_best_of_the_ten_that_are_tried() -> None:
    rows = _rows((200, 32), seed=5)
    peak = rows[np.arange(200), np.abs(rows).argmax(axis=1)][:, None]
    least = np.full(200, np.inf)
    for level in (-6.1, -6.6, -7.1, -7.5, -8.0, -8.5, 6.0, 6.5, 7.0, 7.5):
        codes = np.clip(np.rint(rows * (np.float32(1) / (peak / np.float32(level)))), -8, 7).astype(np.float64)
        scale = (rows * codes).sum(axis=1) / (codes * codes).sum(axis=1)
        least = np.minimum(least, ((codes * scale[:, None] - rows) ** 2).sum(axis=1))
    found = least_squares_scales(rows[:, None], 4).astype(np.float64)
    codes = np.clip(np.rint(rows / found), -8, 7)
    assert (((codes * found - rows) ** 2).sum(axis=1) <= least * (1 + 1e-5)).all()


def test_weights_a_million_times_smaller_have_scales_a_million_times_smaller() -> None:
    blocks = blocks_of(_rows((8, 64)), 32)
    small = np.float32(2.0**-20)
    assert np.array_equal(least_squares_scales(blocks * small, 4), least_squares_scales(blocks, 4) * small)


def test_a_block_of_zeros_has_the_zero_point_everywhere_and_no_scale() -> None:
    packed, scales = quantize_rows(np.zeros((1, 32), np.float32), 4, 32, np.dtype(np.float32))
    assert set(packed.ravel().tolist()) == {0x88}
    assert scales.tolist() == [[0.0]]


def test_codes_are_chosen_for_the_scale_as_float16_stores_it() -> None:
    rows = _rows((16, 128), seed=3) * np.float32(0.01)
    packed, scales = quantize_rows(rows, 8, 128, np.dtype(np.float16))
    assert scales.dtype == np.float16
    error = decode(unpack(packed, 8), scales.astype(np.float32), 8).reshape(16, 128) - rows
    assert (np.abs(error).max(axis=1) <= 0.501 * scales.astype(np.float32)[:, 0]).all()


def test_bytes_do_not_depend_on_how_rows_are_grouped() -> None:
    rows = _rows((32, 96))
    whole, whole_scales = quantize_rows(rows, 4, 32, np.dtype(np.float32))
    parts = [quantize_rows(rows[i : i + 5], 4, 32, np.dtype(np.float32)) for i in range(0, 32, 5)]
    assert np.array_equal(np.concatenate([p for p, _ in parts]), whole)
    assert np.array_equal(np.concatenate([s for _, s in parts]), whole_scales)


bits, blocks, widths = st.sampled_from([4, 8]), st.sampled_from([16, 32, 64, 128, 256]), st.integers(1, 300)


@given(bits, blocks, widths, st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_any_width_is_packed_into_whole_blocks_and_read_back(
    bits: int, block: int, width: int, rows: int, seed: int
) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, -(-width // block), block)).astype(np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (*codes.shape[:2], block * bits // 8)
    assert np.array_equal(unpack(packed, bits), codes)


@given(bits, blocks, widths, st.integers(0, 2**32 - 1))
def test_rounded_rows_of_any_width_stay_within_a_step_and_end_in_zeros(
    bits: int, block: int, width: int, seed: int
) -> None:
    rows = _rows((3, width), seed)
    packed, scales = quantize_rows(rows, bits, block, np.dtype(np.float32))
    count = -(-width // block)
    assert (packed.shape, scales.shape) == ((3, count, block * bits // 8), (3, count))
    values = decode(unpack(packed, bits), scales, bits)
    flat = values.reshape(3, -1)
    assert not flat[:, width:].any()
    step = np.abs(scales).repeat(block, axis=1)[:, :width]
    furthest = {8: 0.501, 4: 1.5}[bits]  # 4 bits: the scale found may clip
    assert (np.abs(flat[:, :width] - rows) <= furthest * step + 1e-6).all()


@given(bits, st.integers(1, 20), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_values_on_a_grid_of_powers_of_two_survive_in_any_shape(
    bits: int, count: int, exponent: int, seed: int
) -> None:
    half, block = 2 ** (bits - 1), 16
    grid = np.random.default_rng(seed).integers(-half + 1, half, (2, count * block)).astype(np.float32)
    grid[:, ::block] = half - 1
    values = np.ldexp(grid, -exponent)
    packed, scales = quantize_rows(values, bits, block, np.dtype(np.float16))
    assert np.array_equal(decode(unpack(packed, bits), scales.astype(np.float32), bits).reshape(2, -1), values)
