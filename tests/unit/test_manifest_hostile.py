"""Manifests, checksums and locks with random damage: only our own exceptions, and never a silent acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sealed import sealed_package

from phi4mm_export.errors import PackageError, UsageError
from phi4mm_export.package.file_names import folded, name_collision, name_fault
from phi4mm_export.package.lock_file import lock_bytes, lock_of, read_lock
from phi4mm_export.package.manifest import FileEntry, make_manifest, manifest_documents
from phi4mm_export.package.manifest_read import parse_manifest, read_manifest
from phi4mm_export.pipeline.verify import verify

BODY = manifest_documents(
    make_manifest([FileEntry(name=name, size=1, sha256="ab" * 32) for name in ("a.json", "b/c.onnx")], recipe={"x": 1})
)["phi4mm.json"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in items for place in _places(child, (*path, key)))]


def _read(data: bytes) -> Any:
    """What a manifest says after reading, None where it is refused by our own exception."""
    try:
        return json.loads(manifest_documents(parse_manifest(data))["phi4mm.json"])
    except PackageError:
        return None


def _holds(whole: Any, part: Any) -> bool:
    """Whether every value of `part` is in `whole`, objects compared by the keys that `part` has."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(key in whole and _holds(whole[key], value) for key, value in part.items())
    if isinstance(whole, list) and isinstance(part, list):
        return len(whole) == len(part) and all(map(_holds, whole, part))
    return bool(whole == part and type(whole) is type(part))


@given(st.integers(0, len(BODY) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_read_as_what_it_says(offset: int, change: int) -> None:
    data = bytearray(BODY)
    data[offset] ^= change
    read = _read(bytes(data))
    assert read is None or read != json.loads(BODY) or json.loads(data) == json.loads(BODY)


@given(st.data(), json_values)
def test_any_value_in_any_place_is_refused_or_kept_with_defaults_for_keys_that_are_not_there(
    data: st.DataObject, value: Any
) -> None:
    body = json.loads(BODY)
    *parents, last = data.draw(st.sampled_from([place for place in _places(body) if place]))
    target = body
    for step in parents:
        target = target[step]
    target[last] = value
    read = _read(json.dumps(body).encode())
    assert read is None or _holds(read, body)


@given(st.text(max_size=30))
def test_a_name_without_a_fault_stays_below_the_package_on_every_system(name: str) -> None:
    if not name_fault(name):
        for root in ("/package", "C:\\package"):
            separator = "\\" if "\\" in root else "/"
            parts = name.replace("/", separator).split(separator)
            assert not {"", ".", ".."} & set(parts)
        assert ":" not in name
        assert "\\" not in name
        assert name.isprintable()


@given(st.lists(st.sampled_from(["a", "A", "b", "b/c", "B/d", "é", "e\u0301", "ß", "ss"]), max_size=5))
def test_a_collision_is_two_names_that_fold_to_one_or_to_a_folder_of_the_other(names: list[str]) -> None:
    keys = [folded(name) for name in names]
    same = len(set(keys)) < len(keys)
    inside = any(other.startswith(f"{key}/") for key in keys for other in keys)
    assert (name_collision(names) is not None) is (same or inside)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sealed_package(tmp_path_factory.mktemp("sealed") / "package")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.sampled_from(["phi4mm.json", "SHA256SUMS"]), st.binary(max_size=60), st.floats(0, 1), st.floats(0, 1))
def test_pieces_of_rubbish_in_the_packages_own_files_are_always_found(
    package: Path, name: str, rubbish: bytes, start: float, length: float
) -> None:
    old = (package / name).read_bytes()
    at = int(start * len(old))
    new = old[:at] + rubbish + old[at + int(length * 100) :]
    (package / name).write_bytes(new)
    try:
        assert verify(package).ok is (new == old)
    finally:
        (package / name).write_bytes(old)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(data=st.data(), value=json_values)
def test_a_damaged_lock_is_refused_or_breaks_the_verification(
    package: Path, tmp_path: Path, data: st.DataObject, value: Any
) -> None:
    body = json.loads(lock_bytes(lock_of(read_manifest(package))))
    key = data.draw(st.sampled_from(sorted(body)))
    changed = body[key] != value or type(body[key]) is not type(value)
    body[key] = value
    (tmp_path / "a.lock").write_text(json.dumps(body), encoding="utf-8")
    refused = False
    try:
        read_lock(tmp_path / "a.lock")
    except UsageError:
        refused = True
    assert refused or verify(package, expect=tmp_path / "a.lock").ok is not changed
