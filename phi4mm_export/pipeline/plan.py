"""`phi4mm plan`: what a package will weigh and what it takes to make and to run it, before a byte is written.

Reads headers only: of a checkpoint's shards (or its config.json alone), or of a package's graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phi4mm_export.checkpoint.digests import input_files
from phi4mm_export.checkpoint.head import HeadChoice
from phi4mm_export.checkpoint.open import Checkpoint
from phi4mm_export.errors import SystemLimitError, UsageError
from phi4mm_export.package.footprint import (
    GraphWeights,
    audio_dims,
    decoder_dims,
    graph_weights,
    has_full_logits,
    vision_dims,
)
from phi4mm_export.package.manifest import recipe_json
from phi4mm_export.package.tokenizer import OPTIONAL_FILES, REQUIRED_FILES
from phi4mm_export.pipeline.export import ExportSettings, config_options, default_jobs, settings_json
from phi4mm_export.pipeline.export_manifest import Origin
from phi4mm_export.pipeline.export_plan import ExportPlan, plan_export
from phi4mm_export.pipeline.plan_memory import ExportMemory, RunDims, RunMemory, Workload, export_memory, run_memory
from phi4mm_export.pipeline.plan_source import OpenedForPlan, open_for_plan, read_package
from phi4mm_export.pipeline.planned_files import PlannedFile, expected_configs, expected_inputs, planned_files
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.footprint import DecoderDims
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.recipe import Recipe
from phi4mm_export.spec.sizes import format_bytes


@dataclass(frozen=True)
class PlanSettings:
    """What a plan is made for.

    max_length: None takes the package's own, or the context length. vram, ram: bytes that the device and the host
    have for this process, None where nothing is to be judged. provider: of a package, None takes the one it names.
    head: as for `export`.
    """

    workload: Workload = field(default_factory=Workload)
    max_length: int | None = None
    provider: Provider | None = None
    vram: int | None = None
    ram: int | None = None
    revision: str | None = None
    head: HeadChoice | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether a budget holds a request of this size, and the largest max_length that does (0: none)."""

    kind: str
    budget: int
    needed: int
    fits: bool
    largest_max_length: int


@dataclass(frozen=True)
class PlanReport:
    """The whole plan. `files`: name and bytes of every file of the finished folder, the manifest's two among them.
    `export` is None for a package; sizes in bytes.
    """

    kind: str
    name: str
    recipe: dict[str, Any] | None
    files: tuple[PlannedFile, ...]
    weights: tuple[GraphWeights, ...]
    export: ExportMemory | None
    run: RunMemory
    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def raise_for_budget(self, *, length_asked: bool) -> None:
        """Raise SystemLimitError for a budget that holds no length that would do.

        length_asked: max_length was asked for, so only that one does; else any that has room for the prompt.
        """
        for verdict in self.verdicts:
            most = verdict.largest_max_length
            if verdict.fits or (not length_asked and most >= self.run.prompt_tokens):
                continue
            raise SystemLimitError(
                f"{format_bytes(verdict.needed)} are needed with max_length {self.run.max_length:,}, found "
                f"{format_bytes(verdict.budget)}; the largest max_length that fits is {most:,}",
                where=f"--{verdict.kind}",
                fix=f"pass --max-length {most}" if most >= self.run.prompt_tokens else "plan for a smaller request",
            )


def plan(
    path: str | Path,
    *,
    recipe: Recipe | None = None,
    adapter_named: bool = False,
    adapter_paths: Mapping[Role, Path] | None = None,
    settings: PlanSettings | None = None,
) -> PlanReport:
    """Plan the export of a checkpoint (folder, folder with config.json alone, or hub id), or the running of a package.

    recipe, adapter_named, adapter_paths: as for `export`; a package has its recipe behind it and takes none of them.
    Raises UsageError for a path that is neither and for a recipe beside a package, CheckpointError and PackageError
    for what cannot be read.
    """
    how = settings or PlanSettings()
    package = read_package(path, how.provider)
    if package is not None:
        if recipe is not None or adapter_paths:
            raise UsageError(
                "expected a checkpoint beside options that choose a recipe, found a package, whose recipe is settled",
                where=str(path),
                fix="leave the options out, or name the checkpoint",
            )
        dims = RunDims(
            decoder_dims(package.config, package.graphs[Component.DECODER]),
            vision_dims(package.graphs[Component.VISION]),
            audio_dims(package.graphs[Component.SPEECH]),
            package.float_type,
            package.provider,
            full_logits=has_full_logits(package.graphs[Component.DECODER]),
            arena_released=package.arena_released,
        )
        weights = [graph_weights(component, model, package.provider) for component, model in package.graphs.items()]
        length = _length(how.max_length or package.max_length, dims.decoder)
        files = tuple(PlannedFile(name, nbytes) for name, nbytes in package.files.items())
        return _report("package", package.name, None, files, weights, None, dims, length, how, ())
    with ExitStack() as stack:
        opened = stack.enter_context(open_for_plan(path, adapter_paths or {}, how.revision, how.head))
        chosen = plan_export(opened.checkpoint, recipe or Recipe.resolve(), adapter_named=adapter_named)
        return _of_export(opened, chosen, adapter_paths or {}, how)


def _of_export(
    opened: OpenedForPlan, chosen: ExportPlan, adapter_paths: Mapping[Role, Path], how: PlanSettings
) -> PlanReport:
    checkpoint, recipe = opened.checkpoint, chosen.recipe
    weights = [graph_weights(graph.built.component, graph.built.model, recipe.provider) for graph in chosen.graphs]
    dims = run_dims(checkpoint, recipe)
    settings = ExportSettings(max_length=how.max_length)
    configs, remark = expected_configs(opened.folder, checkpoint.config, config_options(chosen, settings))
    read = input_files(checkpoint, beside=(*REQUIRED_FILES, *OPTIONAL_FILES), adapter_paths=adapter_paths)
    origin = Origin(opened.model, opened.folder, expected_inputs(read, {}), tuple(adapter_paths))
    files = planned_files(chosen, checkpoint, configs, origin, settings_json(settings))
    warnings = (*checkpoint.warnings, *configs.warnings, *chosen.warnings, *opened.warnings)
    return _report(
        "checkpoint", opened.name, recipe_json(recipe, chosen.baked),
        files, weights,
        export_memory(
            chosen,
            sum(path.stat().st_size for path in read.values()),
            sum(file.nbytes for file in files),
            how.jobs or default_jobs(),
        ),
        dims, configs.max_length, how, (*warnings, *([remark] if remark else ())),
    )  # fmt: skip


def run_dims(checkpoint: Checkpoint, recipe: Recipe) -> RunDims:
    """The sizes that decide memory at run time, of a checkpoint exported by a recipe."""
    return RunDims(
        DecoderDims.of(checkpoint.config),
        checkpoint.config.vision,
        checkpoint.config.audio,
        recipe.float_type,
        recipe.provider,
        full_logits=recipe.full_logits,
        arena_released=False,
    )


def _length(wish: int, dims: DecoderDims) -> int:
    return min(wish, dims.context_length)


def _report(
    kind: str,
    name: str,
    recipe: dict[str, Any] | None,
    files: tuple[PlannedFile, ...],
    weights: Iterable[GraphWeights],
    export: ExportMemory | None,
    dims: RunDims,
    max_length: int,
    how: PlanSettings,
    warnings: tuple[str, ...],
) -> PlanReport:
    listed = tuple(weights)
    run = run_memory(listed, dims, how.workload, max_length)
    verdicts = []
    for label, budget, on_device in (("vram", how.vram, True), ("ram", how.ram, False)):
        if budget is not None:
            verdicts.append(_verdict(label, budget, listed, dims, how.workload, max_length, on_device=on_device))
    if how.workload.prompt_tokens > max_length:
        remark = f"a prompt of {how.workload.prompt_tokens:,} tokens does not fit a max_length of {max_length:,}"
        warnings = (*warnings, remark)
    return PlanReport(kind, name, recipe, files, listed, export, run, tuple(verdicts), warnings)


def _verdict(
    kind: str,
    budget: int,
    weights: tuple[GraphWeights, ...],
    dims: RunDims,
    workload: Workload,
    max_length: int,
    *,
    on_device: bool,
) -> Verdict:
    """Judge a budget by the peak of a request with both media, and find the length that it would hold."""

    def need(length: int) -> int:
        run = run_memory(weights, dims, workload, length)
        return run.device_peak if on_device else run.peak

    most = largest_length(budget, need, dims.decoder.context_length)
    needed = need(max_length)
    return Verdict(kind, budget, needed, needed <= budget, most)


def largest_length(budget: int, need: Callable[[int], int], context: int) -> int:
    """The largest length up to `context` whose need is within the budget; 0 if not one token is. `need` grows."""
    low, high = 0, context
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if need(middle) <= budget else (low, middle - 1)
    return low
