"""Whether the disk holds a build, before it starts: the export, each graph that is quantized once more, and the
checkpoint where it has to be fetched first.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.checkpoint.hub import resolve_model
from phi4mm_export.errors import SystemLimitError, UsageError
from phi4mm_export.pipeline.plan import PlanReport
from phi4mm_export.spec.contract import FILE_NAMES, Component, PackageLayout, data_file_name
from phi4mm_export.spec.on_disk import is_folder
from phi4mm_export.spec.sizes import format_bytes


@dataclass(frozen=True)
class DiskRoom:
    """Bytes that a build takes at its peak, of them those of the fetched checkpoint, and bytes that are free."""

    needed: int
    fetched: int
    free: int


def disk_room(
    report: PlanReport,
    folder: Path,
    *,
    model: str | Path,
    layout: PackageLayout = PackageLayout.FLAT,
    quantized: Iterable[Component] = (),
    streamed: bool = False,
) -> DiskRoom:
    """What a build of the planned package takes on the disk of `folder`.

    model: as the build gets it; a hub id counts with its weights, unless they are `streamed`. quantized: graphs whose
    weights are written twice, as exported and quantized.
    Raises UsageError for a plan of a package and for a folder that is not there.
    """
    if report.export is None:
        raise UsageError("expected a checkpoint, found a package", where="--check-disk", fix="pass what is exported")
    if not is_folder(folder):
        raise UsageError("expected a folder, found none", where=f"--check-disk {folder}", fix="make it first")
    sizes = {file.name: file.nbytes for file in report.files}
    again = sum(sizes.get(data_file_name(FILE_NAMES[layout][component]), 0) for component in quantized)
    fetched = 0 if streamed or isinstance(resolve_model(str(model)), Path) else report.export.nbytes_inputs
    return DiskRoom(report.export.disk_peak + again + fetched, fetched, shutil.disk_usage(folder).free)


def require(room: DiskRoom, folder: Path) -> None:
    """Raise SystemLimitError, with both numbers, if the disk is too small."""
    if room.needed > room.free:
        advice = "free some, build on another disk, or take a recipe with smaller weights"
        if room.fetched:
            advice += f"; --stream saves the {format_bytes(room.fetched)} of the fetched checkpoint"
        raise SystemLimitError(
            f"the build needs {room.needed:,} bytes of disk, {room.free:,} are free", where=str(folder), fix=advice
        )
