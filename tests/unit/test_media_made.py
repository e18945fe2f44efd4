"""Pictures, clips and inputs made of seeded numbers are what their descriptions say."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest

from phi4mm_export.checks.cases import InputMode, made_clips, made_images, modes_of, request_mode
from phi4mm_export.checks.media import CLIPS, PICTURES, REQUESTS, clip, picture
from phi4mm_export.spec.model import Role


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_a_png_of_the_stated_size_and_the_same_every_time(name: str) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs pillow")
    with image.open(io.BytesIO(picture(name))) as opened:
        assert opened.format == "PNG"
        assert opened.size == PICTURES[name][:2]
        assert len(set(opened.convert("RGB").get_flattened_data())) > 20
    assert picture(name) == picture(name)


@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_is_16_khz_mono_of_the_stated_length(name: str) -> None:
    with wave.open(io.BytesIO(clip(name))) as opened:
        assert (opened.getframerate(), opened.getnchannels(), opened.getsampwidth()) == (16000, 1, 2)
        assert opened.getnframes() == int(CLIPS[name] * 16000)
        assert np.frombuffer(opened.readframes(16000), "<i2").std() > 500


def test_requests_cover_the_four_modes_with_the_markers_they_need() -> None:
    assert {request.mode for request in REQUESTS.values()} == set(InputMode)
    for request in REQUESTS.values():
        assert request.prompt.count("<|image_") == len(request.pictures)
        assert request.prompt.count("<|audio_") == len(request.clips)


def test_made_images_are_padded_as_the_runtime_pads_them() -> None:
    made = made_images("x", [((1, 2), (31, 45)), ((1, 1), (32, 32))])
    assert made["pixel_values"].shape == (2, 3, 3, 448, 448)
    assert made["image_sizes"].tolist() == [[448, 896], [448, 448]]
    first, second = made["image_attention_mask"]
    assert (first[1].sum(), first[2].sum()) == (31 * 32, 31 * 13)
    assert second[2].all()
    assert not made["pixel_values"][1, 2].any()


def test_made_clips_have_zero_frames_and_a_false_mask_behind_their_end() -> None:
    made = made_clips("x", [61, 200])
    assert made["audio_sizes"].tolist() == [8, 25]
    assert made["audio_attention_mask"].sum(1).tolist() == [61, 200]
    assert not made["audio_embeds"][0, 61:].any()


def test_the_original_runs_images_with_the_vision_adapter_whether_or_not_there_is_audio() -> None:
    assert [mode.adapter for mode in InputMode] == [None, Role.VISION, Role.SPEECH, Role.VISION]
    assert [mode.projection for mode in InputMode] == [0, 1, 2, 3]
    assert modes_of(Role.VISION) == "image, both"


def test_what_a_request_holds_tells_its_mode() -> None:
    pixels, frames = {"pixel_values": np.zeros(1)}, {"audio_embeds": np.zeros(1)}
    assert [request_mode(r) for r in ({}, pixels, frames, pixels | frames)] == list(InputMode)
