"""Whatever is changed in a package, `verify` finds it: bytes, names, links, additions, losses, exchanges.

scripts/verify_every_byte.py does the same for every single byte and prints the counts.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sealed import DATA, GRAPH, TWIN, seal, sealed_package

from phi4mm_export.checks.claims import FaultKind
from phi4mm_export.pipeline.verify import VerifyReport, verify

STEP = 5
"""Every 5th byte of each small file here, every byte in the script."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sealed_package(tmp_path_factory.mktemp("sealed") / "package")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return sealed_package(tmp_path / "package")


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _survivors(package: Path, name: str, offsets: range | list[int], change: Callable[[int], int]) -> list[int]:
    """Offsets at which a changed byte goes unnoticed, or is put down to another file."""
    path = package / name
    data = path.read_bytes()
    survivors = []
    try:
        for offset in offsets:
            changed = bytearray(data)
            changed[offset] = change(changed[offset])
            path.write_bytes(changed)
            if not any(name in (fault.name, *fault.what.split()) for fault in verify(package).faults):
                survivors.append(offset)
    finally:
        path.write_bytes(data)
    return survivors


NAMES = ["SHA256SUMS", GRAPH, "phi4mm.json", "settings.json", TWIN, "template.jinja"]


def test_the_package_is_sound_and_these_are_its_small_files(package: Path) -> None:
    assert verify(package).ok
    assert _files(package) == sorted([*NAMES, DATA])


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_in_any_small_file_is_found_and_named(package: Path, name: str) -> None:
    size = (package / name).stat().st_size
    assert _survivors(package, name, range(0, size, STEP), lambda byte: byte ^ 0x01) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_byte_set_to_a_blank_in_any_small_file_is_found(package: Path, name: str) -> None:
    data = (package / name).read_bytes()
    offsets = [offset for offset in range(3, len(data), STEP * 3) if data[offset] != 0x20]
    assert _survivors(package, name, offsets, lambda _byte: 0x20) == []


def test_random_bytes_of_a_data_file_are_found(package: Path) -> None:
    rng = random.Random(0)
    offsets = [rng.randrange(4096) for _ in range(100)]
    assert _survivors(package, DATA, offsets, lambda byte: byte ^ (1 << rng.randrange(8))) == []


def _kinds(report: VerifyReport) -> dict[str, FaultKind]:
    return {fault.name: fault.kind for fault in report.faults}


@pytest.mark.parametrize("name", [name for name in (*NAMES, DATA) if name != "phi4mm.json"])
def test_a_lost_file_is_missing_by_name(own: Path, name: str) -> None:
    (own / name).unlink()
    assert name in verify(own).names(FaultKind.MISSING)


@pytest.mark.parametrize("name", [".DS_Store", "sub/other.onnx.data", "new/deep/file", "Phi4mm.json", "graph.onnx "])
def test_an_added_file_is_extra_by_name(own: Path, name: str) -> None:
    (own / name).parent.mkdir(parents=True, exist_ok=True)
    (own / name).write_bytes(b"x")
    assert verify(own).names(FaultKind.EXTRA) == (name,)


def test_an_added_empty_folder_and_a_pipe_are_extra(own: Path) -> None:
    (own / "empty").mkdir()
    os.mkfifo(own / "pipe")
    assert verify(own).names(FaultKind.EXTRA) == ("empty", "pipe")


@pytest.mark.parametrize("name", [GRAPH, DATA, "settings.json"])
def test_a_renamed_file_is_missing_under_the_old_name_and_extra_under_the_new(own: Path, name: str) -> None:
    (own / name).rename(own / f"renamed-{name}")
    report = verify(own)
    assert report.names(FaultKind.MISSING) == (name,)
    assert report.names(FaultKind.EXTRA) == (f"renamed-{name}",)
    missing = next(fault for fault in report.faults if fault.kind is FaultKind.MISSING)
    assert (missing.found, missing.fix) == (f"'renamed-{name}', the same bytes", f"rename it to {name}")


@pytest.mark.parametrize("name", [GRAPH, "settings.json", TWIN])
def test_a_change_of_case_is_found(own: Path, name: str) -> None:
    (own / name).rename(own / name.upper().replace("SUB/", "sub/"))
    report = verify(own)
    assert report.names(FaultKind.MISSING) == (name,)
    assert len(report.names(FaultKind.EXTRA)) == 1


def test_a_name_in_the_other_unicode_form_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "caf\u00e9.json").write_bytes(b"{}")
    seal(folder)
    (folder / "caf\u00e9.json").rename(folder / "cafe\u0301.json")
    assert verify(folder).names(FaultKind.MISSING) == ("caf\u00e9.json",)


@pytest.mark.parametrize(("one", "two"), [(GRAPH, TWIN), ("settings.json", "template.jinja")])
def test_two_exchanged_files_are_both_named_and_each_said_to_hold_the_other(own: Path, one: str, two: str) -> None:
    first, second = (own / one).read_bytes(), (own / two).read_bytes()
    (own / one).write_bytes(second)
    (own / two).write_bytes(first)
    report = verify(own)
    assert set(report.names(FaultKind.CHANGED)) == {one, two}
    assert {fault.what for fault in report.faults if fault.kind is FaultKind.CHANGED} == {
        f"holds the content of {two}", f"holds the content of {one}",
    }  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, DATA])
def test_a_file_replaced_by_a_link_to_its_own_bytes_is_linked(own: Path, name: str) -> None:
    (own / name).rename(own.parent / "elsewhere")
    (own / name).symlink_to(own.parent / "elsewhere")
    assert name in verify(own).names(FaultKind.LINKED)


def test_a_link_within_the_package_is_linked_too(own: Path) -> None:
    (own / "copy").symlink_to("settings.json")
    assert verify(own).names(FaultKind.LINKED) == ("copy",)


def test_a_folder_replaced_by_a_link_is_named_with_the_files_behind_it(own: Path) -> None:
    (own / "sub").rename(own.parent / "sub")
    (own / "sub").symlink_to(own.parent / "sub")
    assert set(verify(own).names(FaultKind.LINKED)) == {"sub", TWIN}


def test_a_dangling_link_and_a_loop_do_not_stop_the_rest(own: Path) -> None:
    (own / "settings.json").unlink()
    (own / "settings.json").symlink_to("settings.json")
    (own / "gone").symlink_to("nowhere")
    (own / "template.jinja").write_text("other", encoding="utf-8")
    report = verify(own)
    assert set(report.names(FaultKind.LINKED)) == {"settings.json", "gone"}
    assert report.names(FaultKind.CHANGED) == ("template.jinja",)


def test_hard_links_change_nothing(own: Path) -> None:
    for name in _files(own):
        target = own.parent / "snapshot" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.hardlink_to(own / name)
    assert verify(own).ok


def test_a_file_that_became_a_folder_or_a_pipe_is_changed(own: Path) -> None:
    (own / "settings.json").unlink()
    (own / "settings.json").mkdir()
    (own / "settings.json" / "inner").write_bytes(b"")
    (own / "template.jinja").unlink()
    os.mkfifo(own / "template.jinja")
    kinds = _kinds(verify(own))
    assert kinds["template.jinja"] is FaultKind.CHANGED
    assert (kinds["settings.json"], kinds["settings.json/inner"]) == (FaultKind.MISSING, FaultKind.EXTRA)


@pytest.mark.parametrize("change", ["cut", "grown", "emptied", "huge"])
def test_another_length_is_found(own: Path, change: str) -> None:
    with (own / DATA).open("r+b") as file:
        file.truncate({"cut": 4095, "grown": 4097, "emptied": 0, "huge": 1 << 40}[change])
    assert DATA in verify(own).names(FaultKind.CHANGED)


def test_a_copy_of_the_whole_package_verifies(own: Path, tmp_path: Path) -> None:
    shutil.copytree(own, tmp_path / "copy")
    assert verify(tmp_path / "copy").ok
