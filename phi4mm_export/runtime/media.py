"""Media files on their way in: read whole, with every refusal a UsageError that names the file.

Nothing foreign reaches og: its own decoders end the process on formats they do not know and hang on a cut JPEG.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from phi4mm_export.errors import UsageError, some
from phi4mm_export.spec.on_disk import lfs_size

MAX_NBYTES = 1 << 30
"""Largest media file that is read; three hours of stereo at 16 bit and 44.1 kHz have 1.8 GB and are refused anyway."""

T = TypeVar("T")


def read_medium(path: Path) -> bytes:
    """The bytes of one media file.

    Raises UsageError for a missing or empty file, a folder, pipe or device (opening a pipe would wait for ever), a file
    over `MAX_NBYTES`, and a Git LFS pointer.
    """
    name = str(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
            raise UsageError(f"expected a media file, found {kind}", where=name)
        if status.st_size > MAX_NBYTES:
            raise UsageError(f"the file has {status.st_size:,} bytes, expected at most {MAX_NBYTES:,}", where=name)
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as err:
        raise UsageError("the file does not exist", where=name) from err
    except (OSError, ValueError) as err:  # ValueError: a null character in the path
        raise UsageError(f"the file cannot be read: {err}", where=name) from err
    if not data:
        raise UsageError("the file is empty", where=name)
    if lfs_size(data) is not None:
        raise UsageError("found a Git LFS pointer, expected the file itself", where=name, fix="run: git lfs pull")
    return data


def screen(paths: Iterable[Path], load: Callable[[Path], T]) -> tuple[list[T], list[UsageError]]:
    """What `load` makes of each path, and the faults of those that it refused. Goes through all paths."""
    loaded: list[T] = []
    faults: list[UsageError] = []
    for path in paths:
        try:
            loaded.append(load(path))
        except UsageError as err:
            faults.append(err)
    return loaded, faults


def refuse(faults: Sequence[UsageError]) -> None:
    """Raise one UsageError for all unusable files, each named once; nothing happens without faults."""
    by_name = {fault.where: fault for fault in faults}
    if not by_name:
        return
    if len(by_name) == 1:
        raise next(iter(by_name.values()))
    listed = some(f"{name} ({fault.what})" for name, fault in by_name.items())
    raise UsageError(f"{len(by_name):,} files cannot be used: {listed}", fix="replace them or leave them out")
