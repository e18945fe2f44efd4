"""Single files of a folder, replaced so that a reader sees the old bytes or the new ones, never a part."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from phi4mm_export.errors import PackageError
from phi4mm_export.package.manifest import MANIFEST_FILE
from phi4mm_export.spec.json_text import json_bytes, read_object


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


def with_manifest(folder: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files, and the folder's manifest with their new sizes and digests if it has one.

    Raises PackageError for a manifest that cannot be read.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        return dict(files)
    manifest = read_object(path, error=PackageError)
    listed = manifest.get("files")
    entries = {entry["name"]: entry for entry in listed if _is_entry(entry)} if isinstance(listed, list) else None
    if entries is None or len(entries) != len(listed or ()):
        raise PackageError(
            "expected a list of files with their names", where=f"{MANIFEST_FILE}: files", fix="remove the manifest"
        )
    for name, data in files.items():
        entries[name] = {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"] = [entries[name] for name in sorted(entries)]
    return {**files, MANIFEST_FILE: json_bytes(manifest)}


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)
