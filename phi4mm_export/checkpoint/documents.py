"""JSON documents of a checkpoint, and what is checked of any file before it is opened."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from phi4mm_export.errors import CheckpointError, SystemLimitError
from phi4mm_export.spec.json_text import parse_object, read_bytes
from phi4mm_export.spec.on_disk import is_link, lfs_size

FETCH_AGAIN = "fetch the file again"
MAX_DOCUMENT_NBYTES = 64 << 20
"""An index of a hundred thousand tensors has about 10 MB."""


def read_object(path: Path, label: str) -> dict[str, Any]:
    """A JSON file whose top level is an object; a byte order mark is tolerated.

    Raises CheckpointError naming the file (as `label`) if it is absent, no regular file, a Git LFS pointer, larger
    than MAX_DOCUMENT_NBYTES, not UTF-8 JSON, or names a key twice.
    """
    check_regular_file(path, label)
    return parse_checked(read_bytes(path, where=label, most=MAX_DOCUMENT_NBYTES), label)


def parse_checked(content: bytes, label: str) -> dict[str, Any]:
    """The JSON object in `content`, by the strict rules of `spec.json_text`; every error says how to go on."""
    try:
        return parse_object(content, label)
    except CheckpointError as err:
        raise CheckpointError(err.what, where=err.where, fix=err.fix or FETCH_AGAIN) from err


def check_regular_file(path: Path, label: str) -> None:
    """Raise unless `path` is a readable regular file or a link to one; never opens a pipe or a device."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as err:
        what = "the link points to a file that is not there" if is_link(path) else "the file is not there"
        raise CheckpointError(what, where=label, fix=FETCH_AGAIN) from err
    except PermissionError as err:
        raise SystemLimitError("the file may not be read", where=label, fix="give read permission") from err
    except OSError as err:
        raise CheckpointError(f"the file cannot be opened: {err.strerror}", where=label, fix=FETCH_AGAIN) from err
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise CheckpointError(f"expected a regular file, found {kind}", where=label, fix=f"remove it and {FETCH_AGAIN}")


def refuse_lfs_pointer(head: bytes, size: int, label: str) -> None:
    """Raise CheckpointError if the file's first bytes are a Git LFS pointer."""
    stands_for = lfs_size(head)
    if stands_for is not None:
        raise CheckpointError(
            f"the file is a Git LFS pointer of {size} bytes standing for {stands_for} bytes, not the file itself",
            where=label,
            fix="run `git lfs pull` in the checkpoint, or download the real file",
        )
