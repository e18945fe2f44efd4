"""Where on a picture an error lies."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from phi4mm_export.checks.error_maps import GLOBAL_TOKENS, error_map, patch_errors, thumbnail


def arrays(rows: int, columns: int, *, kept_rows: int, kept_columns: int) -> dict[str, np.ndarray]:
    """One picture of rows x columns tiles whose mask keeps that many tokens of the whole."""
    whole = np.zeros((32 * rows, 32 * columns), np.float32)
    whole[: 2 * kept_rows, : 2 * kept_columns] = 1
    tiles = whole.reshape(rows, 32, columns, 32).transpose(0, 2, 1, 3).reshape(-1, 32, 32)
    mask = np.concatenate([np.ones((1, 32, 32), np.float32), tiles])[None]
    return {"image_sizes": np.array([[448 * rows, 448 * columns]]), "image_attention_mask": mask}


def test_errors_fall_on_the_patches_they_belong_to() -> None:
    tokens = np.zeros(30 * (20 + 1) + 1 + GLOBAL_TOKENS)
    tokens[7 * 21 + 3] = 0.5
    tokens[7 * 21 + 20] = 9.0  # a line end is no patch
    grid = patch_errors(tokens, arrays(2, 2, kept_rows=30, kept_columns=20), 0)
    assert grid is not None
    assert grid.shape == (30, 20)
    assert np.argwhere(grid).tolist() == [[7, 3]]


def test_another_number_of_tokens_has_no_map() -> None:
    assert patch_errors(np.zeros(100), arrays(1, 1, kept_rows=16, kept_columns=16), 0) is None


def test_the_map_is_clear_at_the_least_error_and_strongest_at_the_largest() -> None:
    with Image.open(io.BytesIO(error_map(np.array([[0.2, 0.3], [0.4, 0.2]])))) as picture:
        alpha = np.asarray(picture)[..., 3]
    assert alpha[0, 0] == alpha[1, 1] == 0
    assert alpha[1, 0] == alpha.max() > alpha[0, 1] > 0


def test_a_map_without_any_difference_is_clear() -> None:
    with Image.open(io.BytesIO(error_map(np.full((2, 2), 0.3)))) as picture:
        assert not np.asarray(picture)[..., 3].any()


def test_thumbnails_are_small_and_the_same_every_time() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (900, 600, 3), dtype=np.uint8)).save(buffer, "PNG")
    small = thumbnail(buffer.getvalue())
    assert small == thumbnail(buffer.getvalue())
    with Image.open(io.BytesIO(small)) as picture:
        assert max(picture.size) == 160
