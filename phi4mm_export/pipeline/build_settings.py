"""How a build is carried out, and what a rebuild must find: nothing of it is part of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.errors import UsageError, some
from phi4mm_export.package.given_folders import WORK_DIR, check_folder
from phi4mm_export.package.manifest import InputEntry
from phi4mm_export.pipeline.quantize_places import check_statistics
from phi4mm_export.pipeline.quantize_samples import check_sample_source
from phi4mm_export.quant.torch_device import open_device
from phi4mm_export.runtime.calibration_sources import SampleKind, find_files
from phi4mm_export.spec.build_recipe import AGAINST_MODEL, AGAINST_NONE, BuildRecipe
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.on_disk import found_at, home_expanded, is_file, is_folder
from phi4mm_export.spec.quantization import Method

REQUEST_KINDS = {"images": SampleKind.IMAGE, "audio": SampleKind.AUDIO, "prompts": SampleKind.PROMPT}
"""What the files under each key of the table [evaluate] hold."""


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


def check_folders(recipe: BuildRecipe, how: BuildSettings) -> None:
    """Judge the work folder, and the folders of statistics graph by graph, before any work.

    Raises UsageError for a graph without kept statistics and for folders that cannot be used.
    """
    if how.work_dir is not None:
        check_folder(how.work_dir, WORK_DIR)
    for component, choices in recipe.quantize.items():
        if choices.method is not Method.GPTQ:
            continue
        kept, place = statistics_of(how.statistics, component), statistics_of(how.save_statistics, component)
        if kept is not None and not is_folder(kept):
            raise UsageError(
                f"expected the {component} graph's statistics, found no folder",
                where=f"--statistics {kept}",
                fix="name the folder that an earlier build was given as --save-statistics",
            )
        check_statistics(kept, place)


def check_devices(recipe: BuildRecipe) -> None:
    """Raise UsageError for a torch device that cannot be used, or would not be, before hours of work."""
    for component, choices in recipe.quantize.items():
        if choices.torch_device is None:
            continue
        place = f"{recipe.name}: quantize.{component}.torch_device"
        if choices.method is not Method.GPTQ:
            raise UsageError(
                f"expected the method gptq beside a torch device, found {choices.method}",
                where=place,
                fix="leave torch_device out",
            )
        open_device(choices.torch_device, where=f"{place} {choices.torch_device}")


def check_sources(recipe: BuildRecipe) -> None:
    """Raise UsageError for samples, requests and a float package that are not there, before hours of work."""
    for component, choices in recipe.quantize.items():
        source = choices.calibration or recipe.calibration
        if source is not None and choices.method is Method.GPTQ:
            check_sample_source(source, component)
    evaluate = recipe.evaluate
    if evaluate.against == AGAINST_NONE:
        return
    if evaluate.against != AGAINST_MODEL and not is_folder(home_expanded(evaluate.against)):
        raise UsageError(
            f"expected the folder of a float package, found {found_at(home_expanded(evaluate.against))}",
            where=f"evaluate.against: {evaluate.against}",
            fix="check the path; model compares with the checkpoint, none with nothing",
        )
    for key, kind in REQUEST_KINDS.items():
        for source in getattr(evaluate, key):
            find_files(source, kind, option=f"evaluate.{key}:")
    missing = [text for text in evaluate.text if not is_file(home_expanded(text))]
    if missing:
        raise UsageError(
            f"expected files, found nothing at {some(missing)}", where="evaluate.text", fix="check the paths"
        )
