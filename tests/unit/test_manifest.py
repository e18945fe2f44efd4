"""The manifest: what it says, what it leaves out, and that its digests speak of files and of choices apart."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.sealed import GRAPH, sealed_package

from phi4mm_export.errors import PackageError
from phi4mm_export.package.manifest import (
    FileEntry,
    Manifest,
    Reproducibility,
    Source,
    changed_manifest,
    library_versions,
    make_manifest,
    manifest_documents,
    recipe_json,
)
from phi4mm_export.package.manifest_quantized import Quantized, digest_of, quantized_manifest
from phi4mm_export.package.manifest_read import parse_manifest, read_manifest
from phi4mm_export.package.replace_graph import plan_copy
from phi4mm_export.package.write import WrittenFile
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.recipe import Recipe

DECODER_CHOICES = ("precision", "lora_precision", "rotate", "lora", "adapters", "full_logits")
ZERO, ONE = "0" * 64, "1" * 64


def _entry(name: str, sha256: str = ZERO, size: int = 3) -> FileEntry:
    return FileEntry(name=name, size=size, sha256=sha256)


def _manifest(*names: str, **parts: Any) -> Manifest:
    return make_manifest([_entry(name) for name in names or ("b.onnx", "a.json")], **parts)


def test_what_is_written_is_read_back_equal() -> None:
    manifest = _manifest(recipe={"bits": 4}, source=Source(model="owner/name", commit="a" * 40))
    assert parse_manifest(manifest_documents(manifest)["phi4mm.json"]) == manifest


def test_an_empty_file_can_be_listed() -> None:
    manifest = make_manifest([_entry("a", size=0)])
    assert parse_manifest(manifest_documents(manifest)["phi4mm.json"]).by_name["a"].size == 0


def test_files_are_sorted_and_the_package_digest_is_that_of_their_lines() -> None:
    manifest = _manifest("b.onnx", "a.json")
    lines = f"{ZERO} 3 a.json\n{ZERO} 3 b.onnx\n"
    assert [entry.name for entry in manifest.files] == ["a.json", "b.onnx"]
    assert manifest.package_digest == hashlib.sha256(lines.encode()).hexdigest()


def test_the_checksum_file_lists_everything_and_the_manifest_too() -> None:
    documents = manifest_documents(_manifest("a.json", "z.onnx"))
    own = hashlib.sha256(documents["phi4mm.json"]).hexdigest()
    assert documents["SHA256SUMS"].decode() == f"{ZERO}  a.json\n{own}  phi4mm.json\n{ZERO}  z.onnx\n"


def test_the_package_digest_follows_files_and_the_recipe_digest_choices() -> None:
    one = make_manifest([_entry("a")], recipe={"bits": 4})
    other_file = make_manifest([_entry("a", ONE)], recipe={"bits": 4})
    other_choice = make_manifest([_entry("a")], recipe={"bits": 8})
    assert (one.recipe_digest, one.package_digest != other_file.package_digest) == (other_file.recipe_digest, True)
    assert (one.package_digest, one.recipe_digest != other_choice.recipe_digest) == (other_choice.package_digest, True)


def test_the_recipe_digest_is_that_of_compact_json_with_sorted_keys_in_utf8() -> None:
    plain = _manifest(recipe={"z": "é", "a": [1]}, settings={"n": None})
    text = '{"adapters":[],"quantization":[],"recipe":{"a":[1],"z":"é"},"settings":{"n":null}}'
    assert plain.recipe_digest == hashlib.sha256(text.encode()).hexdigest()
    built = changed_manifest(plain, plain.files, build={"name": "int4-gptq"})
    text = text.replace('"quantization"', '"build":{"name":"int4-gptq"},"quantization"')
    assert built.recipe_digest == hashlib.sha256(text.encode()).hexdigest()


def test_a_number_that_json_lacks_is_no_choice() -> None:
    with pytest.raises(ValueError, match="JSON"):
        _manifest(recipe={"a": float("nan")})


@pytest.mark.parametrize(
    ("components", "absent"),
    [
        ((), set()),
        (("speech",), {*DECODER_CHOICES, "block_size", "accuracy_level", "embedding_precision"}),
        (("embedding",), {*DECODER_CHOICES, "encoder_precision"}),
        (("decoder", "vision"), {"embedding_precision"}),
    ],
)
def test_choices_about_graphs_that_are_not_exported_are_left_out(components: tuple[str, ...], absent: set[str]) -> None:
    whole = set(recipe_json(Recipe.resolve(), ()))
    recipe = Recipe.resolve(components=tuple(map(Component, components)))
    assert whole - set(recipe_json(recipe, ())) == absent


@pytest.mark.parametrize("part", ["settings", "recipe"])
def test_every_kind_of_choice_is_in_the_recipe_digest(part: str) -> None:
    assert _manifest(**{part: {"x": 1}}).recipe_digest != _manifest(**{part: {"x": 2}}).recipe_digest


def test_what_was_measured_is_not_in_the_recipe_digest_and_what_was_asked_is() -> None:
    asked = {"component": "vision", "bits": 4}
    plain = _manifest(quantization=(asked,))
    measured = _manifest(quantization=({**asked, "layers": {"gptq": 3}, "calibration": {"samples": 8}},))
    assert measured.recipe_digest == plain.recipe_digest
    assert _manifest(quantization=({**asked, "bits": 8},)).recipe_digest != plain.recipe_digest


def test_inputs_versions_and_tolerated_names_change_neither_digest() -> None:
    plain = _manifest()
    other = _manifest(source=Source(model="a/b"), libraries={"numpy": "1"}, tolerated=("*.txt",))
    assert (other.package_digest, other.recipe_digest) == (plain.package_digest, plain.recipe_digest)


def test_a_changed_manifest_keeps_what_is_not_given() -> None:
    old = _manifest(recipe={"a": 1}, tolerated=("x",), settings={"s": 1})
    new = changed_manifest(old, [_entry("c")], settings={"s": 2})
    assert (new.recipe, new.tolerated, new.settings) == ({"a": 1}, ("x",), {"s": 2})
    assert [entry.name for entry in new.files] == ["c"]
    assert new.package_digest != old.package_digest


def test_a_library_that_is_not_installed_is_left_out() -> None:
    assert set(library_versions(["numpy", "no-such-distribution"])) == {"numpy"}


@pytest.mark.parametrize(
    ("calibrated", "exact", "statistics", "wanted"),
    [
        (False, False, None, Reproducibility.EXACT),
        (True, False, None, Reproducibility.SAME_MACHINE),
        (True, True, None, Reproducibility.SAME_MACHINE),
        (True, False, ONE, Reproducibility.SAME_MACHINE),
        (True, True, ONE, Reproducibility.LOCKED),
    ],
)
def test_the_class_of_a_quantized_graph_says_what_its_bytes_depend_on(
    calibrated: bool, exact: bool, statistics: str | None, wanted: Reproducibility
) -> None:
    files = [WrittenFile(name, 1, ZERO) for name in ("v.onnx", "v.onnx.data", "genai_config.json")]
    done = Quantized("v.onnx", {"component": "vision"}, calibrated, exact, statistics)
    found = {entry.name: entry.reproducibility for entry in quantized_manifest(None, files, done).files}
    assert found == {"v.onnx": wanted, "v.onnx.data": wanted, "genai_config.json": Reproducibility.EXACT}


def test_a_second_quantization_of_a_component_replaces_its_entry_and_keeps_the_others() -> None:
    old = _manifest(quantization=({"component": "speech", "bits": 8}, {"component": "vision", "bits": 8}))
    done = Quantized("v.onnx", {"component": "vision", "bits": 4}, calibrated=False, exact=False)
    new = quantized_manifest(old, [WrittenFile("v.onnx", 1, ZERO)], done)
    assert [(entry["component"], entry["bits"]) for entry in new.quantization] == [("speech", 8), ("vision", 4)]


def test_files_that_were_taken_over_keep_their_class() -> None:
    old = make_manifest([FileEntry(name="s.onnx", size=1, sha256=ZERO, reproducibility=Reproducibility.SAME_MACHINE)])
    done = Quantized("v.onnx", {"component": "vision"}, calibrated=False, exact=False)
    new = quantized_manifest(old, [WrittenFile("v.onnx", 1, ZERO), WrittenFile("s.onnx", 1, ZERO)], done)
    assert new.by_name["s.onnx"].reproducibility is Reproducibility.SAME_MACHINE


def test_a_folder_has_the_digest_of_its_files_and_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(b"x")
    (tmp_path / "b").write_bytes(b"y")
    lines = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in (("b", b"y"), ("sub/a", b"x")))
    assert digest_of(tmp_path) == hashlib.sha256(lines.encode()).hexdigest()
    assert digest_of(tmp_path / "b") == hashlib.sha256(b"y").hexdigest()


# ------------------------------------------------------------------ reading what anybody may have written


def _body(**changes: Any) -> dict[str, Any]:
    return {**json.loads(manifest_documents(_manifest())["phi4mm.json"]), **changes}


def _refusal(body: Any) -> str:
    with pytest.raises(PackageError) as caught:
        parse_manifest(body if isinstance(body, bytes) else json.dumps(body).encode())
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "../a", "a/../../b", "/etc/passwd", "C:\\x", "C:x", "a\\b", "a//b", "./a", "a/", "", "a\0b", "a\nb", "nul",
        "COM1.txt", "a.", "a ", "e\u0301.json", "a/b/c/d/e/f/g/h/i", "x" * 256, "a\u202eb", "phi4mm.json", "SHA256SUMS",
        "PHI4MM.json",
    ],
)  # fmt: skip
def test_a_name_that_is_no_plain_file_of_the_package_is_refused(name: str) -> None:
    entry = {"name": name, "size": 3, "sha256": ZERO, "reproducibility": "exact"}
    assert "names cannot be used" in _refusal(_body(files=[entry]))


@pytest.mark.parametrize(
    ("first", "second"), [("a", "a"), ("a", "A"), ("straße", "STRASSE"), ("a", "a/b"), ("sub/X", "sub/x"), ("é", "É")]
)
def test_two_names_that_are_one_file_somewhere_are_refused(first: str, second: str) -> None:
    entries = [{"name": name, "size": 3, "sha256": ZERO, "reproducibility": "exact"} for name in (first, second)]
    message = _refusal(_body(files=entries))
    assert "listed twice" in message or "one file on some systems" in message


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"unknown": 1}, "unknown"),
        ({"files": {}}, "files"),
        ({"files": [{"name": "a", "size": "3", "sha256": ZERO, "reproducibility": "exact"}]}, "files[0].size"),
        ({"files": [{"name": "a", "size": -1, "sha256": ZERO, "reproducibility": "exact"}]}, "files[0].size"),
        ({"files": [{"name": "a", "size": 2**63, "sha256": ZERO, "reproducibility": "exact"}]}, "files[0].size"),
        ({"files": [{"name": "a", "size": 3.0, "sha256": ZERO, "reproducibility": "exact"}]}, "files[0].size"),
        ({"files": [{"name": "a", "size": True, "sha256": ZERO, "reproducibility": "exact"}]}, "files[0].size"),
        ({"files": [{"name": "a", "size": 3, "sha256": "F" * 64, "reproducibility": "exact"}]}, "files[0].sha256"),
        ({"files": [{"name": "a", "size": 3, "sha256": ZERO + "\n", "reproducibility": "exact"}]}, "files[0].sha256"),
        ({"files": [{"name": "a", "size": 3, "sha256": ZERO, "reproducibility": "sure"}]}, "files[0].reproducibility"),
        ({"files": [{"name": "a", "size": 3, "sha256": ZERO, "more": 1}]}, "files[0].more"),
        ({"source": {"commit": "main"}}, "source.commit"),
        ({"tolerated": [""]}, "tolerated[0]"),
        ({"tolerated": ["a"] * 101}, "tolerated"),
        ({"tool": {"name": "other", "version": "1"}}, "tool.name"),
        ({"schema_version": 0}, "schema_version"),
        ({"schema_version": True}, "schema_version"),
    ],
)  # fmt: skip
def test_a_value_that_breaks_the_schema_is_named_by_its_place(change: dict[str, Any], place: str) -> None:
    assert f"phi4mm.json: {place}" in _refusal(_body(**change))


def test_a_newer_schema_is_told_apart_from_a_broken_one() -> None:
    assert "install a newer phi4mm" in _refusal(_body(schema_version=2))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{", b"\xef\xbb\xbf{}", b'{"files": [], "files": []}', b'{"a": NaN}', b"[" * 200 + b"]" * 200,
        b'{"a": "\xff"}', b'{"a": 1e999}',
    ],
)  # fmt: skip
def test_text_that_is_no_strict_json_object_is_refused(data: bytes) -> None:
    assert "phi4mm.json" in _refusal(data)


def test_a_missing_manifest_says_what_would_judge_the_package_instead(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"has no phi4mm\.json.*phi4mm validate") as caught:
        read_manifest(tmp_path)
    assert caught.value.where == tmp_path.name


def test_a_linked_manifest_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(manifest_documents(_manifest())["phi4mm.json"])
    (tmp_path / "phi4mm.json").symlink_to("elsewhere")
    with pytest.raises(PackageError, match="found a link"):
        read_manifest(tmp_path)


def test_a_manifest_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "phi4mm.json").open("wb") as file:
        file.truncate(33 << 20)
    with pytest.raises(PackageError, match="expected at most"):
        read_manifest(tmp_path)


def test_names_that_no_manifest_could_hold_are_refused_when_it_is_made() -> None:
    with pytest.raises(PackageError, match="one file on some systems"):
        _manifest("A.json", "a.json")


# ------------------------------------------------------------------ packages from elsewhere


def test_what_downloads_and_systems_leave_is_not_taken_over_into_a_new_package(tmp_path: Path) -> None:
    package = sealed_package(tmp_path / "package")
    for name in (".DS_Store", "model.sig", ".gitattributes", ".cache/huggingface/x"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(b"x")
    assert plan_copy(package, GRAPH).copied == ("settings.json", "sub/twin.onnx", "template.jinja")


def test_a_name_that_no_manifest_may_hold_is_refused_before_any_work(tmp_path: Path) -> None:
    package = sealed_package(tmp_path / "package")
    (package / "a:b").write_bytes(b"x")
    with pytest.raises(PackageError, match="which other systems refuse"):
        plan_copy(package, GRAPH)


def test_a_manifest_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        _manifest().tolerated = ()  # type: ignore[misc]


@pytest.mark.parametrize(("length", "accepted"), [(1024, True), (1025, False)])
def test_texts_have_a_largest_length(length: int, accepted: bool) -> None:
    data = json.dumps(_body(libraries={"a": "x" * length})).encode()
    if accepted:
        assert parse_manifest(data).libraries["a"] == "x" * length
    else:
        assert "libraries.a" in _refusal(data)


def test_names_are_refused_with_their_count_and_the_first_three() -> None:
    entries = [{"name": f"../{n}", "size": 3, "sha256": ZERO, "reproducibility": "exact"} for n in range(5)]
    message = _refusal(_body(files=entries))
    assert "5 file names cannot be used: '../0': the path leaves the package, '../1'" in message
    assert message.count("leaves the package") == 3
    assert "and 2 more" in message


def test_two_names_that_collide_are_both_named() -> None:
    entries = [{"name": name, "size": 3, "sha256": ZERO, "reproducibility": "exact"} for name in ("x/A", "x/a")]
    assert "'x/A' and 'x/a' are one file on some systems" in _refusal(_body(files=entries))
