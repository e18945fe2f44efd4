"""Sound reaches og as 16 kHz mono WAVs of at least one window, and what cannot be decoded is refused by name."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from phi4mm_export.errors import UsageError
from phi4mm_export.runtime.audio import MIN_SAMPLES, Clip, decode_audio, load_audio

RATE = 16000


def encoded(samples: np.ndarray, rate: int = RATE, kind: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def heard(clip: Clip) -> np.ndarray:
    """The clip's samples as float32, as a WAV reader scales them."""
    samples, rate = soundfile.read(io.BytesIO(clip.wav), dtype="float32")
    assert rate == RATE
    assert samples.shape == (clip.num_samples,)
    return samples


def tone(seconds: float, rate: int = RATE, hz: float = 440.0) -> np.ndarray:
    return (0.4 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32"])
def test_a_16_khz_mono_pcm_wav_keeps_its_samples_and_its_format_exactly(subtype: str) -> None:
    rng = np.random.default_rng(3)
    whole = rng.integers(-(2**31), 2**31, 1001, dtype=np.int32)
    data = encoded(whole, subtype=subtype)
    clip = decode_audio(data, "x.wav")
    kept, original = (soundfile.read(io.BytesIO(wav), dtype="int32")[0] for wav in (clip.wav, data))
    np.testing.assert_array_equal(kept, original)
    assert soundfile.info(io.BytesIO(clip.wav)).subtype == subtype


def test_a_16_khz_mono_float_wav_keeps_its_samples_even_beyond_full_scale() -> None:
    samples = 3 * tone(0.2)
    np.testing.assert_array_equal(heard(decode_audio(encoded(samples, subtype="FLOAT"), "x.wav")), samples)


@pytest.mark.parametrize(
    ("kind", "subtype"), [("FLAC", "PCM_16"), ("WAV", "ULAW"), ("AIFF", "PCM_16"), ("CAF", "FLOAT")]
)
def test_other_16_khz_mono_formats_keep_what_libsndfile_reads(kind: str, subtype: str) -> None:
    data = encoded(tone(0.3), kind=kind, subtype=subtype)
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    np.testing.assert_array_equal(heard(decode_audio(data, "x")), expected)


@pytest.mark.parametrize(("kind", "subtype"), [("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")])
def test_compressed_formats_that_og_may_not_know_are_decoded(kind: str, subtype: str) -> None:
    clip = decode_audio(encoded(tone(1.0), kind=kind, subtype=subtype), "x")
    assert clip.seconds == pytest.approx(1.0, abs=0.15)
    assert 0.2 < np.abs(heard(clip)[4000:12000]).max() < 0.6


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_every_sample_rate_is_brought_to_16_khz(rate: int) -> None:
    clip = decode_audio(encoded(tone(0.5, rate), rate), "x.wav")
    middle = heard(clip)[2000:6000]
    assert clip.num_samples == pytest.approx(8000, abs=2)
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(middle.size)))
    assert np.argmax(spectrum) * RATE / middle.size == pytest.approx(440, abs=5)


def test_frequencies_above_8_khz_do_not_fold_back() -> None:
    clip = decode_audio(encoded(tone(0.5, 48000, hz=11000.0), 48000, subtype="FLOAT"), "x.wav")
    assert np.abs(heard(clip)[1000:-1000]).max() < 1e-3


@pytest.mark.parametrize("channels", [2, 3, 6])
def test_channels_are_averaged(channels: int) -> None:
    samples = np.stack([tone(0.2) * k for k in range(channels)], axis=1)
    clip = decode_audio(encoded(samples, subtype="FLOAT"), "x.wav")
    np.testing.assert_allclose(heard(clip), samples.mean(axis=1), atol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 100, 399])
def test_a_clip_under_25_ms_is_refused_with_its_length(count: int) -> None:
    with pytest.raises(UsageError, match=f"the clip has {count} samples at 16 kHz, expected at least 400") as caught:
        decode_audio(encoded(np.zeros(count, np.int16)), "blip.wav")
    assert caught.value.where == "blip.wav"


def test_the_length_counts_at_16_khz_whatever_the_file_has() -> None:
    assert decode_audio(encoded(np.zeros(200, np.int16), 8000), "x").num_samples == MIN_SAMPLES
    with pytest.raises(UsageError, match="25 ms"):
        decode_audio(encoded(np.zeros(1000, np.int16), 44100), "x")
    with pytest.raises(UsageError, match="25 ms"):
        decode_audio(encoded(np.zeros(199, np.int16), 8000), "x")


def test_exactly_one_window_and_silence_are_fine() -> None:
    assert not heard(decode_audio(encoded(np.zeros(MIN_SAMPLES, np.int16)), "x.wav")).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite_are_refused(bad: float) -> None:
    samples = tone(0.1)
    samples[700] = bad
    with pytest.raises(UsageError, match="NaN or infinite"):
        decode_audio(encoded(samples, subtype="FLOAT"), "x.wav")


@pytest.mark.parametrize("data", [b"this is no sound", b"RIFF", b"OggS" + bytes(40), b"fLaC" + bytes(60), bytes(1000)])
def test_what_is_no_sound_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(UsageError, match="not a sound file") as caught:
        decode_audio(data, "notes.wav")
    assert caught.value.where == "notes.wav"
    assert "0x" not in str(caught.value)


def test_a_wav_cut_short_gives_the_samples_that_are_there() -> None:
    data = encoded(np.arange(4000, dtype=np.int16))
    clip = decode_audio(data[: len(data) // 2], "x.wav")
    assert MIN_SAMPLES < clip.num_samples < 2100


def test_a_header_that_promises_gigabytes_is_believed_only_as_far_as_there_are_samples() -> None:
    data = bytearray(encoded(np.ones(800, np.int16)))
    place = data.index(b"data") + 4
    data[place : place + 4] = struct.pack("<I", 0xFFFFFFF0)
    assert decode_audio(bytes(data), "x.wav").num_samples == 800


def test_random_damage_gives_a_clip_or_a_usage_error() -> None:
    rng = np.random.default_rng(7)
    kinds: list[dict[str, Any]] = [{}, {"kind": "FLAC"}, {"kind": "AIFF"}, {"kind": "OGG"}, {"kind": "MP3"}]
    originals = [encoded(tone(0.2), **kind) for kind in kinds]
    outcomes = {"clip": 0, "refused": 0}
    for _ in range(400):
        data = bytearray(originals[rng.integers(len(originals))])
        for place in rng.integers(0, min(len(data), 80), 3):
            data[place] = rng.integers(256)
        try:
            decode_audio(bytes(data), "x")
            outcomes["clip"] += 1
        except UsageError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20


def test_the_same_file_gives_the_same_bytes_and_no_clock(tmp_path: Path) -> None:
    file = tmp_path / "a b#.wav"
    file.write_bytes(encoded(tone(0.2), 44100))
    first = load_audio(file)
    assert first.wav == load_audio(file).wav
    assert b"PEAK" not in first.wav
    assert first.source == "WAV PCM_16, 44100 Hz, 1 channels"
