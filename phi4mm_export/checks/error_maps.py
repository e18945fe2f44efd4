"""Small PNGs for the report: a picture as a thumbnail, and where on it the image features differ."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]

CROP_PIXELS = 448
GLOBAL_TOKENS = 16 * 17
"""Tokens of the global view: 16 rows of 16, each with a line end."""
THUMBNAIL_SIDE = 160
COLOURS = 64
MAP_COLOUR = (208, 40, 40)
OPACITY_STEPS = 28
"""Of 31 steps of a full red: the picture must show through, and few steps make a small file."""


def thumbnail(png: bytes) -> bytes:
    """A PNG of at most THUMBNAIL_SIDE pixels a side, in COLOURS colours."""
    from PIL import Image

    with Image.open(io.BytesIO(png), formats=("PNG",)) as picture:
        small = picture.convert("RGB")
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    return _png(small.quantize(COLOURS, dither=Image.Dither.NONE))


def patch_errors(errors: F64, arrays: Mapping[str, Array], index: int) -> F64 | None:
    """The errors of the high-resolution tokens as a map [rows, columns]; None if they do not fit the tiles.

    errors: one a token [T], in the order of the features: tiles row by row with a line end after each row, a separator,
    the global view. arrays: the processed request; index: which of its pictures.
    """
    height, width = (int(side) // CROP_PIXELS for side in arrays["image_sizes"][index])
    mask = np.asarray(arrays["image_attention_mask"])[index]
    tiles = mask[1 : 1 + height * width]
    if len(tiles) != height * width:
        return None
    whole = tiles.reshape(height, width, *tiles.shape[1:]).transpose(0, 2, 1, 3)
    kept = whole.reshape(height * tiles.shape[1], width * tiles.shape[2])[::2, ::2] > 0
    rows, columns = int(kept[:, 0].sum()), int(kept[0].sum())
    if len(errors) != rows * (columns + 1) + 1 + GLOBAL_TOKENS:
        return None
    return np.asarray(errors[: rows * (columns + 1)].reshape(rows, columns + 1)[:, :columns])


def error_map(errors: F64) -> bytes:
    """A PNG of one pixel a token, from clear at the least error to red at the largest."""
    from PIL import Image

    least, largest = float(errors.min(initial=np.inf)), float(errors.max(initial=0.0))
    share = (errors - least) / (largest - least) if largest > least else np.zeros(errors.shape)
    pixels = np.zeros((*errors.shape, 4), np.uint8)
    pixels[..., :3] = MAP_COLOUR
    pixels[..., 3] = np.rint(share * OPACITY_STEPS) * 8
    return _png(Image.fromarray(pixels))


def _png(picture: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
