"""What really lies in a folder: every entry once, no link followed, names as the file system spells them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from phi4mm_export.errors import PackageError
from phi4mm_export.package.file_names import is_left_over
from phi4mm_export.spec.on_disk import is_file

MOST_ENTRIES = 200_000
"""No package comes near; a folder with more is not walked to its end."""


class EntryKind(StrEnum):
    """What an entry is by itself."""

    FILE = "file"
    LINK = "link"
    EMPTY_FOLDER = "empty folder"
    OTHER = "pipe, device or socket"


@dataclass(frozen=True)
class Entry:
    """One entry. `name` is relative to the folder, with `/`; `target` is what a link says."""

    name: str
    kind: EntryKind
    nbytes: int = 0
    target: str = ""


def scan(folder: Path) -> dict[str, Entry]:
    """Every file, link, special file and empty folder below, by name and sorted.

    Raises PackageError for more than `MOST_ENTRIES`, OSError for a folder that cannot be listed.
    """
    found: dict[str, Entry] = {}
    for entry in _walk(folder, ""):
        found[entry.name] = entry
        if len(found) > MOST_ENTRIES:
            raise PackageError(
                f"expected the files of a package, found more than {MOST_ENTRIES:,} entries",
                where=folder.name,
                fix="name the folder of one package",
            )
    return dict(sorted(found.items()))


def package_files(folder: Path) -> dict[str, int]:
    """Name and bytes of every file that belongs to the package in a folder, by name; its manifest is one of them.

    Left out is what downloads, clones, signing and operating systems leave. A link counts as the file it leads to.
    Raises as `scan`.
    """
    names = [entry.name for entry in scan(folder).values() if entry.kind in (EntryKind.FILE, EntryKind.LINK)]
    return {name: (folder / name).stat().st_size for name in names if not is_left_over(name) and is_file(folder / name)}


def _walk(folder: Path, prefix: str) -> Iterator[Entry]:
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    if not entries and prefix:
        yield Entry(prefix.removesuffix("/"), EntryKind.EMPTY_FOLDER)
    for entry in entries:
        name = prefix + entry.name
        if entry.is_symlink() or _is_junction(entry):
            yield Entry(name, EntryKind.LINK, target=_target(entry))
        elif entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name, f"{name}/")
        elif entry.is_file(follow_symlinks=False):
            yield Entry(name, EntryKind.FILE, entry.stat(follow_symlinks=False).st_size)
        else:
            yield Entry(name, EntryKind.OTHER)


def _is_junction(entry: os.DirEntry[str]) -> bool:
    """Windows: a folder that stands for another one (DirEntry.is_junction, Python 3.12)."""
    check = getattr(entry, "is_junction", None)
    return bool(check()) if check is not None else False


def _target(entry: os.DirEntry[str]) -> str:
    try:
        return os.readlink(entry.path)  # noqa: PTH115 - a DirEntry has the path at hand
    except OSError:
        return ""
