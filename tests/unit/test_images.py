"""Pictures reach og as upright, opaque 8-bit RGB PNGs, and what cannot be decoded is refused by name."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from phi4mm_export.errors import UsageError
from phi4mm_export.runtime.images import MAX_SIDE, Picture, decode_image, load_image
from phi4mm_export.runtime.media import refuse, screen

WHITE = 255


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(picture: Picture) -> np.ndarray:
    with Image.open(io.BytesIO(picture.png)) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        assert image.size == (picture.width, picture.height)
        return np.asarray(image)


def noise(*shape: int, dtype: Any = np.uint8) -> np.ndarray:
    rng = np.random.default_rng(5)
    return rng.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_a_lossless_rgb_picture_keeps_every_pixel(kind: str) -> None:
    samples = noise(9, 14, 3)
    decoded = decode_image(encoded(Image.fromarray(samples), kind), "x")
    assert decoded.format == kind
    np.testing.assert_array_equal(pixels(decoded), samples)


def test_webp_and_gif_are_converted_too() -> None:
    samples = np.full((20, 30, 3), (10, 200, 30), np.uint8)
    webp = decode_image(encoded(Image.fromarray(samples), "WEBP", lossless=True), "x.webp")
    gif = decode_image(encoded(Image.fromarray(samples).quantize(4), "GIF"), "x.gif")
    np.testing.assert_array_equal(pixels(webp), samples)
    np.testing.assert_array_equal(pixels(gif), samples)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("L", (6, 5), level) for level in (0, 128, 255)]
    for kind in ("GIF", "TIFF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert pixels(decode_image(data, kind)).max() == 0


@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        (1, lambda a: a),
        (2, lambda a: a[:, ::-1]),
        (3, lambda a: a[::-1, ::-1]),
        (4, lambda a: a[::-1]),
        (5, lambda a: a.transpose(1, 0, 2)),
        (6, lambda a: np.rot90(a, -1)),
        (7, lambda a: np.rot90(a, 2).transpose(1, 0, 2)),
        (8, lambda a: np.rot90(a)),
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_exif_orientation_is_applied(kind: str, orientation: int, upright: Any) -> None:
    samples = noise(7, 12, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode_image(encoded(Image.fromarray(samples), kind, exif=exif), "x")
    np.testing.assert_array_equal(pixels(decoded), upright(samples))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_counts_as_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    samples = noise(4, 6, 3)
    np.testing.assert_array_equal(
        pixels(decode_image(encoded(Image.fromarray(samples), "PNG", exif=exif), "x")), samples
    )


def test_damaged_exif_does_not_spoil_the_picture() -> None:
    data = encoded(Image.fromarray(noise(4, 6, 3)), "JPEG")
    app1 = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12\0\x03" + b"\xff" * 30
    damaged = data[:2] + b"\xff\xe1" + struct.pack(">H", len(app1) + 2) + app1 + data[2:]
    assert decode_image(damaged, "x.jpg").width == 6


def test_transparent_parts_turn_white_and_half_transparent_parts_blend() -> None:
    samples = np.zeros((3, 2, 4), np.uint8)
    samples[..., 0] = 200
    samples[1, :, 3] = 128
    samples[2, :, 3] = 255
    result = pixels(decode_image(encoded(Image.fromarray(samples), "PNG"), "x"))
    np.testing.assert_array_equal(result[0], np.full((2, 3), WHITE))
    assert np.abs(result[1].astype(int) - (227, 127, 127)).max() <= 1
    np.testing.assert_array_equal(result[2], np.tile((200, 0, 0), (2, 1)))


def test_a_transparent_palette_entry_turns_white() -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([255, 0, 0, 0, 0, 255])
    picture.putdata([0, 1])
    result = pixels(decode_image(encoded(picture, "PNG", transparency=0), "x"))
    np.testing.assert_array_equal(result[0], [(255, 255, 255), (0, 0, 255)])


def test_a_palette_picture_gives_its_colours() -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([9, 8, 7, 1, 2, 3])
    picture.putdata([1, 0])
    np.testing.assert_array_equal(pixels(decode_image(encoded(picture, "PNG"), "x"))[0], [(1, 2, 3), (9, 8, 7)])


def test_gray_gray_with_alpha_and_one_bit_pictures_become_rgb() -> None:
    gray = noise(5, 6)
    np.testing.assert_array_equal(
        pixels(decode_image(encoded(Image.fromarray(gray), "PNG"), "x")), np.repeat(gray[..., None], 3, 2)
    )
    bits = Image.fromarray(gray > 127)
    np.testing.assert_array_equal(pixels(decode_image(encoded(bits, "PNG"), "x"))[..., 0], np.where(gray > 127, 255, 0))
    clear = Image.merge("LA", [Image.fromarray(gray), Image.new("L", (6, 5), 0)])
    assert pixels(decode_image(encoded(clear, "PNG"), "x")).min() == WHITE


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_gray_keeps_its_high_byte_as_the_runtime_does(kind: str) -> None:
    samples = noise(5, 6, dtype=np.uint16)
    result = pixels(decode_image(encoded(Image.fromarray(samples), kind), "x"))
    np.testing.assert_array_equal(result, np.repeat((samples >> 8).astype(np.uint8)[..., None], 3, 2))


def test_sixteen_bit_rgb_keeps_its_high_byte_too() -> None:
    samples = noise(4, 5, 3, dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    header = struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header)
    data += png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    np.testing.assert_array_equal(pixels(decode_image(data, "x")), (samples >> 8).astype(np.uint8))


def test_a_cmyk_jpeg_keeps_its_colours() -> None:
    red = Image.new("RGB", (16, 16), (200, 30, 30))
    result = pixels(decode_image(encoded(red.convert("CMYK"), "JPEG", quality=95), "print.jpg"))
    assert np.abs(result.astype(int) - (200, 30, 30)).max() < 8


def test_a_png_named_jpg_works(tmp_path: Path) -> None:
    file = tmp_path / "really-a-png.jpg"
    file.write_bytes(encoded(Image.new("RGB", (8, 8)), "PNG"))
    assert load_image(file).format == "PNG"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_picture_cut_short_is_refused_by_name(kind: str, part: float) -> None:
    data = encoded(Image.fromarray(noise(300, 400, 3)), kind)
    with pytest.raises(UsageError, match="picture") as caught:
        decode_image(data[: int(len(data) * part)], "half.jpg")
    assert caught.value.where == "half.jpg"


@pytest.mark.parametrize(
    "data",
    [
        b"this is not a picture\n",
        b"\xff\xd8\xff",
        b"%PDF-1.7\n",
        b"\x89PNG\r\n\x1a\n",
        b"<svg xmlns='x'/>",
        b"P6 1 1 255 abc",
    ],
)
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError) as caught:
        decode_image(data, "notes.jpg")
    assert caught.value.where == "notes.jpg"


def test_random_damage_gives_a_picture_or_a_usage_error() -> None:
    rng = np.random.default_rng(11)
    originals = [
        encoded(Image.fromarray(noise(40, 30, 3)), kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")
    ]
    refused = 0
    for _ in range(600):
        data = bytearray(originals[rng.integers(len(originals))])
        for place in rng.integers(0, min(len(data), 120), 3):
            data[place] = rng.integers(256)
        try:
            decode_image(bytes(data), "x")
        except UsageError:
            refused += 1
    assert refused > 100


def test_a_decompression_bomb_is_refused_before_it_unfolds() -> None:
    header = struct.pack(">IIBBBBB", 16000, 16000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    with pytest.raises(UsageError, match="pixels"):
        decode_image(bomb, "bomb.png")


def test_a_side_beyond_the_runtime_limit_is_refused() -> None:
    with pytest.raises(UsageError, match="16,385 x 300"):
        decode_image(encoded(Image.new("1", (MAX_SIDE + 1, 300)), "PNG"), "x")


def test_a_picture_as_thin_as_a_thread_is_refused() -> None:
    with pytest.raises(UsageError, match="5,000 x 1 pixels"):
        decode_image(encoded(Image.new("1", (5000, 1)), "PNG"), "x")


def test_floating_point_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="floating-point"):
        decode_image(encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), "x")


def test_samples_beyond_sixteen_bits_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 16 bits"):
        decode_image(encoded(Image.fromarray(np.full((4, 4), 70000, np.int32)), "TIFF"), "x")


def test_decoding_leaves_the_warning_filters_as_they_were() -> None:
    before = list(warnings.filters)
    decode_image(encoded(Image.new("RGB", (4, 4)), "PNG"), "x")
    assert warnings.filters == before


def test_the_same_picture_gives_the_same_bytes() -> None:
    data = encoded(Image.fromarray(noise(30, 40, 3)), "PNG")
    assert decode_image(data, "a").png == decode_image(data, "b").png


def test_missing_empty_and_foreign_files_are_reported_once_and_together(tmp_path: Path) -> None:
    good, zero, notes = tmp_path / "good.png", tmp_path / "zero.png", tmp_path / "notes.jpg"
    good.write_bytes(encoded(Image.new("RGB", (8, 8)), "PNG"))
    zero.write_bytes(b"")
    notes.write_text("this is not a picture")
    loaded, faults = screen([good, zero, tmp_path / "gone.png", notes, zero, tmp_path], load_image)
    assert [Path(picture.name).name for picture in loaded] == ["good.png"]
    with pytest.raises(UsageError, match="4 files cannot be used") as caught:
        refuse(faults)
    for text in ("zero.png (the file is empty)", "gone.png (the file does not exist)", "notes.jpg (", "found a folder"):
        assert text in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(UsageError, match="a pipe, a socket or a device"):
        load_image(tmp_path / "pipe.png")
