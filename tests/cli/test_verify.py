"""`phi4mm verify` as it is typed: what it says, its exit codes, locks and signatures."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.packages import edit_json
from support.sealed import DATA, GRAPH, external, seal, sealed_package
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.package.manifest import InputEntry, Source


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return sealed_package(tmp_path / "package")


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def _faults(*arguments: object) -> list[dict[str, Any]]:
    result = _run(*arguments, "--json")
    assert result.exit_code == 4, result.output
    return list(json.loads(result.stdout)["faults"])


def test_a_sound_package_exits_0_with_counts_and_digest(package: Path) -> None:
    result = _run(package)
    assert result.exit_code == 0
    assert result.stdout.startswith("ok: 7 files with phi4mm.json and SHA256SUMS, ")
    assert "package digest " in result.stdout


def test_quiet_says_nothing_about_a_sound_package_and_all_about_another(package: Path) -> None:
    assert _run(package, "--quiet").stdout == ""
    (package / "extra").write_bytes(b"")
    assert "extra extra" in _run(package, "-q").stdout


def test_one_run_names_what_changed_what_is_missing_and_what_is_extra(package: Path) -> None:
    data = bytearray((package / DATA).read_bytes())
    data[100] ^= 0x10
    (package / DATA).write_bytes(data)
    (package / "settings.json").unlink()
    (package / ".DS_Store").write_bytes(b"\0")
    result = _run(package)
    assert result.exit_code == 4
    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")][:3] == [
        f"changed {DATA}", "missing settings.json", "extra .DS_Store: not listed in the manifest",
    ]  # fmt: skip
    assert any(line.startswith("    expected: sha256 ") for line in lines)
    assert any(line.startswith("    found: sha256 ") for line in lines)
    assert lines[-1].startswith("not ok, 3 faults: ")


def test_json_is_one_document_with_a_fixed_order(package: Path) -> None:
    document = json.loads(_run(package, "--json").stdout)
    assert list(document) == [
        "package", "ok", "package_digest", "recipe_digest", "files", "bytes", "lock", "signed", "written",
        "faults", "tolerated",
    ]  # fmt: skip
    assert document["ok"] is True


def test_a_package_without_a_manifest_is_exit_4_and_says_so(package: Path) -> None:
    (package / "phi4mm.json").unlink()
    result = _run(package)
    assert result.exit_code == 4
    assert "has no phi4mm.json" in result.stderr


def test_a_path_that_is_no_folder_is_exit_2(package: Path) -> None:
    assert _run(package / "settings.json").exit_code == 2
    assert _run(package / "nothing").exit_code == 2


@pytest.mark.subprocess
def test_it_writes_nothing_and_loads_neither_onnxruntime_nor_torch(package: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in package.rglob("*")}
    script = (
        "import sys; from phi4mm_export.pipeline.verify import verify; "
        f"assert verify({str(package)!r}).ok; print(sorted({{'onnxruntime', 'torch'}} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert {path: path.stat().st_mtime_ns for path in package.rglob("*")} == before


# ------------------------------------------------------------------ an edited manifest


def test_a_manifest_edited_to_fit_a_changed_file_disagrees_with_its_checksums(package: Path) -> None:
    (package / "settings.json").write_text("{}", encoding="utf-8")
    sums = (package / "SHA256SUMS").read_bytes()
    seal(package)
    (package / "SHA256SUMS").write_bytes(sums)
    kinds = {(fault["kind"], fault["name"]) for fault in _faults(package)}
    assert ("manifest", "phi4mm.json") in kinds
    assert ("manifest", "SHA256SUMS") in kinds


def test_an_entry_removed_by_hand_is_found_in_three_ways(package: Path) -> None:
    edit_json(package / "phi4mm.json", lambda m: m["files"].pop())
    found = _faults(package)
    assert {fault["kind"] for fault in found} == {"manifest", "extra"}
    assert any("package_digest is not that of its entries" in fault["what"] for fault in found)


def test_choices_edited_by_hand_no_longer_have_the_recipe_digest(package: Path) -> None:
    edit_json(package / "phi4mm.json", lambda m: m.update(recipe={"bits": 2}))
    assert any("recipe_digest is not that of its entries" in fault["what"] for fault in _faults(package))


def test_a_manifest_that_cannot_be_read_leaves_the_checksums_to_go_by(package: Path) -> None:
    (package / "phi4mm.json").write_bytes(b"{")
    (package / "settings.json").write_bytes(b"{}")
    kinds = [(fault["kind"], fault["name"]) for fault in _faults(package)]
    assert ("manifest", "phi4mm.json") in kinds
    assert ("changed", "settings.json") in kinds


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd"])
def test_a_file_outside_the_package_is_refused_and_never_read(package: Path, name: str) -> None:
    (package.parent / "outside").write_bytes(b"secret")
    edit_json(package / "phi4mm.json", lambda m: m["files"][0].update(name=name))
    (package / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n", encoding="utf-8")
    result = _run(package)
    assert result.exit_code == 4
    assert "cannot be used" in result.stdout
    assert "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b" not in result.stdout


def test_checksums_of_another_form_are_named_by_line(package: Path) -> None:
    with (package / "SHA256SUMS").open("a", encoding="utf-8") as file:
        file.write("# a remark\n")
    assert any("line 7 has another form" in fault["what"] for fault in _faults(package))


# ------------------------------------------------------------------ tolerated extras


def test_what_downloads_leave_is_tolerated_and_said(package: Path) -> None:
    (package / ".cache" / "huggingface").mkdir(parents=True)
    (package / ".cache" / "huggingface" / "lock").write_bytes(b"")
    result = _run(package)
    assert result.exit_code == 0
    assert "tolerated: .cache/huggingface/lock" in result.stdout


def test_which_extras_are_tolerated_is_recorded_with_the_package(package: Path) -> None:
    seal(package, tolerated=("notes/*",))
    (package / "notes").mkdir()
    (package / "notes" / "a.txt").write_bytes(b"x")
    assert _run(package).exit_code == 0
    (package / ".gitattributes").write_bytes(b"x")
    assert [fault["name"] for fault in _faults(package)] == [".gitattributes"]


def test_a_link_is_never_tolerated(package: Path) -> None:
    (package / ".gitattributes").symlink_to("/etc/passwd")
    assert [fault["kind"] for fault in _faults(package)] == ["linked"]


def test_a_name_that_is_no_text_is_shown_escaped(package: Path) -> None:
    Path(os.fsdecode(os.fsencode(package) + b"/\xff\n")).write_bytes(b"")
    assert [fault["name"] for fault in _faults(package)] == ["\\udcff\\n"]


# ------------------------------------------------------------------ external data


def _edit(package: Path, *weights: onnx.TensorProto) -> None:
    model = onnx.load(package / GRAPH, load_external_data=False)
    del model.graph.initializer[:]
    model.graph.initializer.extend(weights)
    onnx.save(model, package / GRAPH)
    seal(package)


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ([external("w0", 0, 1024, "../other.data")], "leaves the folder"),
        ([external("w0", 0, 2048), external("w1", 1024, 3072)], "overlap"),
        ([external("w0", 0, 4096), external("w1", 4096, 64)], "past the end"),
        ([external("w0", 0, 1024)], "3,072 orphaned bytes"),
    ],
)
def test_external_data_that_lies_is_found_though_every_digest_fits(
    package: Path, weights: list[onnx.TensorProto], what: str
) -> None:
    _edit(package, *weights)
    found = _faults(package)
    assert {fault["kind"] for fault in found} == {"external data"}
    assert any(what in fault["what"] for fault in found)


def test_bytes_that_two_graphs_share_are_legal(package: Path) -> None:
    _edit(package, external("w0", 0, 4096), external("w1", 0, 4096))
    assert _run(package).exit_code == 0


# ------------------------------------------------------------------ locks


def test_a_lock_written_from_a_package_is_fulfilled_by_it(package: Path, tmp_path: Path) -> None:
    lock = tmp_path / "phi4mm.lock"
    written = _run(package, "--write-lock", lock)
    assert (written.exit_code, written.stdout.splitlines()[-1]) == (0, f"wrote {lock}")
    result = _run(package, "--expect", lock)
    assert result.exit_code == 0
    assert "lock phi4mm.lock" in result.stdout


def test_a_package_sealed_anew_after_a_change_breaks_the_lock_by_file(package: Path, tmp_path: Path) -> None:
    lock = tmp_path / "phi4mm.lock"
    _run(package, "--write-lock", lock)
    (package / "settings.json").write_text("{}", encoding="utf-8")
    seal(package)
    assert _run(package).exit_code == 0
    found = _faults(package, "--expect", lock)
    assert [(fault["kind"], fault["name"]) for fault in found] == [("lock", "settings.json")]
    assert "class exact" in found[0]["what"]


def test_other_choices_inputs_and_calibration_break_the_lock_each_by_name(package: Path, tmp_path: Path) -> None:
    lock, digest = tmp_path / "phi4mm.lock", "ab" * 32
    seal(
        package,
        recipe={"bits": 4},
        source=Source(files=(InputEntry(name="config.json", size=1, sha256=digest),)),
        quantization=({"component": "vision", "calibration": {"sha256": [digest]}, "statistics": digest},),
    )
    _run(package, "--write-lock", lock)
    seal(
        package,
        recipe={"bits": 8},
        source=Source(files=(InputEntry(name="config.json", size=1, sha256="cd" * 32),)),
        quantization=({"component": "vision", "calibration": {"sha256": []}, "statistics": digest},),
    )
    what = [fault["what"] for fault in _faults(package, "--expect", lock)]
    assert what == [
        "recipe_digest is not the lock's", "the input is not the lock's", "the calibration of vision is not the lock's",
    ]  # fmt: skip


def test_no_lock_is_written_for_a_package_with_a_fault(package: Path, tmp_path: Path) -> None:
    (package / "extra").write_bytes(b"")
    result = _run(package, "--write-lock", tmp_path / "phi4mm.lock")
    assert result.exit_code == 4
    assert "phi4mm.lock was not written: the package has faults" in result.stderr
    assert not (tmp_path / "phi4mm.lock").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"lock_version": 2}', '{"lock_version": 1, "more": 1}'])
def test_a_file_that_is_no_lock_is_exit_2(package: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.lock").write_text(text, encoding="utf-8")
    result = _run(package, "--expect", tmp_path / "bad.lock")
    assert result.exit_code == 2
    assert "bad.lock" in result.stderr


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("folder", "expected the name of a file, found a folder"),
        ("nowhere/lock", "expected a folder to hold the file, found nothing"),
        ("file/lock", "expected a folder to hold the file, found a file"),
    ],
)
def test_a_lock_that_cannot_be_written_is_refused_before_a_file_is_hashed(
    package: Path, tmp_path: Path, place: str, sentence: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    (package / "phi4mm.json").write_text("no manifest")
    result = _run(package, "--write-lock", tmp_path / place)
    assert result.exit_code == 2
    assert sentence in result.stderr


# ------------------------------------------------------------------ signatures

HAS_SIGNING = importlib.util.find_spec("model_signing") is not None
needs_signing = pytest.mark.skipif(not HAS_SIGNING, reason="model-signing is not installed (extra `sign`)")


def test_a_signature_needs_the_key_it_is_checked_with(package: Path, tmp_path: Path) -> None:
    result = _run(package, "--signature", tmp_path / "x.sig")
    assert result.exit_code == 2
    assert "--public-key" in result.stderr


@pytest.mark.skipif(HAS_SIGNING, reason="model-signing is installed")
@pytest.mark.parametrize("options", [("--sign", "key.pem"), ("--signature", "a.sig", "--public-key", "key.pem")])
def test_without_the_library_signing_is_exit_6_with_the_line_that_installs_it(
    package: Path, options: tuple[str, ...]
) -> None:
    result = _run(package, *options)
    assert result.exit_code == 6
    assert 'pip install "phi4mm[sign]"' in result.stderr


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A local key pair: private, public."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@needs_signing
@pytest.mark.parametrize("inside", [True, False])
def test_a_signed_package_verifies_and_a_changed_or_resealed_one_does_not(
    package: Path, tmp_path: Path, keys: tuple[Path, Path], inside: bool
) -> None:
    signature = package / "model.sig" if inside else tmp_path / "package.sig"
    assert _run(package, "--sign", keys[0], "--signature", signature).exit_code == 0
    result = _run(package, "--signature", signature, "--public-key", keys[1])
    assert result.exit_code == 0, result.output
    assert ", signature" in result.stdout
    (package / "settings.json").write_text("{}", encoding="utf-8")
    held = shutil.move(signature, tmp_path / "held")
    seal(package)
    shutil.move(held, signature)
    assert [f["kind"] for f in _faults(package, "--signature", signature, "--public-key", keys[1])] == ["signature"]


@needs_signing
def test_a_signature_by_another_key_or_no_signature_at_all_is_a_fault(
    package: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    assert _run(package, "--sign", keys[0]).exit_code == 0
    signature = tmp_path / "package.sig"
    (tmp_path / "garbage.sig").write_text("{}", encoding="utf-8")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    (tmp_path / "other.pub").write_bytes(
        other.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    for file, key in ((signature, tmp_path / "other.pub"), (tmp_path / "garbage.sig", keys[1])):
        assert [fault["kind"] for fault in _faults(package, "--signature", file, "--public-key", key)] == ["signature"]


@needs_signing
def test_a_package_with_a_fault_is_not_signed(package: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    (package / "extra").write_bytes(b"")
    assert _run(package, "--sign", keys[0]).exit_code == 4
    assert not (tmp_path / "package.sig").exists()


@needs_signing
def test_a_file_that_is_no_key_is_exit_2(package: Path, tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("nothing", encoding="utf-8")
    assert _run(package, "--sign", tmp_path / "no.pem").exit_code == 2
