"""Single files of a folder, replaced so that a reader sees the old bytes or the new ones, never a part."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def replace_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into an existing folder: all beside their targets first, synced, then renamed one by one.

    A target that is a link or has other hard links is replaced, not written through. After an error, or an
    interrupt, no temporary file remains. Raises OSError.
    """
    beside = {name: folder / f".{name}.tmp" for name in files}
    try:
        for name, data in files.items():
            with beside[name].open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for name in files:
            beside[name].replace(folder / name)
    finally:
        for temporary in beside.values():
            temporary.unlink(missing_ok=True)
