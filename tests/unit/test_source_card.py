"""What is read from the source's own model card, and what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phi4mm_export.package.source_card import MAX_NBYTES, SourceCard, front_matter, read_source_card


def said(body: str) -> dict[str, str]:
    return front_matter(f"---\n{body}\n---\n# Title\nlicense: other\n".encode())


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("license: mit", "mit"),
        ("license: 'apache-2.0'", "apache-2.0"),
        ('license: "other"', "other"),
        ("license: mit  # as upstream", "mit"),
        ("license:   mit", "mit"),
    ],
)
def test_a_plain_text_is_read(line: str, value: str) -> None:
    assert said(line) == {"license": value}


@pytest.mark.parametrize(
    "line",
    [
        "license: [mit, apache-2.0]",
        "license:",
        "license: |",
        "license: &anchor mit",
        "license: {a: b}",
        'license: "mit',
        r'license: "m\u0069t"',
        "  license: mit",
        "- license: mit",
        "license: " + "x" * 300,
        "license: a\u202eb",
    ],
)
def test_anything_else_says_nothing(line: str) -> None:
    assert said(line) == {}


def test_only_what_stands_between_the_two_lines_at_the_start_counts() -> None:
    assert front_matter(b"# Title\n---\nlicense: mit\n---\n") == {}
    assert front_matter(b"---\nlicense: mit\n") == {}
    assert front_matter(b"") == {}
    assert front_matter(b"\xef\xbb\xbf---\r\nlicense: mit\r\n---\r\n") == {"license": "mit"}


def test_the_first_of_two_equal_keys_counts() -> None:
    assert said("license: mit\nlicense: other") == {"license": "mit"}


def test_a_source_without_a_card_is_known_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": "owner/name", "license": "mit"}))

    card = read_source_card(tmp_path)

    assert (card.license, card.base_model, card.file) == ("mit", "owner/name", None)


@pytest.mark.parametrize("name", ["/home/me/model", "model", "a/b/c", "../x", 3, None])
def test_a_name_in_the_config_that_is_no_hub_id_is_not_repeated(tmp_path: Path, name: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": name}))

    assert read_source_card(tmp_path).base_model is None


def test_a_card_or_config_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{broken")
    (tmp_path / "README.md").write_bytes(b"---\n" + b"x" * MAX_NBYTES)

    assert read_source_card(tmp_path) == SourceCard()
    assert read_source_card(tmp_path / "nowhere") == SourceCard()


def test_the_text_of_the_licence_is_taken_under_its_own_name_and_an_empty_one_is_none(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_bytes(b"")
    (tmp_path / "COPYING").write_bytes(b"text")

    assert read_source_card(tmp_path).license_text == ("COPYING", b"text")
