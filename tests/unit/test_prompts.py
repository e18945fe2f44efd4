"""What a user types becomes the prompt that og's processor takes, with one marker per picture and clip."""

from __future__ import annotations

import json

import pytest

from phi4mm_export.errors import UsageError
from phi4mm_export.runtime.prompts import Prompt, build_prompt


def template(messages: str) -> str:
    """The published chat template."""
    return "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in json.loads(messages)) + "<|assistant|>"


def test_plain_text_goes_into_the_manual_format_without_a_template() -> None:
    assert build_prompt("Hi").text == "<|user|>\nHi<|end|>\n<|assistant|>\n"


def test_plain_text_goes_through_the_template_of_the_package() -> None:
    assert build_prompt("Größe?", template=template).text == "<|user|>Größe?<|end|><|assistant|>"


def test_a_system_text_comes_first_in_both_forms() -> None:
    assert build_prompt("Hi", system="Be brief.").text.startswith("<|system|>\nBe brief.<|end|>\n<|user|>\nHi")
    assert build_prompt("Hi", system="S", template=template).text == "<|system|>S<|end|><|user|>Hi<|end|><|assistant|>"


def test_markers_are_put_before_the_text_pictures_first() -> None:
    manual = build_prompt("Q", num_images=2, num_audios=1)
    assert manual.text == "<|user|>\n<|image_1|>\n<|image_2|>\n<|audio_1|>\nQ<|end|>\n<|assistant|>\n"
    assert build_prompt("Q", num_images=1, template=template).text == "<|user|><|image_1|>Q<|end|><|assistant|>"


def test_markers_in_the_text_keep_their_place_and_choose_the_files() -> None:
    built = build_prompt("a <|image_2|> b <|audio_1|> c <|image_1|>", num_images=2, num_audios=1)
    assert built == Prompt(
        "<|user|>\na <|image_2|> b <|audio_1|> c <|image_1|><|end|>\n<|assistant|>\n", images=(1, 0), audios=(0,)
    )


def test_a_prompt_in_chat_format_is_taken_as_it_is() -> None:
    text = "<|user|>\n<|image_1|>\nWhat?<|end|>\n<|assistant|>\nIt is"
    assert build_prompt(text, num_images=1, template=template).text == text


def test_raw_text_is_taken_as_it_is() -> None:
    assert build_prompt("Once upon", raw=True, template=template).text == "Once upon"


def test_a_clip_alone_may_be_the_whole_question() -> None:
    assert build_prompt("", num_audios=1).text == "<|user|>\n<|audio_1|>\n<|end|>\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("text", "images", "found"),
    [
        ("<|image_1|>", 2, "found <|image_1|>"),
        ("<|image_1|> <|image_1|>", 2, "found <|image_1|>, <|image_1|>"),
        ("<|image_2|>", 1, "found <|image_2|>"),
        ("<|image_1|>", 0, "must hold no image marker; found <|image_1|>"),
        ("<|user|>\nWhat?<|end|>\n<|assistant|>\n", 1, "found no image marker"),
        ("<|image_1|><|image_2|><|image_3|>", 2, "must hold <|image_1|>, <|image_2|>; found"),
        ("<|audio_1|>", 1, "found no image marker"),
    ],
)
def test_markers_and_files_must_agree(text: str, images: int, found: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_prompt(text, num_images=images)
    assert found in caught.value.what


@pytest.mark.parametrize("token", ["<|endoftext10|>", "<|endoftext11|>"])
def test_a_placeholder_in_the_text_is_refused(token: str) -> None:
    with pytest.raises(UsageError, match="stands for feature rows"):
        build_prompt(f"a {token} b")


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        build_prompt(" \n")


@pytest.mark.parametrize("text", ["<|user|>Hi<|end|><|assistant|>", "plain"])
def test_a_system_text_beside_a_finished_prompt_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="already in chat format"):
        build_prompt(text, system="S", raw=text == "plain")
