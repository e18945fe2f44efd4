"""The made-up calibration media: valid, varied, and decided by seed and number alone."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from phi4mm_export.errors import UsageError
from phi4mm_export.runtime.audio import decode_audio
from phi4mm_export.runtime.builtin_media import PAGE_SIZES, builtin_files
from phi4mm_export.runtime.calibration_sources import SampleKind


def test_pages_have_all_sizes_and_differ_from_each_other() -> None:
    pages = [Image.open(io.BytesIO(file.read())) for file in builtin_files(SampleKind.IMAGE, 8, 0)]
    assert [page.size for page in pages] == list(PAGE_SIZES)
    assert len({np.asarray(page).tobytes() for page in pages}) == 8


def test_a_page_is_decided_by_seed_and_number() -> None:
    first, again = (builtin_files(SampleKind.IMAGE, count, 5)[2].read() for count in (3, 4))
    other = builtin_files(SampleKind.IMAGE, 3, 6)[2].read()
    assert first == again
    assert first != other


def test_clips_are_sounds_of_a_second_and_more() -> None:
    clips = [decode_audio(file.read(), file.name) for file in builtin_files(SampleKind.AUDIO, 4, 0)]
    assert all(0.5 < clip.seconds < 15 for clip in clips)
    assert len({clip.wav for clip in clips}) == 4


def test_prompts_come_with_nothing_a_page_a_clip_and_both_in_turn() -> None:
    names = [file.name for file in builtin_files(SampleKind.PROMPT, 4, 0)]
    assert names == [
        "builtin/0000.txt",
        "builtin/0001.png",
        "builtin/0001.txt",
        "builtin/0002.wav",
        "builtin/0002.txt",
        "builtin/0003.png",
        "builtin/0003.wav",
        "builtin/0003.txt",
    ]


@pytest.mark.parametrize("count", [0, 100_000])
def test_an_impossible_count_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match="expected 1 to 4,096"):
        builtin_files(SampleKind.IMAGE, count, 0)


def test_there_is_no_builtin_set_of_arrays() -> None:
    with pytest.raises(UsageError, match="no builtin set"):
        builtin_files(SampleKind.ARRAYS, 1, 0)
