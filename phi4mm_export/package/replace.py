"""Single files of a folder, replaced so that a reader sees the old bytes or the new ones, never a part."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phi4mm_export.package.manifest import MANIFEST_FILE, FileEntry, changed_manifest, manifest_documents
from phi4mm_export.package.manifest_read import read_manifest
from phi4mm_export.spec.on_disk import is_entry


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


def with_manifest(
    folder: Path, files: Mapping[str, bytes], settings: Mapping[str, Any] | None = None, provider: str | None = None
) -> dict[str, bytes]:
    """The files, and the folder's manifest and checksums with their new sizes and digests if it has a manifest.

    settings, provider: what the new files were made with. Raises PackageError for a manifest that cannot be trusted.
    """
    if not is_entry(folder / MANIFEST_FILE):
        return dict(files)
    old = read_manifest(folder)
    entries = old.by_name
    for name, data in files.items():
        entries[name] = FileEntry(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    parts: dict[str, Any] = {}
    if settings is not None:
        parts["settings"] = {**(old.settings or {}), **settings}
    if provider is not None:
        parts["runtime"] = old.runtime.model_copy(update={"provider": provider})
    return {**files, **manifest_documents(changed_manifest(old, entries.values(), **parts))}
