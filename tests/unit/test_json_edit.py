"""Edits of JSON texts: the value changes, every other character stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phi4mm_export.package.json_edit import REMOVE, Change, edited, path_of, value_at

TEXT = """{
    "a": {
        "b": [1, 2,   3],
        "c": "x, \\" } ]"
    },
    "d": [
        {"e": null}
    ],
    "f": {}
}
"""


def _lines(before: str, after: str) -> list[str]:
    old, new = before.splitlines(), after.splitlines()
    return [line for line in new if line not in old]


def test_a_value_is_replaced_and_nothing_else_moves() -> None:
    assert edited(TEXT, [Change(("a", "b", 1), 20)]) == TEXT.replace("[1, 2,   3]", "[1, 20,   3]")


def test_text_that_looks_like_structure_is_stepped_over() -> None:
    assert edited(TEXT, [Change(("d", 0, "e"), True)]) == TEXT.replace("null", "true")


def test_a_key_is_added_as_a_line_of_its_own_with_the_indentation_there_is() -> None:
    after = edited(TEXT, [Change(("a", "new"), {"x": [1], "y": {}})])
    assert json.loads(after)["a"]["new"] == {"x": [1], "y": {}}
    assert '        "new": {' in after.splitlines()
    assert '            "x": [1],' in after.splitlines()


def test_a_key_is_added_to_an_empty_object_and_objects_on_the_way_are_made() -> None:
    after = edited(TEXT, [Change(("f", "g", "h"), 1)])
    assert json.loads(after)["f"] == {"g": {"h": 1}}
    assert '        "g": {' in after.splitlines()


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (("a", "b"), {"c": 'x, " } ]'}),
        (("a", "c"), {"b": [1, 2, 3]}),
        (("a", "b", 0), {"b": [2, 3], "c": 'x, " } ]'}),
        (("a", "b", 2), {"b": [1, 2], "c": 'x, " } ]'}),
    ],
)
def test_the_first_a_middle_and_the_last_member_can_go(path: tuple[str | int, ...], wanted: Any) -> None:
    assert json.loads(edited(TEXT, [Change(path, REMOVE)]))["a"] == wanted


def test_the_only_member_can_go() -> None:
    assert json.loads(edited('{"a": {"b": 1}}', [Change(("a", "b"), REMOVE)])) == {"a": {}}


@pytest.mark.parametrize("path", [("nothing",), ("a", "nothing"), ("a", "b", 9), ("a", "c", "x")])
def test_removing_what_is_not_there_changes_nothing(path: tuple[str | int, ...]) -> None:
    assert edited(TEXT, [Change(path, REMOVE)]) == TEXT


def test_a_text_on_one_line_stays_on_one_line() -> None:
    assert edited('{"a":1}', [Change(("b",), {"c": [1, {"d": 2}]})]) == '{"a":1, "b": {"c": [1, {"d": 2}]}}'


@pytest.mark.parametrize(
    ("dotted", "path"),
    [
        ("a.b[1]", ("a", "b", 1)),
        ("d[0].e", ("d", 0, "e")),
        ("o.memory.x.y", ("o", "memory.x", "y")),
        ("o.memory.new", ("o", "memory", "new")),
        ("z", ("z",)),
        ("", ()),
    ],
)
def test_dotted_paths_find_keys_that_hold_dots(dotted: str, path: tuple[str | int, ...]) -> None:
    document = {"a": {"b": [1, 2]}, "d": [{"e": 1}], "o": {"memory.x": {"y": 1}}}
    assert path_of(document, dotted) == path


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def _paths(document: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items: Any = ()
    if isinstance(document, dict | list):
        items = document.items() if isinstance(document, dict) else enumerate(document)
    return [p for key, value in items for p in [(*path, key), *_paths(value, (*path, key))]]


@given(
    st.dictionaries(st.text(max_size=5), values, min_size=1, max_size=5),
    values,
    st.data(),
    st.sampled_from([None, 2, 4]),
)
def test_an_edit_gives_what_the_same_edit_of_the_document_gives(
    document: dict[str, Any], value: Any, data: st.DataObject, indent: int | None
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    path = data.draw(st.sampled_from(_paths(document)))
    removed = data.draw(st.booleans())
    after = json.loads(edited(text, [Change(path, REMOVE if removed else value)]))
    parent = value_at(document, path[:-1])
    if removed:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    assert after == document


@given(
    st.dictionaries(st.text(max_size=5), values, max_size=5), st.text(max_size=5), values, st.sampled_from([None, 2, 4])
)
def test_an_added_key_is_there_and_all_others_as_before(
    document: dict[str, Any], key: str, value: Any, indent: int | None
) -> None:
    text = json.dumps(document, indent=indent)
    assert json.loads(edited(text, [Change((key,), value)])) == {**document, key: value}


spaces = st.text(" \t\n", max_size=3)


@given(st.dictionaries(st.text(max_size=5), values, min_size=1, max_size=5), values, st.data(), spaces, spaces)
def test_the_characters_around_a_value_stay_whatever_they_are(
    document: dict[str, Any], value: Any, data: st.DataObject, gap: str, around: str
) -> None:
    text = around + json.dumps(document, separators=(f"{gap},{around}", f"{around}:{gap}")) + gap
    path = data.draw(st.sampled_from(_paths(document)))
    after = edited(text, [Change(path, value)])
    written = json.dumps(value_at(document, path), separators=(f"{gap},{around}", f"{around}:{gap}"))
    places = (at for at in range(len(text)) if text.startswith(written, at))
    assert any(_keeps(text, after, at, len(written)) for at in places), (text, after)


def _keeps(before: str, after: str, start: int, length: int) -> bool:
    """Whether all that stands before and after one piece of a text is the same in another."""
    tail = before[start + length :]
    return after.startswith(before[:start]) and after.endswith(tail) and len(after) >= start + len(tail)
