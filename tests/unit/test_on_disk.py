"""What stands under a path, and that the whole tool asks it in this one way."""

from __future__ import annotations

import ast
import errno
import os
from pathlib import Path

import pytest

import phi4mm_export
from phi4mm_export.errors import SystemLimitError
from phi4mm_export.spec.on_disk import (
    exists,
    found_at,
    home_expanded,
    is_entry,
    is_file,
    is_folder,
    is_inside_name,
    is_link,
    real_path,
    status,
)

QUESTIONS = (exists, is_entry, is_file, is_folder, is_link)
ASKED_ELSEWHERE = {"exists", "is_file", "is_dir", "is_symlink", "expanduser", "resolve"}
"""Methods of pathlib that raise for some names."""
NO_PATHS = ("entry", "Recipe")
"""Entries of folders and archives, and a class, have methods of these names too."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file, a folder, a link to each, a link to nothing, and one to itself."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder", "nothing", "to loop"):
        (tmp_path / f"to {name}").symlink_to(name)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "answers", "found"),
    [
        ("file", (True, True, True, False, False), "a file"),
        ("folder", (True, True, False, True, False), "a folder"),
        ("to file", (True, True, True, False, True), "a file"),
        ("to folder", (True, True, False, True, True), "a folder"),
        ("to nothing", (False, True, False, False, True), "a link to nothing"),
        ("to to loop", (False, True, False, False, True), "a link to nothing"),
        ("absent", (False,) * 5, "nothing"),
        ("file/below", (False,) * 5, "nothing"),
        ("x" * 300, (False,) * 5, "nothing"),
        ("/".join(["d" * 200] * 30), (False,) * 5, "nothing"),
        ("a\0b", (False,) * 5, "nothing"),
        ("\ud800", (False,) * 5, "nothing"),
    ],
)
def test_every_question_has_an_answer_for_every_name(
    folder: Path, name: str, answers: tuple[bool, ...], found: str
) -> None:
    assert tuple(ask(folder / name) for ask in QUESTIONS) == answers
    assert found_at(folder / name) == found


def test_a_pipe_is_there_and_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert tuple(ask(tmp_path / "pipe") for ask in QUESTIONS) == (True, True, False, False, False)
    assert found_at(tmp_path / "pipe") == "a pipe, socket or device"


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (errno.EACCES, "it may not be looked at; give permission to read the folders above it"),
        (errno.EIO, "it cannot be looked at: Input/output error; check the disk"),
    ],
)
def test_a_system_that_refuses_to_answer_is_an_error_with_the_path(
    monkeypatch: pytest.MonkeyPatch, code: int, sentence: str
) -> None:
    def refuse(*_args: object, **_options: object) -> os.stat_result:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(SystemLimitError) as caught:
        exists(Path("model"))
    assert str(caught.value) == f"model: {sentence}"


def test_what_a_link_leads_to_has_the_status_of_the_file_unless_the_link_is_meant(folder: Path) -> None:
    followed, itself = status(folder / "to file"), status(folder / "to file", follow=False)
    assert followed is not None
    assert itself is not None
    assert followed.st_ino == (folder / "file").stat().st_ino != itself.st_ino


def test_links_are_followed_to_their_end_and_loops_and_odd_names_stay(folder: Path) -> None:
    assert real_path(folder / "to folder" / "x") == real_path(folder) / "folder" / "x"
    assert real_path(folder / "to to loop").name == "to loop"
    assert real_path(folder / "a\0b") == folder / "a\0b"


def test_the_home_of_a_user_that_does_not_exist_stays_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert home_expanded("~/model") == Path("/home/someone/model")
    assert home_expanded("~no-such-user/model") == Path("~no-such-user/model")


@pytest.mark.parametrize("name", ["a", "a/b.onnx", "..a", "a..b", "a\\b"])
def test_a_name_without_a_way_out_is_inside(name: str) -> None:
    assert is_inside_name(name)


@pytest.mark.parametrize("name", ["", "..", "a/../b", "/a", "\\a", "C:a", "C:\\a", "\\\\host\\share", "..\\a", "a\0"])
def test_a_name_that_leads_out_on_any_system_is_not_inside(name: str) -> None:
    assert not is_inside_name(name)


def test_no_module_asks_the_file_system_in_another_way() -> None:
    root = Path(phi4mm_export.__file__).parent
    asked = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or node.args or node.keywords or not isinstance(node.func, ast.Attribute):
                continue
            asks = node.func.attr in ASKED_ELSEWHERE and ast.unparse(node.func.value) not in NO_PATHS
            if asks and path.name != "on_disk.py":
                asked.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    assert not asked, "\n".join(asked)
