"""Sound for og: decoded by libsndfile, mixed to one channel, brought to 16 kHz, and handed on as WAV bytes.

og's own decoder ends the process on clips under one window, mixes three or more channels wrongly and does not know
Ogg or Opus. A 16 kHz mono WAV keeps its samples and its sample format, so that og computes what it would from the file.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import MissingExtraError, UsageError
from phi4mm_export.runtime.media import read_medium

SAMPLE_RATE_HZ = 16000
"""What the model was trained on."""
MIN_SAMPLES = 400
"""One analysis window, 25 ms: og dies of an arithmetic fault on fewer."""
MAX_SECONDS = 3 * 3600
"""Longest clip that is read: one token per 80 ms makes 135,000 tokens, more than the longest context."""
MAX_CHANNELS = 64
_BLOCK_FRAMES = 1 << 16
_WAVE_PCM, _WAVE_FLOAT = 1, 3
"""Format tags of a RIFF WAVE `fmt ` chunk."""

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Clip:
    """One decoded clip. `wav` is a 16 kHz mono WAV (float32, or the file's own PCM format); `source` is what it was."""

    name: str
    wav: bytes
    num_samples: int
    source: str

    @property
    def seconds(self) -> float:
        """Duration at 16 kHz."""
        return self.num_samples / SAMPLE_RATE_HZ


class _Source(io.BytesIO):
    """The bytes of a clip. libsndfile seeks before the beginning of damaged files, and an exception inside its callback
    would be printed instead of raised: such a seek ends at the beginning."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self.getbuffer().nbytes}[whence]
        return super().seek(max(0, base + offset))


def load_audio(path: Path) -> Clip:
    """Read and decode one file. Raises as `decode_audio` and `read_medium`."""
    return decode_audio(read_medium(path), str(path))


def decode_audio(data: bytes, name: str) -> Clip:
    """Decode any format of libsndfile (WAV, FLAC, OGG, Opus, MP3, AIFF, ...) to a 16 kHz mono WAV.

    Channels are averaged. Raises UsageError naming `name` if the bytes are no sound, hold no samples, are shorter than
    25 ms, longer than three hours, or contain NaN or infinity; MissingExtraError without soundfile or soxr.
    """
    soundfile, soxr = _libraries()
    try:
        with soundfile.SoundFile(_Source(data)) as file:
            source = f"{file.format} {file.subtype}, {file.samplerate} Hz, {file.channels} channels"
            _check_header(file, name)
            kept = _kept_pcm(file, name)
            samples = None if kept else _mono(file, name)
            rate_hz = int(file.samplerate)
    except (soundfile.SoundFileError, OSError, ValueError, TypeError, RuntimeError) as err:
        raise UsageError(
            f"not a sound file that libsndfile can read ({_reason(err)})",
            where=name,
            fix="convert it to WAV or FLAC",
        ) from err
    if kept:
        wav, count = kept
        return Clip(name, wav, count, source)
    if samples is None:
        raise AssertionError("either the PCM data or the decoded samples are kept")
    if rate_hz != SAMPLE_RATE_HZ:
        if not samples.size:
            raise _too_short(0, name)
        samples = soxr.resample(samples, rate_hz, SAMPLE_RATE_HZ)
    if samples.size < MIN_SAMPLES:
        raise _too_short(samples.size, name)
    clip = np.ascontiguousarray(samples, dtype="<f4")
    return Clip(name, wav_bytes(clip.tobytes(), tag=_WAVE_FLOAT, width=4), clip.size, source)


def wav_bytes(samples: bytes, *, tag: int, width: int) -> bytes:
    """A mono 16 kHz RIFF WAVE file around little-endian samples of `width` bytes; no clock, no optional chunks."""
    block = SAMPLE_RATE_HZ * width
    padding = b"\0" * (len(samples) % 2)
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, tag, 1, SAMPLE_RATE_HZ, block, width, 8 * width)
    body = b"WAVE" + fmt + struct.pack("<4sI", b"data", len(samples)) + samples + padding
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def _libraries() -> tuple[ModuleType, ModuleType]:
    try:
        import soundfile
    except (ImportError, OSError) as err:  # OSError: the native libsndfile is missing
        raise MissingExtraError("soundfile", "media", "reading audio") from err
    try:
        import soxr
    except ImportError as err:
        raise MissingExtraError("soxr", "media", "resampling audio") from err
    return soundfile, soxr


def _check_header(file: Any, name: str) -> None:
    if not 1 <= file.channels <= MAX_CHANNELS:
        raise UsageError(f"the clip has {file.channels} channels, expected 1 to {MAX_CHANNELS}", where=name)
    if file.samplerate < 1:
        raise UsageError(f"the clip has a sample rate of {file.samplerate} Hz", where=name)


def _kept_pcm(file: Any, name: str) -> tuple[bytes, int] | None:
    """The samples of a 16 kHz mono PCM WAV in their own format (8-bit unsigned, 16, 24 or 32-bit), as a plain WAV and a
    count; None for every other file."""
    widths = {"PCM_U8": 1, "PCM_16": 2, "PCM_24": 3, "PCM_32": 4}
    width = widths.get(file.subtype)
    if file.format not in ("WAV", "WAVEX") or width is None or file.channels != 1 or file.samplerate != SAMPLE_RATE_HZ:
        return None
    limit = MAX_SECONDS * SAMPLE_RATE_HZ
    # libsndfile gives integers of fewer bits in the upper bits of an int32.
    values = file.read(limit + 1, dtype="int32")
    if values.size > limit:
        raise _too_long(name)
    if values.size < MIN_SAMPLES:
        raise _too_short(values.size, name)
    if width == 1:
        packed = ((values >> 24) + 128).astype(np.uint8).tobytes()
    else:
        packed = values.astype("<i4").view(np.uint8).reshape(-1, 4)[:, 4 - width :].tobytes()
    return wav_bytes(packed, tag=_WAVE_PCM, width=width), int(values.size)


def _mono(file: Any, name: str) -> F32:
    """All frames, channels averaged in float64: float32 [frames] at the file's own rate."""
    limit = MAX_SECONDS * int(file.samplerate)
    parts: list[F32] = []
    total = 0
    while True:
        block = file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)
        if not len(block):
            break
        if not np.isfinite(block).all():
            raise UsageError(
                "the clip contains samples that are NaN or infinite", where=name, fix="export the recording again"
            )
        total += len(block)
        if total > limit:
            raise _too_long(name)
        parts.append(block.mean(axis=1, dtype=np.float64).astype(np.float32))
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _too_short(count: int, name: str) -> UsageError:
    return UsageError(
        f"the clip has {count} samples at 16 kHz, expected at least {MIN_SAMPLES} (25 ms)",
        where=name,
        fix="pass a longer clip",
    )


def _too_long(name: str) -> UsageError:
    return UsageError(f"the clip is longer than {MAX_SECONDS // 3600} hours", where=name, fix="cut it into pieces")


def _reason(err: BaseException) -> str:
    """libsndfile's message without the address of our buffer."""
    text = str(err).strip().rstrip(".")
    return text.rpartition(">: ")[2] or type(err).__name__
