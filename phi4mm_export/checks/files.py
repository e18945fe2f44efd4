"""The files of a package against its manifest: every difference, each by name.

Nothing outside the folder is read, no link is followed, and only files that the manifest lists, or that may be one of
them under another name, are hashed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

from phi4mm_export.checks.claims import Claims, FaultKind, FileFault
from phi4mm_export.package.file_names import folded
from phi4mm_export.package.manifest import MANIFEST_FILE, SUMS_FILE
from phi4mm_export.package.scan import Entry, EntryKind

HASHED_ANYWAY = 1 << 30
"""A file of another size than listed is hashed up to this many bytes, to show its digest; sparse monsters are not."""
MOST_THREADS = 4


def compare_files(
    package: Path, claims: Claims, found: Mapping[str, Entry], on_bytes: Callable[[int], None] = lambda _count: None
) -> tuple[list[FileFault], list[str]]:
    """Every difference between what is claimed and what lies there, and the names of tolerated extra files.

    on_bytes: called with each count of bytes hashed, from several threads.
    """
    faults: list[FileFault] = []
    links = {name for name, entry in found.items() if entry.kind is EntryKind.LINK}
    missing: dict[str, tuple[int, str]] = {}
    to_hash: dict[str, tuple[int, str]] = {}
    for name, claim in claims.files.items():
        entry = found.get(name)
        link = next((parent for parent in _and_parents(name) if parent in links), None)
        if link is not None:
            faults.append(_linked(name, link, found[link].target))
        elif entry is None:
            missing[name] = claim
        elif entry.kind is not EntryKind.FILE:
            faults.append(FileFault(FaultKind.CHANGED, name, "is no file any more", "a file", f"a {entry.kind}"))
        else:
            to_hash[name] = claim
    digests = _digests(package, to_hash, found, on_bytes)
    faults += _changed(claims, to_hash, found, digests)
    extras, tolerated = _extras(claims, found)
    faults += _missing_and_extra(package, missing, extras, on_bytes)
    return faults, tolerated


def sha256_of(path: Path, on_bytes: Callable[[int], None] = lambda _count: None) -> str:
    """sha256 of a file in hex, in pieces of bounded size."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(4 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            on_bytes(count)
    return digest.hexdigest()


def _linked(name: str, link: str, target: str) -> FileFault:
    return FileFault(
        FaultKind.LINKED,
        name,
        "is a link; a package holds plain files only" if link == name else f"lies behind the link {link}",
        "a plain file",
        f"a link to {target!r}",
        "replace the link by a copy, or fetch the file again",
    )


def _and_parents(name: str) -> Iterator[str]:
    """The folders of a path from the top, then the path."""
    parts = name.split("/")
    for count in range(1, len(parts) + 1):
        yield "/".join(parts[:count])


def _digests(
    package: Path,
    names: Mapping[str, tuple[int, str]],
    found: Mapping[str, Entry],
    on_bytes: Callable[[int], None],
) -> dict[str, str]:
    """Digest by name, several files at a time; a file of another and huge size is left out."""
    wanted = [name for name, (size, _) in names.items() if found[name].nbytes <= max(size, HASHED_ANYWAY)]
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(wanted, pool.map(lambda name: sha256_of(package / name, on_bytes), wanted), strict=True))


def _changed(
    claims: Claims, names: Mapping[str, tuple[int, str]], found: Mapping[str, Entry], digests: Mapping[str, str]
) -> Iterator[FileFault]:
    owner = {digest: name for name, (_, digest) in claims.files.items()}
    for name, (size, wanted) in names.items():
        digest, nbytes = digests.get(name, ""), found[name].nbytes
        if digest == wanted and size in (-1, nbytes):
            continue
        other = owner.get(digest)
        yield FileFault(
            FaultKind.CHANGED,
            name,
            f"holds the content of {other}" if other and other != name else "changed",
            f"sha256 {wanted}" + (f", {size:,} bytes" if size >= 0 else ""),
            f"sha256 {digest or '(too large to hash)'}, {nbytes:,} bytes",
            "fetch this file again",
        )


def _extras(claims: Claims, found: Mapping[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """Entries that nothing lists: those that count, and the names of tolerated ones (plain files and folders only)."""
    extras: dict[str, Entry] = {}
    tolerated: list[str] = []
    for name, entry in found.items():
        if name in claims.files or name in (MANIFEST_FILE, SUMS_FILE):
            continue
        plain = entry.kind in (EntryKind.FILE, EntryKind.EMPTY_FOLDER)
        if plain and any(fnmatchcase(name, pattern) for pattern in claims.tolerated):
            tolerated.append(name)
        else:
            extras[name] = entry
    return extras, tolerated


def _missing_and_extra(
    package: Path,
    missing: Mapping[str, tuple[int, str]],
    extras: Mapping[str, Entry],
    on_bytes: Callable[[int], None],
) -> Iterator[FileFault]:
    """Missing files and extra ones; a file under another name is said to be that."""
    sizes = {size for size, _ in missing.values()}
    candidates = {
        name: sha256_of(package / name, on_bytes)
        for name, entry in extras.items()
        if entry.kind is EntryKind.FILE and entry.nbytes in sizes
    }
    for name, (size, wanted) in missing.items():
        same = next((other for other, digest in candidates.items() if digest == wanted), None)
        other_case = next((other for other in extras if folded(other) == folded(name)), None)
        found, fix = "no file", "fetch this file again"
        if same is not None or other_case is not None:
            found = repr(same or other_case) + (", the same bytes" if same else ", a name that differs in case or form")
            fix = f"rename it to {name}" if same else fix
        expected = f"sha256 {wanted}" + (f", {size:,} bytes" if size >= 0 else "")
        yield FileFault(FaultKind.MISSING, name, "missing", expected, found, fix)
    for name, entry in extras.items():
        if entry.kind is EntryKind.LINK:
            target = f"a link to {entry.target!r}"
            yield FileFault(FaultKind.LINKED, shown_name(name), "an extra link", "no such entry", target, "remove it")
            continue
        kind = f"{entry.nbytes:,} bytes" if entry.kind is EntryKind.FILE else str(entry.kind)
        fix = f"remove it; which extra files are tolerated is recorded in {MANIFEST_FILE}"
        yield FileFault(FaultKind.EXTRA, shown_name(name), "not listed in the manifest", "no such file", kind, fix)


def shown_name(name: str) -> str:
    """A file name as text that any terminal and any JSON takes: bytes that are no text, and controls, as escapes."""
    text = name.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
