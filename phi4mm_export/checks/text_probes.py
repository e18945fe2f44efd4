"""What an answer shows without a reference model: how it ended, what it repeats, which expected fields it holds.

The signs by which a damaged model betrays itself in text: it does not stop, it writes the same line again and again,
it doubles or drops characters inside words and numbers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from phi4mm_export.errors import MissingExtraError, UsageError, some
from phi4mm_export.spec.json_text import json_kind, read_object

ANLS_THRESHOLD = 0.5
"""Similarities below this count as 0 (Biten et al., Scene Text Visual Question Answering, ICCV 2019)."""
CONTEXT = 2
"""A doubled or dropped character counts only beside this many equal characters on both sides (fewer at an end)."""
MIN_LINE = 2
"""Shorter lines (brackets, bullets) may repeat."""

Fields = Mapping[str, Mapping[str, str]]
"""Request name -> field name -> expected value."""


@dataclass(frozen=True)
class FieldHit:
    """One expected field in one answer. exact: the value stands in the answer as written (or under its key, if the
    answer is JSON); anls: 1 - edit distance / length of the best place, 0 below ANLS_THRESHOLD."""

    field: str
    expected: str
    exact: bool
    anls: float


@dataclass(frozen=True)
class TextProbes:
    """The probes of one answer.

    repeated_lines: lines that say what an earlier line said; longest_run: most identical lines in a row. doubled,
    dropped: characters written twice or left out against the float model's answer. wer, cer: word and character
    error rate against a transcript, None without one.
    """

    finish_reason: str
    characters: int
    repeated_lines: int
    longest_run: int
    doubled: int
    dropped: int
    fields: tuple[FieldHit, ...] = ()
    wer: float | None = None
    cer: float | None = None


def probe(
    text: str,
    finish_reason: str,
    *,
    baseline: str,
    fields: Mapping[str, str] | None = None,
    reference: str | None = None,
) -> TextProbes:
    """Probe one answer; `baseline` is the float model's answer to the same request."""
    repeated, run = repeated_lines(text)
    doubled, dropped = doubled_and_dropped(text, baseline)
    wer, cer = (None, None) if reference is None else error_rates(text, reference)
    hits = tuple(field_hit(text, name, value) for name, value in (fields or {}).items())
    return TextProbes(finish_reason, len(text), repeated, run, doubled, dropped, hits, wer, cer)


def repeated_lines(text: str) -> tuple[int, int]:
    """(lines that occurred before, most identical lines in a row), blank and very short lines left out."""
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) >= MIN_LINE]
    counts = Counter(lines)
    longest = run = 0
    for index, line in enumerate(lines):
        run = run + 1 if index and line == lines[index - 1] else 1
        longest = max(longest, run)
    return sum(count - 1 for count in counts.values()), longest


def doubled_and_dropped(text: str, baseline: str) -> tuple[int, int]:
    """Characters of `baseline` that `text` writes twice in a row, and ones that it leaves out, between equal text.

    "2024" -> "22024" is one doubled, "invoice" -> "invice" one dropped; a rewording counts as neither.
    """
    doubled = dropped = 0
    blocks = SequenceMatcher(None, baseline, text, autojunk=False).get_opcodes()
    for index, (kind, a0, a1, b0, b1) in enumerate(blocks):
        if not (_is_firm(blocks, index - 1) and _is_firm(blocks, index + 1)):
            continue
        if kind == "insert" and b1 - b0 == 1 and text[b0] in (text[b0 - 1 : b0], text[b1 : b1 + 1]):
            doubled += 1
        elif kind == "delete" and a1 - a0 == 1:
            dropped += 1
    return doubled, dropped


def _is_firm(blocks: Sequence[tuple[str, int, int, int, int]], index: int) -> bool:
    """Whether a neighbouring block is equal text long enough to trust, or reaches an end of the texts."""
    if not 0 <= index < len(blocks):
        return True
    kind, begin, end, _, _ = blocks[index]
    return kind == "equal" and (end - begin >= CONTEXT or index in (0, len(blocks) - 1))


def field_hit(text: str, field: str, expected: str) -> FieldHit:
    """Look for a value: under its key where the answer is (or contains) a JSON object, else anywhere in the text."""
    stated = _json_values(text).get(_folded(field))
    wanted = _folded(expected)
    if stated is not None:
        return FieldHit(field, expected, _folded(stated) == wanted, anls(stated, expected))
    folded = _folded(text)
    exact = re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", folded) is not None
    return FieldHit(field, expected, exact, 1.0 if exact else _best_window(folded, wanted))


def anls(found: str, expected: str) -> float:
    """Normalized Levenshtein similarity, case and spacing aside: 1 for equal texts, 0 below ANLS_THRESHOLD."""
    a, b = _folded(found), _folded(expected)
    longest = max(len(a), len(b))
    score = 1.0 if not longest else 1.0 - edit_distance(a, b) / longest
    return score if score >= ANLS_THRESHOLD else 0.0


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance in characters."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, right in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (left != right))
    return row[-1]


def error_rates(text: str, reference: str) -> tuple[float, float]:
    """Word and character error rate, case, punctuation and spacing aside. MissingExtraError without jiwer."""
    try:
        import jiwer
    except ImportError as err:
        raise MissingExtraError("jiwer", "media", "word and character error rates") from err
    found, wanted = _words(text), _words(reference)
    return float(jiwer.wer(wanted, found)), float(jiwer.cer(wanted, found))


def read_fields(path: Path) -> Fields:
    """Expected fields: {"page.png": {"total": "12.50", ...}, ...}; numbers are taken as written.

    Raises UsageError naming file and key for anything else.
    """
    document = read_object(path, error=UsageError)
    found: dict[str, dict[str, str]] = {}
    for name, fields in document.items():
        if not isinstance(fields, dict) or not fields:
            raise UsageError(
                f"expected an object of field names and values, found {json_kind(fields)}", where=f"{path.name}: {name}"
            )
        for field, value in fields.items():
            if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
                raise UsageError(
                    f"expected a text or a number, found {value!r:.60}", where=f"{path.name}: {name}.{field}"
                )
        found[name] = {field: str(value) for field, value in fields.items()}
    return found


def read_references(path: Path) -> Mapping[str, str]:
    """Transcripts: {"recording.wav": "what is said", ...}. Raises UsageError naming file and key for anything else."""
    document = read_object(path, error=UsageError)
    for name, value in document.items():
        if not isinstance(value, str) or not _words(value):
            raise UsageError(f"expected a transcript, found {value!r:.60}", where=f"{path.name}: {name}")
    return document


def refuse_unknown(named: Sequence[str], requests: Sequence[str], path: Path) -> None:
    """Raise UsageError for names in a file of expectations that no request has."""
    unknown = [name for name in named if name not in requests]
    if unknown:
        raise UsageError(
            f"{len(unknown):,} names belong to no request: {some(unknown)}",
            where=path.name,
            fix=f"use the file names as given: {some(requests)}",
        )


def _json_values(text: str) -> dict[str, str]:
    """Scalars of the first JSON object in an answer, by folded key; empty if there is none."""
    start = text.find("{")
    if start < 0:
        return {}
    try:
        value, _ = json.JSONDecoder().raw_decode(text[start:])
    except (json.JSONDecodeError, RecursionError):
        return {}
    found: dict[str, str] = {}
    pending: list[Any] = [value]
    while pending:
        for key, inner in pending.pop().items():
            if isinstance(inner, dict):
                pending.append(inner)
            elif isinstance(inner, str | int | float):
                found.setdefault(_folded(key), str(inner))
    return found


def _best_window(text: str, wanted: str) -> float:
    """The best ANLS of `wanted` with a run of as many words of `text`, or one more or less."""
    words, count = text.split(), len(wanted.split())
    sizes = {max(1, count - 1), count, count + 1}
    windows = {" ".join(words[i : i + size]) for size in sizes for i in range(len(words) - size + 1)}
    return max((anls(window, wanted) for window in windows), default=0.0)


def _folded(text: str) -> str:
    return " ".join(str(text).casefold().split())


def _words(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", " ", text.casefold()).split())
