"""What a package says of itself: phi4mm.json and SHA256SUMS, held against one another."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from phi4mm_export.errors import PackageError
from phi4mm_export.package.file_names import name_fault
from phi4mm_export.package.manifest import (
    MANIFEST_FILE,
    SUMS_FILE,
    Manifest,
    package_digest,
    recipe_digest,
    sums_bytes,
)
from phi4mm_export.package.manifest_read import manifest_file_bytes, parse_manifest
from phi4mm_export.spec.on_disk import is_entry, is_link

_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


class FaultKind(StrEnum):
    """What is wrong with a package as a set of files."""

    CHANGED = "changed"
    MISSING = "missing"
    EXTRA = "extra"
    LINKED = "linked"
    MANIFEST = "manifest"
    EXTERNAL_DATA = "external data"
    LOCK = "lock"
    SIGNATURE = "signature"


@dataclass(frozen=True)
class FileFault:
    """One difference. `name` is the file; `expected` and `found` are digests, sizes or names."""

    kind: FaultKind
    name: str
    what: str
    expected: str = ""
    found: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Claims:
    """What the package says of itself. `manifest` is None where phi4mm.json cannot be read; then `files` are those of
    SHA256SUMS, without sizes (-1)."""

    manifest: Manifest | None
    files: Mapping[str, tuple[int, str]]
    faults: tuple[FileFault, ...]
    tolerated: tuple[str, ...] = ()


def read_claims(package: Path) -> Claims:
    """phi4mm.json and SHA256SUMS, held against one another.

    Raises PackageError when the package has no phi4mm.json at all.
    """
    faults: list[FileFault] = []
    body = _own_file(package, MANIFEST_FILE, faults, required=True)
    sums = _own_file(package, SUMS_FILE, faults, required=False)
    listed = _parse_sums(sums, faults) if sums is not None else {}
    manifest = None
    if body is not None:
        found = hashlib.sha256(body).hexdigest()
        if sums is not None and listed.get(MANIFEST_FILE) != found:
            expected = listed.get(MANIFEST_FILE, "")
            faults.append(
                _edited(MANIFEST_FILE, f"edited: {SUMS_FILE} states another digest of it", expected or "no line", found)
            )
        try:
            manifest = parse_manifest(body)
        except PackageError as err:
            faults.append(FileFault(FaultKind.MANIFEST, MANIFEST_FILE, f"cannot be trusted: {err.what}", fix=err.fix))
    if manifest is None:
        files = {name: (-1, digest) for name, digest in listed.items() if name not in (MANIFEST_FILE, SUMS_FILE)}
        return Claims(None, {name: item for name, item in files.items() if not name_fault(name)}, tuple(faults))
    faults += _own_digests(manifest)
    if sums is not None:
        faults += _against_sums(manifest, body or b"", sums, listed)
    files = {entry.name: (entry.size, entry.sha256) for entry in manifest.files}
    return Claims(manifest, files, tuple(faults), manifest.tolerated)


def _own_file(package: Path, name: str, faults: list[FileFault], *, required: bool) -> bytes | None:
    if not is_entry(package / name):
        if required:
            manifest_file_bytes(package, name)  # raises, and says what to do
        faults.append(FileFault(FaultKind.MISSING, name, "missing", fix="fetch the package again"))
        return None
    try:
        return manifest_file_bytes(package, name)
    except PackageError as err:
        kind = FaultKind.LINKED if is_link(package / name) else FaultKind.CHANGED
        faults.append(FileFault(kind, name, err.what, fix=err.fix))
        return None


def _parse_sums(data: bytes, faults: list[FileFault]) -> dict[str, str]:
    """Name -> digest of SHA256SUMS; lines of another form are faults."""
    listed: dict[str, str] = {}
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in listed:
            what = "a name twice" if match else "another form than SHA256, two spaces, name"
            faults.append(_edited(SUMS_FILE, f"line {number} has {what}", "", line[:100]))
        else:
            listed[match[2]] = match[1]
    return listed


def _own_digests(manifest: Manifest) -> Iterator[FileFault]:
    for key, computed in (
        ("package_digest", package_digest(manifest.files)),
        ("recipe_digest", recipe_digest(manifest)),
    ):
        stated = getattr(manifest, key)
        if stated != computed:
            yield _edited(MANIFEST_FILE, f"edited: {key} is not that of its entries", computed, stated)


def _against_sums(manifest: Manifest, body: bytes, sums: bytes, listed: Mapping[str, str]) -> Iterator[FileFault]:
    """Lines of SHA256SUMS that say something else than the manifest."""
    told = False
    stated = {entry.name: entry.sha256 for entry in manifest.files}
    for name in sorted({*stated, *listed} - {MANIFEST_FILE}):
        if stated.get(name) != listed.get(name):
            told = True
            what = f"and {MANIFEST_FILE} disagree about {name}"
            yield _edited(SUMS_FILE, what, stated.get(name, "no line"), listed.get(name, "no line"))
    own = listed.get(MANIFEST_FILE, "")
    if not told and sums != sums_bytes(manifest, own) and own == hashlib.sha256(body).hexdigest():
        yield _edited(SUMS_FILE, "edited: not the text that is written for this manifest", "", "")


def _edited(name: str, what: str, expected: str, found: str) -> FileFault:
    return FileFault(FaultKind.MANIFEST, name, what, expected, found, "fetch the package again")
