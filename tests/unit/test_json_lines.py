"""On which line of a JSON text a key stands."""

from __future__ import annotations

import json

import pytest

from phi4mm_export.spec.json_lines import key_lines, line_of

TEXT = """{
  "model": {"type": "phi4mm",
    "eos_token_id": [200020,
                     199999],
    "odd, \\"key\\": {": {
      "memory.enable_shrinkage": "gpu:0"
    }
  },
  "steps": [
    {"operation": {"name": "a"}},
    {"operation": {"name": "b",
                   "attrs": {}}}
  ]
}
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("model", 2),
        ("model.type", 2),
        ("model.eos_token_id", 3),
        ("model.eos_token_id[0]", 3),
        ("model.eos_token_id[1]", 4),
        ('model.odd, "key": {', 5),
        ('model.odd, "key": {.memory.enable_shrinkage', 6),
        ("steps[0].operation.name", 10),
        ("steps[1].operation.attrs", 12),
    ],
)
def test_a_key_is_found_on_its_line(path: str, line: int) -> None:
    assert line_of(TEXT, path) == line


@pytest.mark.parametrize(
    ("path", "line"),
    [("model.vocab_size", 2), ("steps[1].operation.domain", 11), ("steps[7]", 9), ("search.top_k", None)],
)
def test_a_missing_key_stands_for_the_nearest_one_around_it(path: str, line: int | None) -> None:
    assert line_of(TEXT, path) == line


def test_a_name_that_merely_starts_alike_is_not_around_it() -> None:
    assert line_of('{"mod": 1,\n"model": {}}', "model.x") == 2
    assert line_of('{"mod": 1}', "model.x") is None


def test_every_path_of_a_document_is_found_as_often_as_the_parsed_value_has_it() -> None:
    def paths(value: object, here: str) -> list[str]:
        if isinstance(value, dict):
            inner = [(f"{here}.{key}" if here else key, item) for key, item in value.items()]
        elif isinstance(value, list):
            inner = [(f"{here}[{number}]", item) for number, item in enumerate(value)]
        else:
            return []
        return [path for name, item in inner for path in (name, *paths(item, name))]

    for text in (TEXT, "[[], [1, [2, {}]], {}]", '{"a": {}, "b": [{"c": [1, 2]}, "x: [1]"], "d": null}', "7"):
        assert [path for path, _ in key_lines(text)] == paths(json.loads(text), "")


@pytest.mark.parametrize("text", ["", "}", "]]", '{"a"', '{"a": [}', '"', ",,,", '{"a": "\\x"}', "{" * 1000])
def test_of_what_is_no_json_the_answer_is_the_first_line_or_none(text: str) -> None:
    assert line_of(text, "a.b") in (None, 1)
