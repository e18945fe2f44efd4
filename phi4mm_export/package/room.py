"""Room on disk: compared with the need before work starts, and explained when it runs out all the same."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from phi4mm_export.errors import SystemLimitError
from phi4mm_export.spec.on_disk import is_file, is_link

FULL = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})


def check_room(folder: Path, need: int, *, what: str = "the package", already: int = 0) -> None:
    """Raise SystemLimitError when the file system of `folder` has less than `need` bytes free, naming both.

    already: bytes there that the work will use or free (leftovers of an interrupted run).
    """
    free = shutil.disk_usage(folder).free
    if free + already < need:
        raise SystemLimitError(
            f"{what} needs {need:,} bytes, the disk has {free + already:,} free",
            where=str(folder),
            fix="free some, or choose a target on another disk",
        )


def tree_nbytes(folder: Path) -> int:
    """Bytes of all files below a folder; 0 when it does not exist."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if is_file(path) and not is_link(path))


@contextlib.contextmanager
def disk_errors(folder: Path, need: int = 0) -> Iterator[None]:
    """Turn what the system refuses inside the block into a SystemLimitError; a full disk with both numbers.

    need: bytes that the whole work takes in `folder`, 0 when nobody knows.
    """
    try:
        yield
    except OSError as err:
        place = str(err.filename or folder)
        if err.errno not in FULL:
            raise SystemLimitError(
                f"the system refused a file operation: {err.strerror or err}",
                where=place,
                fix="check the disk and the permissions, then run again",
            ) from err
        free = shutil.disk_usage(folder).free
        wanted = f"the work needs {need:,} bytes in all" if need else "a write did not fit"
        raise SystemLimitError(
            f"the disk filled up: {wanted}, {free:,} are free",
            where=place,
            fix="free some, or choose a target on another disk; an older package still stands",
        ) from err
