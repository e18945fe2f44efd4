"""Folders, globs, lists and archives as sources of samples, and everything that can be wrong with them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from phi4mm_export.errors import UsageError
from phi4mm_export.runtime.calibration_sources import SampleKind, choose, find_files, holds_arrays

IMAGE = SampleKind.IMAGE


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"bytes of " + name.encode())
    return folder


def names_of(source: Path | str, kind: SampleKind = IMAGE) -> list[str]:
    return [Path(file.name).name for file in find_files(source, kind).files]


def write_zip(path: Path, *entries: str | zipfile.ZipInfo) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for entry in entries:
            archive.writestr(entry, b"bytes")
    return path


def test_a_folder_is_read_with_its_subfolders_in_the_order_of_the_names(tmp_path: Path) -> None:
    touch(tmp_path, "b.png", "a.JPG", "sub/c.webp")
    assert names_of(tmp_path) == ["a.JPG", "b.png", "c.webp"]


def test_files_of_other_kinds_are_passed_over_by_name_and_hidden_ones_in_silence(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "notes.txt", ".DS_Store", ".cache/b.png")
    found = find_files(tmp_path, IMAGE)
    assert [Path(file.name).name for file in found.files] == ["a.png"]
    assert found.ignored == ("notes.txt",)


def test_a_folder_without_a_sample_says_what_it_holds(tmp_path: Path) -> None:
    touch(tmp_path, "notes.txt")
    with pytest.raises(UsageError, match=r"expected picture files, found none \(1 others: notes.txt\)"):
        find_files(tmp_path, IMAGE)


def test_a_list_saved_on_windows_gives_its_files_in_its_order(tmp_path: Path) -> None:
    touch(tmp_path, "pages/page 2.png", "pages/page 1.png")
    lines = ["# pages", "pages/page 2.png  ", "", "pages\\page 1.png", "   # indented comment"]
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n")
    assert names_of(tmp_path / "list.txt") == ["page 2.png", "page 1.png"]


def test_a_list_in_utf_16_is_read_too(tmp_path: Path) -> None:
    touch(tmp_path, "ä.png")
    (tmp_path / "list.txt").write_bytes("ä.png\r\n".encode("utf-16"))
    assert names_of(tmp_path / "list.txt") == ["ä.png"]


def test_missing_files_of_a_list_are_named_with_list_line_and_path(tmp_path: Path) -> None:
    touch(tmp_path, "here.png")
    (tmp_path / "list.txt").write_text("here.png\n\ngone.png\nlost.png\n", encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        find_files(tmp_path / "list.txt", IMAGE)
    assert caught.value.where == str(tmp_path / "list.txt")
    assert "2 files that do not exist (line 3: gone.png, line 4: lost.png)" in caught.value.what


def test_an_empty_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("# nothing yet\n", encoding="utf-8")
    with pytest.raises(UsageError, match="expected picture files, found none"):
        find_files(tmp_path / "list.txt", IMAGE)


def test_a_list_that_is_no_text_is_refused_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"page\xff.png")
    with pytest.raises(UsageError, match=r"not UTF-8 text \(byte 4\)"):
        find_files(tmp_path / "list.txt", IMAGE)


def test_a_glob_is_sorted_and_reaches_into_subfolders(tmp_path: Path) -> None:
    touch(tmp_path, "b.png", "a.png", "sub/c.png", "d.txt")
    assert names_of(f"{tmp_path}/**/*.png") == ["a.png", "b.png", "c.png"]


def test_a_glob_without_a_match_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file matches the pattern"):
        find_files(f"{tmp_path}/*.png", IMAGE)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        find_files(tmp_path / "gone", IMAGE)


def test_a_single_file_is_a_source(tmp_path: Path) -> None:
    touch(tmp_path, "page.png")
    assert find_files(tmp_path / "page.png", IMAGE).files[0].read() == b"bytes of page.png"


def test_an_archive_is_read_in_the_order_of_its_names_without_the_litter_of_macos(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", "b.png", "a.png", "__MACOSX/a.png", ".hidden.png", "read.me")
    found = find_files(path, IMAGE)
    assert [file.name.rpartition(" ")[2] for file in found.files] == ["a.png", "b.png"]
    assert found.ignored == ("read.me",)
    assert found.files[0].read() == b"bytes"


@pytest.mark.parametrize(
    "name", ["../a.png", "/etc/a.png", "C:/a.png", "x/../../a.png", "..\\a.png", "\\\\host\\a.png"]
)
def test_an_archive_whose_names_lead_out_of_it_is_refused(tmp_path: Path, name: str) -> None:
    path = write_zip(tmp_path / "a.zip", zipfile.ZipInfo(name))
    with pytest.raises(UsageError, match="names that lead out of it"):
        find_files(path, IMAGE)


def test_an_archive_with_a_link_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("a.png")
    link.external_attr = 0o120777 << 16
    with pytest.raises(UsageError, match="links"):
        find_files(write_zip(tmp_path / "a.zip", link), IMAGE)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_with_one_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="more than once"):
        find_files(write_zip(tmp_path / "a.zip", "a.png", "a.png"), IMAGE)


def test_an_archive_that_promises_too_much_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", "a.png")
    data = bytearray(path.read_bytes())
    central = data.rindex(b"PK\x01\x02")
    data[central + 24 : central + 28] = (0xF0000000).to_bytes(4, "little")  # the size once unpacked
    path.write_bytes(data)
    with pytest.raises(UsageError, match="unpacks to 4,026,531,840 bytes"):
        find_files(path, IMAGE)


def test_an_entry_that_is_damaged_is_refused_by_its_name(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", "a.png")
    data = bytearray(path.read_bytes())
    data[data.index(b"bytes")] ^= 1
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"a.zip: a.png: the entry cannot be unpacked"):
        find_files(path, IMAGE).files[0].read()


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"not a zip")
    with pytest.raises(UsageError, match="not a readable zip archive"):
        find_files(tmp_path / "a.zip", IMAGE)


@pytest.mark.parametrize(
    ("names", "arrays"),
    [(("a.npz", "b.npz"), True), (("a.npz", "read.me"), True), (("a.npz", "b.png"), False), (("a.png",), False)],
)
def test_a_folder_of_npz_files_is_recognized(tmp_path: Path, names: tuple[str, ...], arrays: bool) -> None:
    assert holds_arrays(touch(tmp_path, *names)) is arrays


def test_a_choice_depends_on_seed_and_names_but_not_on_their_order() -> None:
    names = [f"page-{number}.png" for number in range(20)]
    chosen = {names[index] for index in choose(names, 5, seed=3)}
    backwards = names[::-1]
    assert {backwards[index] for index in choose(backwards, 5, seed=3)} == chosen
    assert {names[index] for index in choose(names, 5, seed=4)} != chosen
    assert choose(names, 5, seed=3) == sorted(choose(names, 5, seed=3))


def test_more_samples_than_there_are_means_all_of_them() -> None:
    assert choose(["a", "b"], 9, seed=0) == [0, 1]


def test_no_sample_at_all_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        choose(["a"], 0, seed=0)
