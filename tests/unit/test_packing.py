"""Codes, scales and bytes of MatMulNBits and GatherBlockQuantized."""

from __future__ import annotations

import numpy as np
import pytest

from phi4mm_export.weights.packing import (
    absmax_scales,
    blocks_of,
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


def test_the_last_block_of_a_row_is_filled_with_zeros() -> None:
    blocks = blocks_of(np.ones((2, 5), np.float32), 4)
    assert blocks.shape == (2, 2, 4)
    assert blocks[0, 1].tolist() == [1, 0, 0, 0]


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
