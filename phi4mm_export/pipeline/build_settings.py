"""How a build is carried out, and what a rebuild must find: nothing of it is part of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.errors import UsageError
from phi4mm_export.package.manifest import InputEntry
from phi4mm_export.spec.build_recipe import BuildRecipe, QuantizeMethod
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.on_disk import home_expanded, is_folder


@dataclass(frozen=True)
class BuildSettings:
    """How the work is done. memory_limit in bytes.

    statistics: a folder in which an earlier build kept its Hessians (save_statistics), one folder a graph: with them
    the quantized graphs are the same on every machine, and the manifest says so. Nothing else here changes a byte.
    stream: read a hub model in ranges instead of fetching it; then there are no weights on disk to compare with.
    """

    revision: str | None = None
    stream: bool = False
    jobs: int | None = None
    memory_limit: int | None = None
    work_dir: Path | None = None
    overwrite: bool = False
    statistics: Path | None = None
    save_statistics: Path | None = None


@dataclass(frozen=True)
class Expected:
    """What a rebuild must start from: the input files, and per graph the digests of the calibration samples."""

    inputs: tuple[InputEntry, ...]
    samples: Mapping[Component, tuple[str, ...]]
    check: Callable[[tuple[InputEntry, ...], tuple[InputEntry, ...]], None]
    """Called with the expected and the found inputs before anything is written; raises for another model."""


def statistics_of(folder: Path | None, component: Component) -> Path | None:
    """The folder of one graph's statistics."""
    return None if folder is None else home_expanded(folder).absolute() / component.value


def check_statistics(recipe: BuildRecipe, how: BuildSettings) -> None:
    """Raise UsageError for a graph without kept statistics, and for a folder that would be written over."""
    for component, choices in recipe.quantize.items():
        if choices.method is not QuantizeMethod.GPTQ:
            continue
        kept, place = statistics_of(how.statistics, component), statistics_of(how.save_statistics, component)
        if kept is not None and not is_folder(kept):
            raise UsageError(
                f"expected the {component} graph's statistics, found no folder",
                where=f"--statistics {kept}",
                fix="name the folder that an earlier build was given as --save-statistics",
            )
        if place is not None and (kept is not None or is_folder(place)):
            raise UsageError(
                f"the {component} graph's statistics are there already",
                where=f"--save-statistics {place}",
                fix="name another folder",
            )
