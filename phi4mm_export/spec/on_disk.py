"""What stands under a path, whichever name came from outside.

`pathlib` answers False for a name that is not there, but raises for one that cannot be there: longer than the file
system takes, with a null character, of half a surrogate pair. Here these names lead nowhere too; only a system that
refuses to answer (no permission, a failing disk) is an error, and one of ours.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath

from phi4mm_export.errors import SystemLimitError

LFS_POINTER = b"version https://git-lfs.github.com/spec"
"""How a Git LFS pointer begins: what a clone without git-lfs has in place of a large file."""
POINTER_NBYTES = 1024
"""A pointer is shorter than this (its specification)."""
NOWHERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EBADF})
"""What systems say of a name that leads to nothing; EINVAL and EBADF: Windows, of characters that names cannot have."""


def status(path: Path, *, follow: bool = True) -> os.stat_result | None:
    """`os.stat`, or None for a name under which nothing stands or can stand, and for a link to such a name.

    follow: whether a link counts as what it leads to. Raises SystemLimitError where the system refuses to say.
    """
    try:
        return path.stat(follow_symlinks=follow)
    except OSError as err:
        if err.errno in NOWHERE:
            return None
        denied = isinstance(err, PermissionError)
        raise SystemLimitError(
            "it may not be looked at" if denied else f"it cannot be looked at: {err.strerror or err}",
            where=str(path),
            fix="give permission to read the folders above it" if denied else "check the disk",
        ) from err
    except ValueError:  # a null character; UnicodeEncodeError is one too
        return None


def exists(path: Path) -> bool:
    """Whether something stands there; a link counts as what it leads to."""
    return status(path) is not None


def is_entry(path: Path) -> bool:
    """Whether the name is taken, be it by a link to nowhere."""
    return status(path, follow=False) is not None


def is_file(path: Path) -> bool:
    """Whether a plain file, or a link to one, stands there."""
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_folder(path: Path) -> bool:
    """Whether a folder, or a link to one, stands there."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_link(path: Path) -> bool:
    """Whether the name itself is a symbolic link."""
    found = status(path, follow=False)
    return found is not None and stat.S_ISLNK(found.st_mode)


def found_at(path: Path) -> str:
    """What stands there, as the end of "expected a folder, found"."""
    found = status(path)
    if found is None:
        return "a link to nothing" if is_link(path) else "nothing"
    if stat.S_ISDIR(found.st_mode):
        return "a folder"
    return "a file" if stat.S_ISREG(found.st_mode) else "a pipe, socket or device"


def lfs_size(head: bytes) -> int | None:
    """The size a Git LFS pointer stands for (0 when it states none); None if a file that begins with `head` is none."""
    if not head.startswith(LFS_POINTER):
        return None
    match = re.search(rb"^size (\d{1,18})\s*$", head[:POINTER_NBYTES], re.MULTILINE)
    return int(match[1]) if match else 0


def home_expanded(path: str | os.PathLike[str]) -> Path:
    """`~` and `~user` resolved; a user that this machine does not know is left as it stands."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def real_path(path: Path) -> Path:
    """The path with every link followed; a loop of links, and a name that cannot be, are left as they stand."""
    try:
        return Path(os.path.realpath(path))
    except ValueError:
        return path.absolute()


def is_inside_name(name: str) -> bool:
    """Whether a name is relative, without `..`, drive or root, in the spelling of any operating system."""
    windows = PureWindowsPath(name)
    if not name or windows.drive or windows.root or PurePosixPath(name).is_absolute() or "\0" in name:
        return False
    return ".." not in windows.parts
