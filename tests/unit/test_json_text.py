"""Strict JSON reading, and amounts of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from phi4mm_export.errors import CheckpointError, PackageError, UsageError
from phi4mm_export.spec.json_text import json_bytes, parse_json, parse_object, read_object
from phi4mm_export.spec.sizes import format_bytes, parse_bytes


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "x.json") == {"a": 1}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' occurs more than once"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not usable JSON"),
        (b"[" * 101 + b"]" * 101, "deeper than 100"),
        (b"[" * 100_000 + b"]" * 100_000, "deeper than 100"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": 1', "not valid JSON"),
        (b"", "empty"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        (b'{"a": "\xff"}', "not UTF-8"),
    ],
)
def test_text_that_two_readers_may_read_differently_is_refused_by_name(text: bytes, part: str) -> None:
    with pytest.raises(CheckpointError, match=part) as caught:
        parse_json(text, "some.json")
    assert caught.value.where == "some.json"


def test_a_whole_surrogate_pair_is_fine() -> None:
    assert parse_json(b'"\\ud83d\\ude00"', "x") == "\N{GRINNING FACE}"


def test_nesting_up_to_the_limit_is_read() -> None:
    assert parse_json(b"[" * 100 + b"]" * 100, "x")


def test_the_error_class_is_the_callers() -> None:
    with pytest.raises(PackageError, match="expected a JSON object at the top, found a list"):
        parse_object(b"[1]", "x.json", error=PackageError)


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        read_object(tmp_path / "none.json")
    with pytest.raises(CheckpointError, match="expected a file"):
        read_object(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        read_object(path)


def test_json_is_written_in_the_given_order_with_one_newline_at_the_end() -> None:
    assert json_bytes({"b": "é", "a": [1]}) == '{\n    "b": "é",\n    "a": [\n        1\n    ]\n}\n'.encode()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("12GiB", 12 << 30),
        ("12 GB", 12 * 10**9),
        ("16G", 16 << 30),
        ("1.5MiB", 3 << 19),
        ("512kb", 512_000),
        ("1048576", 1 << 20),
        ("64B", 64),
        ("2Ti", 2 << 40),
    ],
)
def test_amounts_of_memory_are_read_exactly(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "12 XB", "0", "1iB", "nan", "1e99", "12GiB free"])
def test_what_is_no_amount_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bytes(text)


def test_bytes_are_shown_in_powers_of_1024() -> None:
    assert [format_bytes(n) for n in (512, 131072, 16 << 30, 3 << 40)] == ["512 B", "128.0 KiB", "16.0 GiB", "3.0 TiB"]
