"""The manifest of a package that was just exported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phi4mm_export.checkpoint.digests import InputDigest
from phi4mm_export.checkpoint.hub import snapshot_commit
from phi4mm_export.package.manifest import (
    MANIFEST_FILE,
    AdapterEntry,
    FileEntry,
    InputEntry,
    Manifest,
    Reproducibility,
    Runtime,
    Source,
    file_entries,
    library_versions,
    make_manifest,
    recipe_json,
)
from phi4mm_export.package.manifest_read import read_manifest
from phi4mm_export.package.write import WrittenFile
from phi4mm_export.pipeline.export_plan import ExportPlan
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import exists


@dataclass(frozen=True)
class Origin:
    """Where an export read from. model: the hub id, None for a folder; folder: the checkpoint's; adapters: roles whose
    adapter came from a folder of its own; package: one that components were taken over from."""

    model: str | None
    folder: Path
    inputs: tuple[InputDigest, ...]
    adapters: tuple[Role, ...] = ()
    package: Path | None = None


def export_manifest(
    plan: ExportPlan, files: Iterable[WrittenFile], origin: Origin, settings: Mapping[str, Any]
) -> Manifest:
    """What the exported package says of itself. Raises PackageError for a borrowed package with a broken manifest."""
    borrowed = _manifest_of(origin.package)
    roles = (*plan.baked, *(role for role in plan.adapter_files if role not in plan.baked))
    return make_manifest(
        file_entries(files, _kept_classes(borrowed, plan)),
        source=Source(
            model=origin.model,
            commit=snapshot_commit(origin.folder) if origin.model else None,
            package_digest=borrowed.package_digest if borrowed else None,
            files=tuple(InputEntry(name=i.name, size=i.nbytes, sha256=i.sha256) for i in origin.inputs),
        ),
        adapters=tuple(
            AdapterEntry(role=role, origin="folder" if role in origin.adapters else "checkpoint") for role in roles
        ),
        recipe=recipe_json(plan.recipe, plan.baked),
        settings=dict(settings),
        quantization=borrowed.quantization if borrowed else (),
        runtime=Runtime(provider=plan.recipe.provider.value),
        libraries=library_versions(),
    )


def _manifest_of(package: Path | None) -> Manifest | None:
    if package is None or not exists(package / MANIFEST_FILE):
        return None
    return read_manifest(package)


def _kept_classes(borrowed: Manifest | None, plan: ExportPlan) -> dict[str, Reproducibility]:
    """Files that are taken over keep their class."""
    entries: tuple[FileEntry, ...] = borrowed.files if borrowed else ()
    return {entry.name: entry.reproducibility for entry in entries if entry.name not in plan.file_names}
