"""Damaged files of every kind are read or refused in a sentence; scripts/fuzz.py does the same by the ten thousand."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzzing import KINDS, attempt, damaged

from phi4mm_export.checkpoint.header import read_header
from phi4mm_export.errors import CheckpointError, Phi4mmError
from phi4mm_export.spec.json_text import parse_json

COUNT = 120
ODD_NUMBERS = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**63, 2**64, 10**30]), st.floats(), st.booleans())
NAMES = st.one_of(st.sampled_from(["a", "b", "model.norm.weight", "../x", "", "__metadata__"]), st.text(max_size=8))
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "F16", "F64", "I8", "f32", "F8_E4M3"]), st.none()),
        "shape": st.one_of(st.lists(ODD_NUMBERS, max_size=4), st.text(max_size=3)),
        "data_offsets": st.lists(ODD_NUMBERS, max_size=3),
        "extra": st.integers(),
    },
)
HEADERS = st.dictionaries(
    NAMES, st.one_of(ENTRIES, ENTRIES, st.integers(), st.lists(st.none(), max_size=2)), max_size=4
)
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)
examples = settings(max_examples=150)


@pytest.mark.parametrize("name", list(KINDS))
def test_a_file_is_read_before_it_is_damaged_and_refused_in_a_sentence_after(tmp_path: Path, name: str) -> None:
    kind, rng = KINDS[name], random.Random(name)
    path = kind.prepare(tmp_path)
    valid = path.read_bytes()
    assert attempt(kind, path, valid)
    for _ in range(COUNT):
        attempt(kind, path, damaged(kind, valid, rng))


@examples
@given(header=HEADERS, body=st.integers(0, 48), shift=st.sampled_from([0, 0, 0, 1, -1, 2**62]))
def test_no_header_gets_past_its_reader_unless_its_tensors_fill_the_file(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], body: int, shift: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "grammar.safetensors"
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", max(0, len(text) + shift)) + text + bytes(body))
    try:
        tensors = read_header(path, path.name)
    except CheckpointError as err:
        tensors, sentence = (), str(err)
    else:
        sentence = path.name
    assert path.name in sentence
    assert all(tensor.name in header for tensor in tensors)


@examples
@given(value=JSON_VALUES, cut=st.integers(0, 12))
def test_json_is_read_as_it_was_written_or_refused(value: Any, cut: int) -> None:
    text = json.dumps(value)
    kept = text[: len(text) - cut] if cut else text
    try:
        found = parse_json(kept, "x.json")
    except Phi4mmError:
        return
    if not cut:
        assert found == value


def test_a_header_with_two_hundred_thousand_dimensions_takes_no_memory(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"F32","shape":[' + b"1," * 200_000 + b'1],"data_offsets":[0,4]}}'
    (tmp_path / "wide.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read_header(tmp_path / "wide.safetensors", "wide.safetensors")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
