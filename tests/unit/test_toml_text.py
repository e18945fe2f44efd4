"""Recorded recipes as TOML: what is written is what is read again."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phi4mm_export.spec.build_recipe_read import toml_text

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
tables = st.recursive(
    st.dictionaries(texts, values, max_size=4),
    lambda inner: st.dictionaries(texts, values | inner, max_size=4),
    max_leaves=6,
)


@given(tables)
def test_any_tables_are_read_as_they_were_written(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(table)) == table


@pytest.mark.parametrize("text", ["a\nb", "\t", "\r\n", "\x00", "\x1f", "\x7f", '"', "\\", "\\n", "é\u2028\U0001f600"])
def test_any_text_keeps_its_characters(text: str) -> None:
    written = toml_text({"value": text, "table": {text: [text]}})
    assert tomllib.loads(written) == {"value": text, "table": {text: [text]}}


def test_names_stand_bare_where_they_can_and_tables_without_values_are_kept() -> None:
    written = toml_text({"a-b_1": 1, "t": {"x y": {"z": True}, "empty": {}}})
    assert written == 'a-b_1 = 1\n\n[t."x y"]\nz = true\n\n[t.empty]\n'
