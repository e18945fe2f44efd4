"""Folders that options name beside the output: judged before any work, in words that name the option."""

from __future__ import annotations

import os
from pathlib import Path

from phi4mm_export.errors import SystemLimitError, UsageError
from phi4mm_export.spec.on_disk import found_at, home_expanded, is_entry, is_folder

WORK_DIR = "--work-dir"


def check_folder(path: Path, option: str) -> Path:
    """The absolute path of a folder that can be written, or made where nothing stands yet; nothing is made here.

    Raises UsageError where something else stands in the way, SystemLimitError for a folder that cannot be written.
    """
    folder = home_expanded(path).absolute()
    nearest = next(each for each in (folder, *folder.parents) if is_entry(each))
    if not is_folder(nearest):
        raise UsageError(
            f"expected a folder, found {found_at(nearest)} at {nearest}",
            where=f"{option} {path}",
            fix="name another folder",
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise SystemLimitError(
            f"the folder {nearest} cannot be written",
            where=f"{option} {path}",
            fix="name another folder, or give permission to write there",
        )
    return folder


def made_folder(path: Path, option: str) -> Path:
    """As `check_folder`, and the folder stands there afterwards."""
    folder = check_folder(path, option)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_file_to_write(path: Path, option: str) -> None:
    """Raise for a file that cannot be written: UsageError for a folder of that name and for a missing or wrong parent,
    SystemLimitError for a parent that cannot be written."""
    file = home_expanded(path).absolute()
    if is_folder(file):
        raise UsageError("expected the name of a file, found a folder", where=f"{option} {path}", fix="name a file")
    if not is_folder(file.parent):
        raise UsageError(
            f"expected a folder to hold the file, found {found_at(file.parent)} at {file.parent}",
            where=f"{option} {path}",
            fix="create it first, or name another file",
        )
    check_folder(file.parent, option)
