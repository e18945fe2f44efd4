"""Reading a manifest that may come from anybody: everything in it is judged before anything is done with it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from pydantic import ValidationError

from phi4mm_export.errors import PackageError, some
from phi4mm_export.package.manifest import MANIFEST_FILE, SCHEMA_VERSION, Manifest, check_names
from phi4mm_export.spec.json_text import parse_object, refuse_byte_order_mark
from phi4mm_export.spec.on_disk import status

MAX_MANIFEST_NBYTES = 32 << 20


def read_manifest(package: Path) -> Manifest:
    """The manifest of a package folder. Raises PackageError when there is none, or none that can be trusted."""
    return parse_manifest(manifest_file_bytes(package))


def manifest_file_bytes(package: Path, name: str = MANIFEST_FILE) -> bytes:
    """The bytes of phi4mm.json (or SHA256SUMS): a plain file of bounded size, no link.

    Raises PackageError otherwise.
    """
    path = package / name
    found = status(path, follow=False)
    if found is None:
        raise PackageError(
            f"the package has no {name}, so there is nothing to hold its files against",
            where=package.name or name,
            fix="export or quantize it with phi4mm, which writes one; phi4mm validate judges any package",
        )
    if not stat.S_ISREG(found.st_mode):
        kind = "a link" if stat.S_ISLNK(found.st_mode) else "no plain file"
        raise PackageError(f"expected a plain file, found {kind}", where=name, fix="fetch the package again")
    if found.st_size > MAX_MANIFEST_NBYTES:
        raise PackageError(
            f"expected at most {MAX_MANIFEST_NBYTES:,} bytes, found {found.st_size:,}",
            where=name,
            fix="fetch the package again",
        )
    return path.read_bytes()


def parse_manifest(data: bytes) -> Manifest:
    """A manifest from its bytes.

    Raises PackageError for anything but strict JSON of the known schema, and for file names that are not safe on every
    system, collide somewhere, or name the manifest itself.
    """
    refuse_byte_order_mark(data, MANIFEST_FILE, error=PackageError)
    body = parse_object(data, MANIFEST_FILE, error=PackageError)
    found = body.get("schema_version")
    if type(found) is int and found > SCHEMA_VERSION:
        raise PackageError(
            f"expected schema version {SCHEMA_VERSION}, found {found}",
            where=f"{MANIFEST_FILE}: schema_version",
            fix="install a newer phi4mm",
        )
    try:
        manifest = Manifest.model_validate_json(json.dumps(body))
    except ValidationError as err:
        faults = [f"{_place(item['loc'])}: {item['msg']}" for item in err.errors(include_input=False)]
        raise PackageError(
            f"{len(faults)} entries break the schema: {some(faults, 3)}",
            where=f"{MANIFEST_FILE}: {_place(err.errors()[0]['loc'])}",
            fix="fetch the package again, or remove the manifest",
        ) from err
    check_names(entry.name for entry in manifest.files)
    inputs = [entry.name for entry in manifest.source.files] if manifest.source else []
    if len(set(inputs)) < len(inputs):
        raise PackageError("an input file is listed twice", where=f"{MANIFEST_FILE}: source.files")
    return manifest


def _place(location: tuple[int | str, ...]) -> str:
    """A dotted path, positions in brackets."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "the document"
