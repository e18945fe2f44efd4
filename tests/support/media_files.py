"""Pictures and clips for tests: seeded noise, which no decoder and no resampler smooths over."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from phi4mm_export.runtime.audio import Clip, decode_audio
from phi4mm_export.runtime.images import Picture, decode_image


def picture_bytes(width: int, height: int, *, seed: int = 0) -> bytes:
    """A PNG of coarse coloured noise."""
    coarse = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "PNG")
    return buffer.getvalue()


def sound_bytes(seconds: float, *, seed: int = 0) -> bytes:
    """A 16 kHz mono PCM WAV of noise."""
    samples = np.random.default_rng(seed).standard_normal(round(seconds * 16000)) * 0.1
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 16000, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def picture(width: int, height: int, *, seed: int = 0) -> Picture:
    return decode_image(picture_bytes(width, height, seed=seed), f"noise-{width}x{height}.png")


def clip(seconds: float, *, seed: int = 0) -> Clip:
    return decode_audio(sound_bytes(seconds, seed=seed), f"noise-{seconds}s.wav")


def write_picture(folder: Path, name: str = "page.png", width: int = 300, height: int = 200) -> Path:
    (folder / name).write_bytes(picture_bytes(width, height))
    return folder / name


def write_sound(folder: Path, name: str = "question.wav", seconds: float = 0.6) -> Path:
    (folder / name).write_bytes(sound_bytes(seconds))
    return folder / name
