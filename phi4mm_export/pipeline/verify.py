"""`phi4mm verify`: whether a package is what its manifest, a lock and a signature say. Offline; nothing is written
but a lock or a signature that was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phi4mm_export.checks.claims import Claims, FaultKind, FileFault, read_claims
from phi4mm_export.checks.files import compare_files, shown_name
from phi4mm_export.errors import ExitCode, UsageError
from phi4mm_export.package.given_folders import check_file_to_write
from phi4mm_export.package.lock_file import LockFile, lock_bytes, lock_of, read_lock
from phi4mm_export.package.manifest import MANIFEST_FILE, SUMS_FILE, Manifest
from phi4mm_export.package.replace import replace_files
from phi4mm_export.package.scan import EntryKind, scan
from phi4mm_export.package.signing import (
    SignatureMismatchError,
    check_signature,
    check_signature_files,
    check_signing_key,
    sign_package,
)
from phi4mm_export.spec.on_disk import found_at, is_file, is_folder, real_path

Progress = Callable[[int, int], None]
"""Called with the bytes hashed so far and in all."""


@dataclass(frozen=True)
class VerifyReport:
    """The verdict. `files` and `nbytes` count what the manifest lists and its own two files; `tolerated` are extra
    files that it allows; `signed` is True after a signature was checked or made; `written` are the lock and the
    signature that were written, as they were named."""

    package: str
    package_digest: str
    recipe_digest: str
    files: int
    nbytes: int
    faults: tuple[FileFault, ...]
    tolerated: tuple[str, ...] = ()
    lock: str = ""
    signed: bool = False
    written: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True without a fault."""
        return not self.faults

    @property
    def exit_code(self) -> ExitCode:
        """0, or 4 with any fault."""
        return ExitCode.OK if self.ok else ExitCode.PACKAGE

    def names(self, kind: FaultKind) -> tuple[str, ...]:
        """The files with faults of one kind, each once."""
        return tuple(dict.fromkeys(fault.name for fault in self.faults if fault.kind is kind))

    def as_json(self) -> dict[str, Any]:
        """The report as plain data with a fixed key order."""
        return {
            "package": self.package,
            "ok": self.ok,
            "package_digest": self.package_digest,
            "recipe_digest": self.recipe_digest,
            "files": self.files,
            "bytes": self.nbytes,
            "lock": self.lock,
            "signed": self.signed,
            "written": list(self.written),
            "faults": [asdict(fault) for fault in self.faults],
            "tolerated": list(self.tolerated),
        }


def verify(
    package: str | os.PathLike[str],
    *,
    expect: str | os.PathLike[str] | None = None,
    write_lock: str | os.PathLike[str] | None = None,
    signature: str | os.PathLike[str] | None = None,
    public_key: str | os.PathLike[str] | None = None,
    sign: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Hold every file of a package against its manifest, and the manifest against a lock and a signature.

    expect: a lock file. write_lock: where to write the lock that this package fulfils. signature, public_key: a
    signature file and the key in PEM that it is checked with. sign: a private key; the signature is written to
    `signature`, by default `PACKAGE.sig` beside the package. Lock and signature are only written for a package
    without a fault.

    Raises PackageError for a package without a manifest, UsageError for paths that are not there, MissingExtraError
    when signatures are asked for and model-signing is not installed.
    """
    folder = _folder(package)
    lock = None if expect is None else read_lock(Path(expect))
    if (signature is None) != (public_key is None) and sign is None:
        raise UsageError(
            "a signature is checked with the signer's public key, and one of the two was not given",
            where="--signature" if signature is None else "--public-key",
            fix="give both --signature FILE and --public-key KEY",
        )
    sealed = None if signature is None else Path(signature)
    target = sealed or _beside(folder)
    if write_lock is not None:
        check_file_to_write(Path(write_lock), "--write-lock")
    if sign is not None:
        check_signing_key(Path(sign))
        check_file_to_write(target, "--sign" if sealed is None else "--signature")
    elif sealed is not None and public_key is not None:
        check_signature_files(sealed, Path(public_key))
    claims = read_claims(folder)
    faults, tolerated = _files(folder, claims, sealed, progress)
    faults += [] if lock is None else _against_lock(lock, claims.manifest)
    if sealed is not None and public_key is not None and sign is None:
        faults += _signature(folder, sealed, Path(public_key))
    own = [(folder / name).stat().st_size for name in (MANIFEST_FILE, SUMS_FILE) if is_file(folder / name)]
    manifest, done, written = claims.manifest, not faults, []
    if write_lock is not None and manifest is not None and done:
        replace_files(Path(write_lock).parent, {Path(write_lock).name: lock_bytes(lock_of(manifest))})
        written.append(os.fspath(write_lock))
    if sign is not None and done:
        sign_package(folder, target, Path(sign))
        written.append(os.fspath(target))
    return VerifyReport(
        package=real_path(folder).name,
        package_digest=manifest.package_digest if manifest else "",
        recipe_digest=manifest.recipe_digest if manifest else "",
        files=len(claims.files) + len(own),
        nbytes=sum(max(size, 0) for size, _ in claims.files.values()) + sum(own),
        faults=tuple(faults),
        tolerated=tuple(map(shown_name, tolerated)),
        lock=Path(expect).name if expect is not None else "",
        signed=done and (sign is not None or public_key is not None),
        written=tuple(written),
    )


def _folder(package: str | os.PathLike[str]) -> Path:
    folder = Path(package)
    if not is_folder(folder):
        found = found_at(folder)
        raise UsageError(f"expected a package folder, found {found}", where=str(folder), fix="pass the folder's path")
    return folder


def _beside(folder: Path) -> Path:
    """Where the signature of a package goes that names no other place."""
    named = folder if folder.name not in ("", "..") else real_path(folder)
    return named.with_name(f"{named.name}.sig")


def _files(
    folder: Path, claims: Claims, signature: Path | None, progress: Progress | None
) -> tuple[list[FileFault], list[str]]:
    """The manifest's own faults, the files' and those of the external data."""
    found = scan(folder)
    if signature is not None and signature.absolute().is_relative_to(folder.absolute()):
        found.pop(signature.absolute().relative_to(folder.absolute()).as_posix(), None)
    total, done = sum(e.nbytes for name, e in found.items() if name in claims.files), 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, total), total)

    faults, tolerated = compare_files(folder, claims, found, count)
    told = {fault.name for fault in faults}
    links = any(entry.kind is EntryKind.LINK for entry in found.values())
    return [*claims.faults, *faults, *_external_data(folder, told, links=links)], tolerated


def _external_data(folder: Path, told: set[str], *, links: bool) -> Iterator[FileFault]:
    """Faults of the graphs' external data, apart from files that are known to be missing or no graphs any more."""
    from phi4mm_export.checks.integrity import check_integrity
    from phi4mm_export.checks.opened import open_package

    if not any(path.suffix == ".onnx" for path in folder.rglob("*.onnx")):
        return
    opened = open_package(folder)
    unread = [finding for finding in opened.findings if finding.code == "C201"]
    for finding in (*unread, *check_integrity(opened)):
        file, _, tensor = finding.where.partition(": ")
        known = {file, tensor} & told if finding.code in ("C201", "C203", "C221") else set()
        if known or (links and finding.code in ("C203", "C205")):
            continue
        place = f"{tensor}: {finding.what}" if tensor else finding.what
        yield FileFault(FaultKind.EXTERNAL_DATA, file, place, finding.expected, finding.found, finding.fix)


def _against_lock(lock: LockFile, manifest: Manifest | None) -> list[FileFault]:
    if manifest is None:
        return [FileFault(FaultKind.LOCK, MANIFEST_FILE, "cannot be held against the lock, because it cannot be read")]
    found = lock_of(manifest)
    faults = [
        FileFault(FaultKind.LOCK, MANIFEST_FILE, f"{key} is not the lock's", str(wanted), str(value), fix)
        for key, fix in (
            ("recipe_digest", "build with the recipe that the lock was written for"),
            ("model", "build from the model that the lock names"),
            ("commit", "build from the commit that the lock names"),
        )
        if (wanted := getattr(lock, key)) != (value := getattr(found, key))
    ]
    faults += _lock_entries("input", {e.name: e.sha256 for e in lock.inputs}, {e.name: e.sha256 for e in found.inputs})
    for wanted, value in zip(lock.calibration, found.calibration, strict=False):
        if wanted != value:
            what = f"the calibration of {wanted.component} is not the lock's"
            expected = f"{len(wanted.samples)} samples, statistics {wanted.statistics}"
            given = f"{len(value.samples)} samples, statistics {value.statistics}"
            faults.append(FileFault(FaultKind.LOCK, MANIFEST_FILE, what, expected, given, "use the same samples"))
    if len(lock.calibration) != len(found.calibration):
        counts = (str(len(lock.calibration)), str(len(found.calibration)))
        faults.append(FileFault(FaultKind.LOCK, MANIFEST_FILE, "another number of quantized graphs", *counts))
    classes = {entry.name: entry.reproducibility.value for entry in (*lock.files, *found.files)}
    for fault in _lock_entries("file", {e.name: e.sha256 for e in lock.files}, {e.name: e.sha256 for e in found.files}):
        name = fault.name
        faults.append(FileFault(fault.kind, name, f"{fault.what} (class {classes[name]})", fault.expected, fault.found,
                                _class_advice(classes[name])))  # fmt: skip
    return faults


def _lock_entries(kind: str, wanted: dict[str, str], found: dict[str, str]) -> list[FileFault]:
    return [
        FileFault(
            FaultKind.LOCK,
            name,
            f"the {kind} is not the lock's",
            wanted.get(name, f"no such {kind}"),
            found.get(name, f"no such {kind}"),
            f"use the {kind} that the lock names",
        )
        for name in sorted({*wanted, *found})
        if wanted.get(name) != found.get(name)
    ]


def _class_advice(reproducibility: str) -> str:
    if reproducibility == "same-machine":
        return "files of this class differ between machines: phi4mm diff says by how much"
    return "the same inputs, recipe and versions give the same bytes: compare them with phi4mm diff"


def _signature(folder: Path, signature: Path, public_key: Path) -> list[FileFault]:
    try:
        check_signature(folder, signature, public_key)
    except SignatureMismatchError as err:
        text = f"not a signature of this package by this key: {err}"
        return [FileFault(FaultKind.SIGNATURE, signature.name, text, fix="ask the signer for the package again")]
    return []
