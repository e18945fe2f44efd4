"""What CI asks of `phi4mm plan`: a key for its cache of a build, and whether the disk holds the build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phi4mm_export.cli import render
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.recipe import Recipe
from phi4mm_export.spec.sizes import format_bytes

if TYPE_CHECKING:
    from phi4mm_export.pipeline.plan import PlanReport
    from phi4mm_export.pipeline.plan_build import DiskRoom
    from phi4mm_export.spec.build_recipe import BuildRecipe

Option = typer.Option

RecipeName = Annotated[
    str | None, Option("--recipe", metavar="NAME|FILE", help="Plan what phi4mm build makes of this recipe.")
]
Samples = Annotated[
    str | None, Option("--calibration", metavar="PATH", help="Samples of the build, which --key counts in.")
]
Key = Annotated[
    bool, Option("--key", help="Print one digest over everything that decides the bytes, and nothing else.")
]
CheckDisk = Annotated[
    Path | None, Option(metavar="DIR", help="Exit 6 unless the disk of DIR holds the build at its peak.")
]


def build_recipe(name: str | None) -> BuildRecipe | None:
    """The recipe of that name or file, or None."""
    if name is None:
        return None
    from phi4mm_export.spec.build_recipe_read import read_recipe

    return read_recipe(name).placed()


def length_of(build: BuildRecipe | None) -> int | None:
    """The max_length that the recipe asks for, if any."""
    return None if build is None else build.export.max_length


def show_key(
    model: str,
    recipe: Recipe,
    build: BuildRecipe | None,
    calibration: str | None,
    revision: str | None,
    adapter_paths: Mapping[Role, Path],
    *,
    json: bool,
) -> None:
    """Print the content key: of the build where a recipe is given, else of the export."""
    from phi4mm_export.package.manifest import recipe_json
    from phi4mm_export.pipeline.plan_key import content_key

    choices = {"export": recipe_json(recipe, ())} if build is None else build.resolved().recorded()
    if build is not None:
        calibration, revision = calibration or build.calibration, revision or build.revision
    key = content_key(model, choices=choices, calibration=calibration, revision=revision, adapter_paths=adapter_paths)
    if json:
        render.document({"key": key})
    else:
        render.text(key)


def room_of(
    report: PlanReport,
    folder: Path | None,
    model: str,
    build: BuildRecipe | None,
    recipe: Recipe,
    *,
    streamed: bool,
) -> DiskRoom | None:
    """What the build takes of the disk of `folder`, None where nobody asks."""
    if folder is None:
        return None
    from phi4mm_export.pipeline.plan_build import disk_room

    quantized = () if build is None else build.quantize
    return disk_room(report, folder, model=model, layout=recipe.layout, quantized=quantized, streamed=streamed)


def judge_room(room: DiskRoom | None, folder: Path | None, *, quiet: bool) -> None:
    """Say how much is needed and free. Raises SystemLimitError if that is too little."""
    if room is None or folder is None:
        return
    from phi4mm_export.pipeline.plan_build import require

    require(room, folder)
    if not quiet:
        render.text(f"disk of {folder}: enough, {format_bytes(room.needed)} needed, {format_bytes(room.free)} free")
