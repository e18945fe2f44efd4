"""Pictures, clips and prompts that parity looks at: made of seeded numbers, the same on every machine.

Written with the standard library only, so that the bytes of a picture depend on no image library.
"""

from __future__ import annotations

import io
import struct
import wave
import zlib
from dataclasses import dataclass

import numpy as np

from phi4mm_export.checks.cases import InputMode
from phi4mm_export.checks.sampling import words

SAMPLE_RATE_HZ = 16_000
TONE_SECONDS = 0.12


@dataclass(frozen=True)
class MediaRequest:
    """A prompt whose markers stand for pictures and clips by name, in order."""

    mode: InputMode
    prompt: str
    pictures: tuple[str, ...] = ()
    clips: tuple[str, ...] = ()


PICTURES: dict[str, tuple[int, int, int]] = {
    "wide": (600, 400, 40),  # 1 x 2 crops, padded on the right
    "square": (300, 300, 30),  # 1 x 1 crop, no padding
    "tall": (500, 1100, 50),  # 3 x 2 crops, padded on the right
}
"""Width, height and block size in pixels; the comments say what the processor makes of each."""
CLIPS: dict[str, float] = {"long": 2.5, "short": 1.3, "lecture": 45.0}
"""Seconds."""


def _prompt(text: str) -> str:
    return f"<|user|>\n{text}<|end|>\n<|assistant|>\n"


REQUESTS: dict[str, MediaRequest] = {
    "text": MediaRequest(InputMode.TEXT, _prompt("Is there a cat?")),
    "image": MediaRequest(InputMode.IMAGE, _prompt("<|image_1|>\nWhat is shown?"), ("wide",)),
    "two_images": MediaRequest(InputMode.IMAGE, _prompt("<|image_1|>\n<|image_2|>\nSay it again."), ("square", "tall")),
    "audio": MediaRequest(InputMode.AUDIO, _prompt("<|audio_1|>\nTranscribe."), (), ("long",)),
    "two_clips": MediaRequest(
        InputMode.AUDIO, _prompt("<|audio_1|>\n<|audio_2|>\nTell me more about it."), (), ("long", "short")
    ),
    "long_clip": MediaRequest(InputMode.AUDIO, _prompt("<|audio_1|>\nWhat is said?"), (), ("lecture",)),
    "both": MediaRequest(InputMode.BOTH, _prompt("<|image_1|>\n<|audio_1|>\nSummarise."), ("square",), ("short",)),
}
"""One request of every kind; the questions are those whose greedy answers win clearly in the tiny checkpoint."""
NEXT_TURN = "<|end|>\n<|user|>\nAnd what is shown?<|end|>\n<|assistant|>\n"
"""Text appended to a conversation after its first answer."""


def picture(name: str) -> bytes:
    """A PNG file (8-bit RGB) of flat colour blocks: small, and different in every patch row."""
    width, height, block = PICTURES[name]
    rows, columns = -(-height // block), -(-width // block)
    colours = (words(f"picture/{name}", rows * columns * 3) & np.uint64(0xFF)).astype(np.uint8)
    pixels = colours.reshape(rows, columns, 3).repeat(block, 0).repeat(block, 1)[:height, :width]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def clip(name: str) -> bytes:
    """A WAV file (16 kHz, 16 bit, mono): triangle tones that change every 0.12 s, over a little noise."""
    count = int(CLIPS[name] * SAMPLE_RATE_HZ)
    time = np.arange(count)
    tone = time // int(TONE_SECONDS * SAMPLE_RATE_HZ)
    tones = int(tone[-1]) + 1
    period = (20 + (words(f"clip/{name}/period", tones) % np.uint64(140)).astype(np.int64))[tone]
    loudness = (1000 + (words(f"clip/{name}/loudness", tones) % np.uint64(9000)).astype(np.int64))[tone]
    triangle = np.abs((time % period) * 4 - 2 * period) - period
    noise = (words(f"clip/{name}/noise", count) % np.uint64(401)).astype(np.int64) - 200
    samples = np.clip(triangle * loudness // period + noise, -32768, 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE_HZ)
        out.writeframes(samples.tobytes())
    return file.getvalue()
