"""One crafted safetensors file per fault: which file, what was expected and found, how to go on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from support import checkpoints as ck

from phi4mm_export.checkpoint.header import read_header
from phi4mm_export.errors import CheckpointError, ExitCode

NAME = "model.safetensors"
A = ck.Stored((2, 3))
Header = dict[str, Any]


def header_error(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_header(path, NAME)
    error = caught.value
    assert error.exit_code is ExitCode.CHECKPOINT
    assert error.where.startswith(NAME)
    assert error.fix
    assert "\n" not in str(error)
    return error


def entry(dtype: object = "BF16", shape: object = (2, 3), offsets: object = (0, 12), **extra: object) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}


def crafted(tmp_path: Path, header: Header | str, nbytes: int = 12) -> Path:
    """A file with this header and `nbytes` bytes of data."""
    path = tmp_path / NAME
    path.write_bytes(ck.file_head(header if isinstance(header, str) else json.dumps(header)) + bytes(nbytes))
    return path


def test_a_git_lfs_pointer_is_recognised_and_its_size_named(tmp_path: Path) -> None:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4997504848\n"
    (tmp_path / NAME).write_bytes(text)
    error = header_error(tmp_path / NAME)
    assert "Git LFS pointer" in error.what
    assert "4997504848" in error.what
    assert "git lfs pull" in error.fix


def test_a_pointer_without_a_size_is_still_a_pointer(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS pointer" in header_error(tmp_path / NAME).what


def test_a_web_page_in_place_of_a_shard_is_shown(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"<!DOCTYPE html><html><body>Login</body></html>")
    assert "<!DOCTYP" in header_error(tmp_path / NAME).what


@pytest.mark.parametrize("keep", [1, 100, 4096])
def test_a_file_cut_short_is_named_with_expected_and_found_size(tmp_path: Path, keep: int) -> None:
    path = tmp_path / NAME
    ck.write_safetensors(path, {"m.a": ck.Stored((64, 64), "F32"), "m.b": ck.Stored((64, 64), "F32")})
    size = path.stat().st_size
    os.truncate(path, size - keep)
    error = header_error(path)
    assert "cut short" in error.what
    assert str(size) in error.what
    assert str(size - keep) in error.what


def test_a_file_cut_inside_its_header_is_named_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / NAME
    ck.write_safetensors(path, {"m.a": A})
    os.truncate(path, 40)
    assert "found 40 bytes" in header_error(path).what


@pytest.mark.parametrize("nbytes", [0, 1, 7])
def test_a_file_shorter_than_a_header_length_is_named_with_its_size(tmp_path: Path, nbytes: int) -> None:
    (tmp_path / NAME).write_bytes(bytes(nbytes))
    assert f"the file has {nbytes} bytes, expected at least 8" in header_error(tmp_path / NAME).what


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001])
def test_an_impossible_header_length_is_refused_before_memory_is_taken(tmp_path: Path, length: int) -> None:
    (tmp_path / NAME).write_bytes(struct.pack("<Q", length) + b"{}")
    assert str(length) in header_error(tmp_path / NAME).what


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    assert "bytes after the last tensor" in header_error(crafted(tmp_path, {"m.a": entry()}, 13)).what


def test_a_gap_between_two_tensors_names_the_second(tmp_path: Path) -> None:
    path = crafted(tmp_path, {"m.a": entry(), "m.b": entry(offsets=(14, 26))}, 26)
    error = header_error(path)
    assert error.where == f"{NAME}: m.b"
    assert "leaves a gap" in error.what


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    path = crafted(tmp_path, {"m.a": entry(), "m.b": entry(offsets=(6, 18))}, 18)
    assert "overlaps" in header_error(path).what


def test_two_names_for_the_same_bytes_are_refused(tmp_path: Path) -> None:
    assert "overlaps" in header_error(crafted(tmp_path, {"m.a": entry(), "m.b": entry()})).what


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry())
    error = header_error(crafted(tmp_path, f'{{"m.a": {one}, "m.a": {one}}}'))
    assert "'m.a' occurs more than once" in error.what


def test_a_key_that_occurs_twice_inside_an_entry_is_refused(tmp_path: Path) -> None:
    text = '{"m.a": {"dtype": "BF16", "shape": [2, 3], "shape": [3, 2], "data_offsets": [0, 12]}}'
    assert "'shape' occurs more than once" in header_error(crafted(tmp_path, text)).what


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../w", "a/b", "a\\b", "C:w", ".", "..", "a..b", ".a", "a.", "a b", "a\nb", "a\u0000b"]
)
def test_a_name_that_is_empty_or_looks_like_a_path_is_refused(tmp_path: Path, name: str) -> None:
    assert "dotted words" in header_error(crafted(tmp_path, {name: entry()})).what


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_an_empty_tensor_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = crafted(tmp_path, {"m.a": entry(shape=shape, offsets=(0, 0)), "m.b": entry()})
    error = header_error(path)
    assert error.where == f'{NAME}: "m.a"'
    assert "empty" in error.what


@pytest.mark.parametrize("dtype", ["I8", "U8", "I64", "F64", "BOOL", "F8_E4M3", "F4", "bf16", "", None, 16])
def test_an_element_type_other_than_bf16_f16_f32_is_refused_by_name(tmp_path: Path, dtype: object) -> None:
    error = header_error(crafted(tmp_path, {"m.a": entry(dtype=dtype)}))
    assert json.dumps(dtype) in error.what
    assert "BF16, F16, F32" in error.what


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (entry(shape=(2, 4)), "needs 16 bytes, data_offsets give 12"),
        (entry(offsets=(12, 0)), "needs 12 bytes"),
        (entry(shape=(2**62, 2**62)), "needs "),
        (entry(shape=(-2, -3)), "shape must be"),
        (entry(shape=(2.0, 3)), "shape must be"),
        (entry(shape=(True, 6)), "shape must be"),
        (entry(shape="23"), "shape must be"),
        (entry(shape=(1,) * 9), "shape must be"),
        (entry(offsets=(0, 12, 24)), "data_offsets must be"),
        (entry(offsets=(-12, 0)), "data_offsets must be"),
        (entry(offsets=None), "data_offsets must be"),
        (entry(extra=1), "expected dtype, shape and data_offsets"),
        ({"dtype": "BF16"}, "expected dtype, shape and data_offsets"),
        ([1, 2], "expected dtype, shape and data_offsets"),
        (None, "expected dtype, shape and data_offsets"),
    ],
)
def test_a_malformed_entry_names_the_tensor(tmp_path: Path, broken: object, expected: str) -> None:
    error = header_error(crafted(tmp_path, {"m.a": broken}))
    assert error.where == f'{NAME}: "m.a"'
    assert expected in error.what


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"m.a": NaN}', '{"m.a": 1e999}', "\ufeff{}", "[" * 100_000, "9" * 5000]
)
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    assert NAME in str(header_error(crafted(tmp_path, text)))


def test_a_header_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(ck.file_head(b'{"m\xff": {}}'))
    assert "not UTF-8" in header_error(tmp_path / NAME).what


@pytest.mark.parametrize("metadata", [[], {"format": 1}, "pt"])
def test_metadata_other_than_text_is_refused(tmp_path: Path, metadata: object) -> None:
    assert "__metadata__" in header_error(crafted(tmp_path, {"__metadata__": metadata, "m.a": entry()})).what


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    assert "no tensor" in header_error(crafted(tmp_path, {"__metadata__": {"format": "pt"}}, 0)).what


def test_a_folder_in_place_of_a_shard_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    assert "found a folder" in header_error(tmp_path / NAME).what


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_a_shard_is_refused_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    assert "pipe" in header_error(tmp_path / NAME).what


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs device files")
def test_a_link_to_a_device_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / NAME).symlink_to("/dev/zero")
    assert "device" in header_error(tmp_path / NAME).what


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
@pytest.mark.parametrize("target", ["gone", NAME])
def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / NAME).symlink_to(target)
    assert NAME in str(header_error(tmp_path / NAME))


def damage(data: bytearray, head: int, random_bits: random.Random) -> None:
    """Change one to three bytes of the header region."""
    for _ in range(random_bits.randint(1, 3)):
        place = random_bits.randrange(head)
        data[place] = random_bits.choice((0, 255, (data[place] + 1) % 256, data[place] ^ 4))


def test_a_thousand_damaged_headers_give_a_sentence_or_the_same_extents(tmp_path: Path) -> None:
    path = tmp_path / NAME
    ck.write_safetensors(path, {"m.a": A, "m.layers.0.b": ck.Stored((4,), "F32"), "m.c": ck.Stored((2, 2), "F16")})
    whole = path.read_bytes()
    head = len(whole) - 36
    random_bits = random.Random(4)
    refused = 0
    for _ in range(1000):
        data = bytearray(whole)
        damage(data, head, random_bits)
        path.write_bytes(data)
        with contextlib.suppress(CheckpointError):
            tensors = read_header(path, NAME)
            assert [(t.offset - head, t.shape) for t in tensors] == [(0, (2, 3)), (12, (4,)), (28, (2, 2))]
            continue
        refused += 1
    assert refused > 750
