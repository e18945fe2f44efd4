"""Which names a package's files may have: one file on Linux, macOS and Windows alike, never one outside the folder."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

MOST_PARTS = 8
"""Deepest path; our layouts use two parts."""
MOST_PART_NBYTES = 255
"""Longest part of a path that common file systems take."""
LEFT_OVERS = (".cache/huggingface/*", ".git/*", ".gitattributes", "model.sig")
"""What downloads, clones and signing leave in a package: patterns, `*` also matches `/`."""
_FORBIDDEN = frozenset('<>:"|?*\\')
_DEVICES = frozenset({"con", "prn", "aux", "nul", *(f"{kind}{n}" for kind in ("com", "lpt") for n in range(10))})
"""Names that Windows gives to devices, whatever their extension. Source: Microsoft, Naming Files, Paths, Namespaces."""


def name_fault(name: str) -> str:
    """Why a relative path, parts joined by `/`, cannot name a file of a package; empty if it can."""
    if not name:
        return "the name is empty"
    if name.startswith("/") or PurePosixPath(name).is_absolute():
        return "the path is absolute"
    parts = name.split("/")
    if ".." in parts:
        return "the path leaves the package"
    if any(part in ("", ".") for part in parts):
        return "the path has an empty part"
    if len(parts) > MOST_PARTS:
        return f"the path has {len(parts)} parts, at most {MOST_PARTS} are allowed"
    return next((fault for part in parts if (fault := _part_fault(part))), "")


def _part_fault(part: str) -> str:
    if any(not char.isprintable() for char in part):
        return "the name holds a character that cannot be shown"
    bad = sorted(set(part) & _FORBIDDEN)
    if bad:
        return f"the name holds {' '.join(bad)}, which other systems refuse"
    if len(part.encode("utf-8", "surrogatepass")) > MOST_PART_NBYTES:
        return f"a part of the path has more than {MOST_PART_NBYTES} bytes"
    if part != unicodedata.normalize("NFC", part):
        return "the name is not in Unicode's composed form (NFC)"
    if part[-1] in ". ":
        return "the name ends in a dot or space, which Windows drops"
    if part.split(".")[0].casefold() in _DEVICES:
        return "the name is that of a device on Windows"
    return ""


def is_junk(name: str) -> bool:
    """Files that operating systems drop anywhere."""
    base = name.rpartition("/")[2]
    return base in (".DS_Store", "Thumbs.db", "desktop.ini") or base.startswith("._")


def is_left_over(name: str) -> bool:
    """Whether a file is none of a package's own: what downloads, clones, signing and operating systems leave."""
    return is_junk(name) or any(fnmatchcase(name, pattern) for pattern in LEFT_OVERS)


def folded(name: str) -> str:
    """What a file system that ignores case and Unicode's forms sees of a name."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def name_collision(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names that are one file somewhere: equal, of other case only, or one a folder in the other's path."""
    seen: dict[str, str] = {}
    for name in names:
        if folded(name) in seen:
            return seen[folded(name)], name
        seen[folded(name)] = name
    for key, name in seen.items():
        parts = key.split("/")
        for depth in range(1, len(parts)):
            parent = seen.get("/".join(parts[:depth]))
            if parent is not None:
                return parent, name
    return None
