"""Build a package by a recipe: export, quantize, judge, describe, in one step and again to the byte.

RECIPE is a name (--list shows them) or a TOML file. Model, output and calibration samples may stand in the file too.

Example: phi4mm build int8-gated --model microsoft/Phi-4-multimodal-instruct -o phi4mm-int8

Example: phi4mm build int8-gptq --model ./checkpoint --calibration pages/ -o out --set quantize.vision.block_size=64
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phi4mm_export.cli import render
from phi4mm_export.cli.choices import adapter_paths as paths_of
from phi4mm_export.cli.export_options import AdapterPath, Jobs, MemoryLimit, Revision, Stream
from phi4mm_export.cli.options import JsonFlag, Overwrite, Quiet
from phi4mm_export.errors import UsageError

if TYPE_CHECKING:
    from phi4mm_export.pipeline.build import BuildResult

Option = typer.Option


def command(
    recipe: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE", help="Named recipe, or a file.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, Option("--model", metavar="CHECKPOINT", help="Folder of a checkpoint, or a hub id.")
    ] = None,
    output: Annotated[Path | None, Option("--output", "-o", metavar="DIR", help="Package folder to write.")] = None,
    calibration: Annotated[
        str | None, Option(metavar="PATH|GLOB|LIST|ZIP|builtin", help="Samples for the graphs that are calibrated.")
    ] = None,
    set_values: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Put a value over the recipe's; repeatable.")
    ] = None,
    against: Annotated[
        str | None,
        Option(metavar="model|PATH|none", help="Compare with the float form, and apply the recipe's gates."),
    ] = None,
    adapter_path: AdapterPath = None,
    revision: Revision = None,
    stream: Stream = False,
    jobs: Jobs = None,
    memory_limit: MemoryLimit = None,
    work_dir: Annotated[Path | None, Option(metavar="DIR", help="Keep finished stages here after an error.")] = None,
    save_statistics: Annotated[
        Path | None, Option(metavar="DIR", help="Keep the Hessians of calibrated graphs there.")
    ] = None,
    statistics: Annotated[
        Path | None, Option(metavar="DIR", help="Use kept Hessians: the same bytes on any machine.")
    ] = None,
    overwrite: Overwrite = False,
    list_names: Annotated[bool, Option("--list", help="Name the recipes, and stop.")] = False,
    show: Annotated[bool, Option("--show", help="Print the whole resolved recipe as TOML, and stop.")] = False,
    json: JsonFlag = False,
    quiet: Quiet = False,
) -> None:
    if list_names:
        list_recipes(json=json)
        return
    if recipe is None:
        raise UsageError("expected a recipe, found none", where="RECIPE", fix="name one of: phi4mm build --list")
    values = [*(set_values or ()), *([f"evaluate.against={against}"] if against is not None else [])]
    if show:
        show_recipe(recipe, values, json=json)
        return
    from phi4mm_export.cli.quantize import layer_progress
    from phi4mm_export.pipeline.build import BuildSettings, build
    from phi4mm_export.spec.sizes import parse_bytes

    settings = BuildSettings(
        revision=revision,
        stream=stream,
        jobs=jobs,
        memory_limit=parse_bytes(memory_limit, where="--memory-limit") if memory_limit else None,
        work_dir=work_dir,
        overwrite=overwrite,
        statistics=statistics,
        save_statistics=save_statistics,
    )
    with render.progress("build", quiet=quiet or json) as progress:
        result = build(
            recipe,
            output,
            model=model,
            calibration=calibration,
            set_values=values,
            adapter_paths=paths_of(adapter_path, None),
            settings=settings,
            on_stage=None if quiet or json else render.note,
            on_bytes=progress,
            on_layer=None if quiet or json else layer_progress(),
        )
    render.warnings(result.warnings, quiet=quiet or json)
    if json:
        render.document(as_json(result))
    elif not quiet:
        show_result(result)


def list_recipes(*, json: bool) -> None:
    """The named recipes with their descriptions."""
    from phi4mm_export.spec.build_recipe_read import read_recipe, recipe_names

    recipes = [read_recipe(name) for name in recipe_names()]
    if json:
        render.document([{"name": each.name, "description": each.description} for each in recipes])
        return
    width = max(len(each.name) for each in recipes)
    for each in recipes:
        render.text(f"{each.name:<{width}}  {each.description}")


def show_recipe(recipe: str, values: list[str], *, json: bool) -> None:
    """A recipe with every choice filled in, as a file that may be edited and built."""
    from phi4mm_export.spec.build_recipe_read import read_recipe, toml_text

    found = read_recipe(recipe, values).resolved().plain()
    if json:
        render.document(found)
    else:
        render.stream(toml_text(found))


def as_json(result: BuildResult) -> dict[str, Any]:
    """The result as plain values in a fixed order."""
    return {
        "path": str(result.path),
        "recipe": result.recipe.recorded(),
        "package_digest": result.manifest.package_digest,
        "recipe_digest": result.manifest.recipe_digest,
        "reproducibility": result.reproducibility.value,
        "bytes": result.nbytes,
        "gates": {name: dict(gate) for name, gate in result.measured.gates.items()},
        "evaluation": None if result.measured.evaluation is None else dict(result.measured.evaluation),
        "reused": list(result.reused),
        "warnings": list(result.warnings),
        "files": [{"name": file.name, "size": file.nbytes, "sha256": file.sha256} for file in result.files],
    }


def show_result(result: BuildResult) -> None:
    """The result for people: where it stands, what was measured, which digest it has."""
    from phi4mm_export.spec.sizes import format_bytes

    render.text(f"{result.path}: {result.recipe.name}, {format_bytes(result.nbytes)} in {len(result.files)} files")
    for name, gate in result.measured.gates.items():
        render.text(
            f"{name} on {gate['samples']} {gate['judged_on']}: relative L2 {gate['mean_rel_l2']:.4g}, "
            f"allowed {gate['allowed']:g}"
        )
    for component in (result.measured.evaluation or {}).get("components", ()):
        worst = component["relative_l2_worst"]
        render.text(f"{component['component']}: relative L2 {worst if worst is not None else '-'} at worst")
    if result.measured.evaluation is None:
        render.text("not compared with its float form (--against model does, and applies the recipe's gates)")
    if result.reused:
        render.text(f"used again: {', '.join(result.reused)}")
    render.text(f"package digest {result.manifest.package_digest} ({result.reproducibility})")
