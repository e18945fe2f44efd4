"""`phi4mm.lock`: what a build is expected to be, kept apart from the package, in the repository of whoever builds it.

It pins choices, inputs, calibration and every file by digest, so that a rebuilt package, or one that came over the net,
can be held against it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from phi4mm_export.errors import UsageError, some
from phi4mm_export.package.manifest import FileEntry, InputEntry, Manifest, Plain, Sha256, Text
from phi4mm_export.spec.json_text import json_bytes, parse_object, read_bytes, refuse_byte_order_mark

LOCK_VERSION = 1


class CalibrationLock(Plain):
    """The calibration of one quantized graph: digests of the preprocessed samples, and of saved statistics."""

    component: Text | None = None
    samples: tuple[Sha256, ...] = ()
    statistics: Sha256 | None = None


class LockFile(Plain):
    """Everything a lock pins. Versions of libraries are not among it: they show in the digests where they matter."""

    lock_version: Annotated[int, Field(ge=1, le=LOCK_VERSION)] = LOCK_VERSION
    recipe_digest: Sha256
    package_digest: Sha256
    model: Text | None = None
    commit: Text | None = None
    inputs: tuple[InputEntry, ...] = ()
    calibration: tuple[CalibrationLock, ...] = ()
    files: tuple[FileEntry, ...] = ()


def lock_of(manifest: Manifest) -> LockFile:
    """The lock that this package fulfils."""
    source = manifest.source
    return LockFile(
        recipe_digest=manifest.recipe_digest,
        package_digest=manifest.package_digest,
        model=source.model if source else None,
        commit=source.commit if source else None,
        inputs=source.files if source else (),
        calibration=tuple(_calibration(entry) for entry in manifest.quantization),
        files=manifest.files,
    )


def lock_bytes(lock: LockFile) -> bytes:
    """The lock file's bytes."""
    return json_bytes(lock.model_dump(mode="json"), indent=2)


def read_lock(path: Path) -> LockFile:
    """A lock from a file. Raises UsageError for a file that is missing or no lock of a known version."""
    data = read_bytes(path, error=UsageError)
    refuse_byte_order_mark(data, path.name, error=UsageError)
    body = parse_object(data, path.name, error=UsageError)
    try:
        return LockFile.model_validate_json(json.dumps(body))
    except ValidationError as err:
        faults = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in err.errors(include_input=False)]
        raise UsageError(
            f"{len(faults)} entries break the form of a lock: {some(faults, 3)}",
            where=path.name,
            fix="write it again with: phi4mm verify PACKAGE --write-lock FILE",
        ) from err


def _calibration(entry: dict[str, Any]) -> CalibrationLock:
    found = entry.get("calibration")
    samples = found.get("sha256") if isinstance(found, dict) else None
    return CalibrationLock.model_validate(
        {
            "component": entry.get("component"),
            "samples": tuple(samples) if isinstance(samples, list) else (),
            "statistics": entry.get("statistics"),
        }
    )
