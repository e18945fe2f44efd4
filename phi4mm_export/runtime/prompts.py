"""From what a user types to the text that og's processor takes: chat format, and one marker per picture and clip.

og counts the markers and ignores their numbers, so that `<|image_2|><|image_1|>` would take the files in the order
they were passed; here the numbers decide, and the files are put in the order of their markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phi4mm_export.errors import UsageError, some
from phi4mm_export.spec.tokens import END_OF_TURN, PLACEHOLDERS

ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", END_OF_TURN)
"""A prompt that contains one of these is already in chat format."""
_MARKER = re.compile(r"<\|(image|audio)_(\d+)\|>")

ChatTemplate = Callable[[str], str]
"""Turns a JSON list of messages into the prompt text, up to where the answer begins."""


@dataclass(frozen=True)
class Prompt:
    """The text for the processor, and which of the passed files (from 0) each marker of a kind stands for."""

    text: str
    images: tuple[int, ...] = ()
    audios: tuple[int, ...] = ()


def build_prompt(
    text: str,
    *,
    num_images: int = 0,
    num_audios: int = 0,
    system: str | None = None,
    raw: bool = False,
    template: ChatTemplate | None = None,
) -> Prompt:
    """The whole prompt for one turn.

    Text without markers gets them at its beginning, pictures first; text without role tokens is put into `template`, or
    without one into the manual format of the model card. With `raw` nothing is added.
    Raises UsageError if the markers are not `<|image_1|>` to `<|image_N|>` once each (audio likewise), for placeholder
    tokens, an empty request, and a system text beside a prompt that is already in chat format.
    """
    found = [name for name in PLACEHOLDERS if name in text or name in (system or "")]
    if found:
        raise UsageError(
            f"the prompt contains {some(found)}, which stands for feature rows",
            where="--prompt",
            fix="mark the places of pictures and clips with <|image_1|> and <|audio_1|>",
        )
    formatted = raw or any(token in text for token in ROLE_TOKENS)
    if system is not None and formatted:
        raise UsageError(
            "a system text was given, and the prompt is already in chat format",
            where="--system",
            fix="put the system text into the prompt, or leave out the role tokens",
        )
    if not text.strip() and not num_images and not num_audios:
        raise UsageError("the prompt is empty", where="--prompt")
    marked = _MARKER.search(text) is not None
    if not marked and not formatted:
        text = _with_markers(text, num_images, num_audios, "" if template else "\n")
    images = _order(text, "image", num_images)
    audios = _order(text, "audio", num_audios)
    if not formatted:
        text = template(_messages(text, system)) if template else _manual_format(text, system)
    return Prompt(text, images, audios)


def _with_markers(text: str, num_images: int, num_audios: int, line_end: str) -> str:
    markers = [f"<|image_{i + 1}|>" for i in range(num_images)] + [f"<|audio_{i + 1}|>" for i in range(num_audios)]
    return "".join(marker + line_end for marker in markers) + text


def _order(text: str, kind: str, count: int) -> tuple[int, ...]:
    """The files, from 0, in the order of their markers in the text."""
    numbers = [int(number) for found, number in _MARKER.findall(text) if found == kind]
    if sorted(numbers) != list(range(1, count + 1)):
        wanted = _marker_list(kind, range(1, count + 1))
        raise UsageError(
            f"{count} {kind} file{'' if count == 1 else 's'} passed, so the prompt must hold {wanted}; "
            f"found {_marker_list(kind, numbers)}",
            where="--prompt",
            fix=f"pass --{kind} once per marker and mark each file once, or leave all markers out",
        )
    return tuple(number - 1 for number in numbers)


def _marker_list(kind: str, numbers: Sequence[int]) -> str:
    return some(f"<|{kind}_{number}|>" for number in numbers) if numbers else f"no {kind} marker"


def _messages(text: str, system: str | None) -> str:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return json.dumps([*messages, {"role": "user", "content": text}], ensure_ascii=False)


def _manual_format(text: str, system: str | None) -> str:
    before = f"<|system|>\n{system}<|end|>\n" if system is not None else ""
    return f"{before}<|user|>\n{text}<|end|>\n<|assistant|>\n"
