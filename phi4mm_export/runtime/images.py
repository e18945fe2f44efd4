"""Pictures for og: decoded by Pillow, upright, opaque RGB, and handed on as PNG bytes.

og's decoder knows PNG and JPEG only: other formats end the process, a cut JPEG hangs it, EXIF orientation is ignored
and alpha dropped. A PNG made here is decoded there to the same pixels, so a picture that needs no correction gives
what the file itself would give (16-bit samples keep their high byte, as in og's decoder).
"""

from __future__ import annotations

import io
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from phi4mm_export.errors import MissingExtraError, UsageError
from phi4mm_export.runtime.media import read_medium

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""The decoders that may touch foreign bytes."""
MAX_SIDE = 16384
"""og's own limit of one side, in pixels."""
MAX_PIXELS = 89_478_485
"""Pillow's limit against decompression bombs; og's is 100 million."""
MAX_ASPECT = 400
"""og pads a picture to whole tiles and refuses one that would shrink to less than 10 pixels there; with 36 tiles in a
row (16,128 pixels, the most it takes) that is a little beyond 400 to 1. Smaller tile counts refuse earlier."""
EXIF_ORIENTATION = 0x0112

DECODER_FAULTS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    EOFError,
    MemoryError,
    struct.error,
    zlib.error,
    Warning,
)
"""What Pillow's decoders are known to raise on damaged files."""

_WARNING_FILTERS = threading.Lock()


@dataclass(frozen=True)
class Picture:
    """One decoded picture. `png` is an 8-bit RGB PNG without metadata; `format` is what the file was."""

    name: str
    png: bytes
    width: int
    height: int
    format: str


def load_image(path: Path) -> Picture:
    """Read and decode one file. Raises as `decode_image` and `read_medium`."""
    return decode_image(read_medium(path), str(path))


def decode_image(data: bytes, name: str) -> Picture:
    """Decode PNG, JPEG, WebP, GIF, BMP or TIFF bytes (first frame) to an upright RGB picture.

    Transparent parts are blended on white, palettes, CMYK, 1-bit and 16-bit samples converted.
    Raises UsageError naming `name` if the bytes are no such picture, are damaged or cut short, or are too large;
    MissingExtraError without Pillow.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as err:
        raise MissingExtraError("Pillow", "media", "reading images") from err

    try:
        with _no_warnings(Image), Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            kind = str(opened.format)
            _check_size(opened.size, name)
            opened.load()
            upright = _upright(opened)
            rgb = _opaque_rgb(upright, name)
    except UsageError:
        raise
    except UnidentifiedImageError as err:
        raise UsageError(
            "not a PNG, JPEG, WebP, GIF, BMP or TIFF picture", where=name, fix="convert it to PNG or JPEG"
        ) from err
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as err:
        raise UsageError(f"the picture has more than {MAX_PIXELS:,} pixels", where=name, fix="scale it down") from err
    except DECODER_FAULTS as err:
        detail = str(err).strip() or type(err).__name__
        raise UsageError(
            f"the picture cannot be decoded ({detail})", where=name, fix="save it again, complete"
        ) from err
    buffer = io.BytesIO()
    rgb.save(buffer, "PNG", compress_level=1)
    return Picture(name, buffer.getvalue(), rgb.width, rgb.height, kind)


@contextmanager
def _no_warnings(image_module: object) -> Iterator[None]:
    """Pillow's warnings on odd files are not the caller's; its bomb warning becomes an error. One thread at a time,
    because Python keeps one list of filters for all threads."""
    with _WARNING_FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", image_module.DecompressionBombWarning)  # type: ignore[attr-defined]
        yield


def _check_size(size: tuple[int, int], name: str) -> None:
    width, height = size
    if min(size) < 1:
        raise UsageError(f"the picture has {width} x {height} pixels", where=name)
    if max(size) > MAX_SIDE:
        raise UsageError(
            f"the picture has {width:,} x {height:,} pixels, expected at most {MAX_SIDE:,} on a side",
            where=name,
            fix="scale it down",
        )
    if width * height > MAX_PIXELS:
        raise UsageError(
            f"the picture has {width * height:,} pixels, expected at most {MAX_PIXELS:,}",
            where=name,
            fix="scale it down",
        )
    if max(size) > MAX_ASPECT * min(size):
        raise UsageError(
            f"the picture has {width:,} x {height:,} pixels, expected sides within a ratio of {MAX_ASPECT} to 1",
            where=name,
            fix="crop it",
        )


def _upright(picture: Image.Image) -> Image.Image:
    """The picture turned as its EXIF orientation says; unreadable EXIF counts as none."""
    from PIL import Image

    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    try:
        orientation = picture.getexif().get(EXIF_ORIENTATION, 1)
    except DECODER_FAULTS:
        orientation = 1
    turn = turns.get(orientation) if isinstance(orientation, int) else None
    return picture if turn is None else picture.transpose(turn)


def _opaque_rgb(picture: Image.Image, name: str) -> Image.Image:
    from PIL import Image

    if picture.mode.startswith("I"):
        return _from_deep_gray(picture, name)
    if picture.mode == "F":
        raise UsageError(
            "the picture has floating-point samples, whose range is not defined",
            where=name,
            fix="save it with 8 or 16 bits per sample",
        )
    if picture.has_transparency_data:
        front = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", front.size, "white"), front).convert("RGB")
    return picture.convert("RGB")


def _from_deep_gray(picture: Image.Image, name: str) -> Image.Image:
    """Gray samples of 16 bits (stored in modes I;16 or I) to RGB by their high byte."""
    from PIL import Image

    samples = np.asarray(picture).astype(np.int64)
    if samples.min() < 0 or samples.max() > np.iinfo(np.uint16).max:
        raise UsageError(
            f"the picture has samples from {samples.min():,} to {samples.max():,}, expected at most 16 bits",
            where=name,
            fix="save it with 8 or 16 bits per sample",
        )
    gray = (samples >> 8).astype(np.uint8)
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        gray[samples == transparent] = np.iinfo(np.uint8).max
    return Image.fromarray(gray).convert("RGB")
