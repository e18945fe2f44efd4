"""Probes of answers, on short texts whose right result is plain to see."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from phi4mm_export.checks.text_probes import (
    anls,
    doubled_and_dropped,
    edit_distance,
    error_rates,
    field_hit,
    probe,
    read_fields,
    read_references,
    refuse_unknown,
    repeated_lines,
)
from phi4mm_export.errors import MissingExtraError, UsageError


def test_a_line_said_three_times_is_two_repeats_and_a_run_of_three() -> None:
    assert repeated_lines("total 5\ntotal 5\n total 5 \nend") == (2, 3)


def test_blank_lines_and_brackets_may_repeat() -> None:
    assert repeated_lines("{\n}\n\n{\n}\n\nend") == (0, 1)
    assert repeated_lines("") == (0, 0)


@pytest.mark.parametrize(
    ("text", "doubled", "dropped"),
    [
        ("invoice 2024", 0, 0),
        ("invoice 22024", 1, 0),
        ("invice 2024", 0, 1),
        ("invvoice 204", 1, 1),
        ("invoice number 2024", 0, 0),
        ("something else entirely", 0, 0),
    ],
)
def test_doubled_and_dropped_characters_are_counted_against_the_float_answer(
    text: str, doubled: int, dropped: int
) -> None:
    assert doubled_and_dropped(text, "invoice 2024") == (doubled, dropped)


def test_a_field_is_found_anywhere_in_plain_text_but_not_inside_another_number() -> None:
    assert field_hit("The total is 12.50 EUR", "total", "12.50").exact
    assert not field_hit("The total is 112.50 EUR", "total", "12.50").exact


def test_a_field_of_a_json_answer_is_looked_up_under_its_key() -> None:
    answer = 'Here: {"Invoice": {"Total": "12.05", "Tax": "12.50"}}'
    hit = field_hit(answer, "total", "12.50")
    assert not hit.exact
    assert hit.anls == pytest.approx(1 - 2 / 5)
    assert field_hit(answer, "tax", "12.50").exact


def test_the_best_place_of_a_nearly_right_value_gives_its_similarity() -> None:
    assert field_hit("issued by Miller and Sons Ltd", "seller", "Miller & Sons").anls == pytest.approx(1 - 3 / 15)


def test_anls_ignores_case_and_spacing_and_cuts_off_below_a_half() -> None:
    assert anls("ACME  Corp", "acme corp") == 1.0
    assert anls("abcd", "abcx") == 0.75
    assert anls("abcd", "wxyd") == 0.0


def test_edit_distance_of_known_words() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == 3


def test_word_and_character_errors_ignore_case_and_punctuation() -> None:
    pytest.importorskip("jiwer", reason="needs the extra media")
    assert error_rates("Hello, World!", "hello world") == (0.0, 0.0)
    wer, cer = error_rates("hello word", "hello world")
    assert (wer, cer) == (0.5, pytest.approx(1 / 11))


def test_error_rates_without_jiwer_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(MissingExtraError, match=r"phi4mm\[media\]"):
        error_rates("a", "b")


def test_all_probes_of_one_answer() -> None:
    found = probe("12.50\n12.50", "stop", baseline="12.50", fields={"total": "12.50", "date": "1 May"})
    assert (found.finish_reason, found.characters, found.repeated_lines) == ("stop", 11, 1)
    assert [hit.exact for hit in found.fields] == [True, False]
    assert (found.wer, found.cer) == (None, None)


def test_field_files_take_texts_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "gold.json").write_text('{"page.png": {"total": 12.5, "seller": "ACME"}}')
    assert read_fields(tmp_path / "gold.json") == {"page.png": {"total": "12.5", "seller": "ACME"}}


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"page.png": "12.50"}, "gold.json: page.png"),
        ({"page.png": {}}, "gold.json: page.png"),
        ({"page.png": {"total": None}}, "gold.json: page.png.total"),
        ({"page.png": {"total": True}}, "gold.json: page.png.total"),
    ],
)
def test_a_field_file_of_another_form_is_refused_by_key(tmp_path: Path, document: object, place: str) -> None:
    (tmp_path / "gold.json").write_text(json.dumps(document))
    with pytest.raises(UsageError) as caught:
        read_fields(tmp_path / "gold.json")
    assert caught.value.where == place


def test_a_transcript_without_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "said.json").write_text('{"call.wav": "..."}')
    with pytest.raises(UsageError, match=r"said.json: call.wav: expected a transcript"):
        read_references(tmp_path / "said.json")


def test_expectations_for_files_that_were_not_asked_about_are_refused_with_the_names_there_are() -> None:
    refuse_unknown(["a.png"], ["a.png", "b.png"], Path("gold.json"))
    with pytest.raises(UsageError, match=r"1 names belong to no request: c\.png; use the file names as given: a\.png"):
        refuse_unknown(["c.png"], ["a.png"], Path("gold.json"))
