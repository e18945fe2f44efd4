"""Single files of a folder, replaced so that a reader sees the old bytes or the new ones, never a part."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phi4mm_export.package.claim import insist
from phi4mm_export.package.manifest import MANIFEST_FILE, FileEntry, changed_manifest, manifest_documents
from phi4mm_export.package.manifest_read import read_manifest
from phi4mm_export.package.publish import sync_folder
from phi4mm_export.spec.on_disk import is_entry


def replace_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into an existing folder: all beside their targets first, synced, then renamed one by one.

    A target that is a link or has other hard links is replaced, not written through. After an error or an interrupt
    the old files stand and no temporary one remains; a run killed between two renames leaves files of both kinds, and
    the next run replaces them. Raises OSError.
    """
    written = {name: folder / f".{name}.tmp" for name in files}
    old = {name: folder / f".{name}.old.tmp" for name in files if len(files) > 1}
    begun: list[str] = []
    try:
        for name, path in old.items():
            path.unlink(missing_ok=True)
            if is_entry(folder / name):
                shutil.copy2(folder / name, path, follow_symlinks=False)
        for name, data in files.items():
            write_anew(written[name], data)
        for name in files:
            begun.append(name)
            written[name].replace(folder / name)
        sync_folder(folder)
    except BaseException:
        insist(lambda: _put_back(folder, begun, written, old))
        raise
    finally:
        _clear((*written.values(), *old.values()))


def write_anew(path: Path, data: bytes) -> None:
    """A new file, synced; whatever has its name is removed first, so that nothing is written through a link."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _put_back(folder: Path, begun: Sequence[str], written: Mapping[str, Path], old: Mapping[str, Path]) -> None:
    """Undo the renames that were begun."""
    for name in begun:
        with contextlib.suppress(OSError):
            if name in old and is_entry(old[name]):
                old[name].replace(folder / name)
            elif name in old and not is_entry(written[name]):
                (folder / name).unlink(missing_ok=True)


def _clear(paths: Sequence[Path]) -> None:
    """Remove files; those that could not be removed are tried again after the others."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    for path in filter(is_entry, paths):
        path.unlink()


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
