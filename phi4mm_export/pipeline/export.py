"""`phi4mm export`: a checkpoint becomes a package, streamed, checked, and published in one step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phi4mm_export.checkpoint.digests import InputDigests, input_files
from phi4mm_export.checkpoint.head import HeadChoice
from phi4mm_export.checkpoint.hub import resolve_model
from phi4mm_export.checkpoint.open import Checkpoint
from phi4mm_export.errors import PackageError, some
from phi4mm_export.package.borrow import copy_borrowed, open_borrowed
from phi4mm_export.package.configs import ConfigOptions, PackageConfigs, package_configs
from phi4mm_export.package.kept import kept_data, waiting_nbytes
from phi4mm_export.package.manifest import write_manifest
from phi4mm_export.package.publish import check_apart, check_target, staged
from phi4mm_export.package.resume import Resume
from phi4mm_export.package.tokenizer import OPTIONAL_FILES, REQUIRED_FILES
from phi4mm_export.package.write import DEFAULT_MEMORY_LIMIT, Effort, Placed, WrittenFile, write_file, write_graph
from phi4mm_export.pipeline.export_adapters import write_adapter_files
from phi4mm_export.pipeline.export_manifest import Origin, export_manifest
from phi4mm_export.pipeline.export_plan import ExportPlan, files_of, plan_export
from phi4mm_export.pipeline.export_source import open_model
from phi4mm_export.pipeline.planned_files import expected_inputs, planned_files, side_files
from phi4mm_export.pipeline.validate import validate
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.genai import CONFIG_FILE
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import home_expanded
from phi4mm_export.spec.recipe import LoraForm, Recipe
from phi4mm_export.weights.self_test import check_arithmetic

SIDE_NBYTES = 48 << 20
"""Room kept for graph files, tokenizer and configs beside the data files."""
MAX_JOBS = 4
"""More threads than this wait for memory, not for work."""


@dataclass(frozen=True)
class ExportSettings:
    """Choices that are not part of the recipe: they change configs or how the work is done, never a weight.

    stream: read a hub model in ranges instead of fetching it. memory_limit: most bytes of weights in work at a time.
    """

    max_length: int | None = None
    memory_budget: int | None = None
    release_arena: bool = False
    original_audio_limit: bool = False
    revision: str | None = None
    head: HeadChoice | None = None
    stream: bool = False
    jobs: int | None = None
    memory_limit: int | None = None
    work_dir: Path | None = None
    overwrite: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class ExportReport:
    """What was written (or, with dry_run, would be). `files` are all of the finished folder, the manifest's two among
    them; `nbytes` is their sum."""

    path: Path
    recipe: Recipe
    baked: tuple[Role, ...]
    files: tuple[WrittenFile, ...]
    warnings: tuple[str, ...]
    nbytes: int
    nbytes_read: int
    kv_nbytes_per_token: int
    max_length: int
    dry_run: bool


Progress = Callable[[int, int], None]
"""Called with the bytes written so far and in all."""


def export(
    model: str | Path,
    output: str | Path,
    *,
    recipe: Recipe | None = None,
    adapter_named: bool = False,
    adapter_paths: Mapping[Role, Path] | None = None,
    from_package: Path | None = None,
    settings: ExportSettings | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Turn a checkpoint (folder or hub id) into the package folder `output`.

    adapter_named: the recipe's adapter was asked for by name, so its absence is an error. adapter_paths: PEFT folders
    that replace the built-in adapter of their role. from_package: a package from which the components that are not
    exported, the processors and the tokenizer are taken unchanged. What a killed run had finished is used again, if
    everything that decides its bytes is still the same; with `settings.work_dir`, also after an error.

    Raises CheckpointError for an unusable checkpoint or adapter, PackageError when the result would break the
    contract, UsageError and SystemLimitError as their names say. After an error nothing stands under `output`.
    """
    check_arithmetic()
    chosen, how = recipe or Recipe.resolve(), settings or ExportSettings()
    target = home_expanded(output).absolute()
    check_target(target, overwrite=how.overwrite)
    adapter_paths = adapter_paths or {}
    check_apart(target, reads=(model, *adapter_paths.values()), writes=(how.work_dir,), replaced=from_package)
    with ExitStack() as stack:
        opened = stack.enter_context(
            open_model(
                model,
                revision=how.revision,
                adapter_paths=adapter_paths,
                head=how.head,
                stream=how.stream,
                progress=progress,
            )
        )
        checkpoint = opened.checkpoint
        plan = plan_export(checkpoint, chosen, adapter_named=adapter_named)
        borrowed = open_borrowed(from_package, plan.recipe.components, plan.file_names) if from_package else None
        configs = package_configs(checkpoint.path, checkpoint.config, config_options(plan, how))
        read = input_files(checkpoint, beside=(*REQUIRED_FILES, *OPTIONAL_FILES), adapter_paths=adapter_paths)
        origin = Origin(model_id(model), opened.folder, (), tuple(adapter_paths), from_package)
        if how.dry_run:
            origin = replace(origin, inputs=expected_inputs(read, opened.stated))
            planned = planned_files(plan, checkpoint, configs, origin, settings_json(how), borrowed)
            unwritten = tuple(WrittenFile(file.name, file.nbytes, "") for file in planned)
            return _report(target, plan, checkpoint, configs, unwritten, dry_run=True)
        need = plan.nbytes + SIDE_NBYTES + (borrowed.nbytes if borrowed else 0)
        need -= waiting_nbytes(how.work_dir, target.parent)
        folder = stack.enter_context(staged(target, overwrite=how.overwrite, need=need, keep_left=True))
        on_disk = {name: path for name, path in read.items() if name not in opened.stated}
        digests = stack.enter_context(InputDigests(on_disk, checkpoint.sources))
        kept = stack.enter_context(
            kept_data(folder, tuple(files_of(plan)), digests.content_of, work_dir=how.work_dir, need=plan.nbytes)
        )
        files = _write_graphs(folder, plan, _effort(how, kept.place), progress)
        kept.deliver([file for file in files if file.name in files_of(plan)])
        if plan.recipe.lora is LoraForm.ADAPTERS and Component.DECODER in plan.recipe.components:
            files += write_adapter_files(folder, checkpoint, plan.recipe.float_type)
        if borrowed:
            ours = json.loads(configs.files[CONFIG_FILE])
            files += copy_borrowed(borrowed, folder, plan.recipe.components, ours)
        else:
            files += [write_file(folder, name, data) for name, data in side_files(plan, configs).items()]
        origin = replace(origin, inputs=opened.digests(digests.result()))
        files += write_manifest(folder, export_manifest(plan, files, origin, settings_json(how)))
        if borrowed or set(plan.recipe.components) == set(Component):
            check_staged(folder, plan.recipe.provider, borrowed=from_package)
    return _report(target, plan, checkpoint, configs, tuple(files), dry_run=False)


def model_id(model: str | Path) -> str | None:
    """The hub id that `model` is, None for a folder."""
    found = resolve_model(str(model))
    return found if isinstance(found, str) else None


def _effort(how: ExportSettings, resume: Resume | None) -> Effort:
    return Effort(how.jobs or default_jobs(), how.memory_limit or DEFAULT_MEMORY_LIMIT, resume)


def default_jobs() -> int:
    """Threads when none were asked for: one per core, at most MAX_JOBS."""
    return max(1, min(MAX_JOBS, os.cpu_count() or 1))


def check_staged(folder: Path, provider: Provider, *, borrowed: Path | None = None) -> None:
    """Judge the finished folder before it is published.

    borrowed: the package from which a part of it comes. Raises PackageError with the first findings: such a package
    must never appear under the target's name.
    """
    report = validate(folder, provider=provider)
    if not report.ok:
        faults = [f"{finding.where}: {finding.what}" for finding in report.errors]
        raise PackageError(
            f"the exported package would break its contract in {len(faults)} places: {some(faults, 3)}",
            where=folder.name,
            fix="this is a bug of phi4mm: please report it"
            if borrowed is None
            else "check with phi4mm validate the package that --from-package names, and that it is of this model",
        )


def _write_graphs(folder: Path, plan: ExportPlan, effort: Effort, progress: Progress | None) -> list[WrittenFile]:
    done, total = 0, plan.nbytes

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, total), total)

    files: list[WrittenFile] = []
    in_decoder: Mapping[str, Placed] = {}
    for graph in plan.graphs:
        shared = {name: in_decoder[there] for name, there in graph.borrowed.items()}
        written = write_graph(
            graph.built.model, graph.streams, folder, graph.file_name, shared=shared, effort=effort, on_bytes=count
        )
        if graph.built.component is Component.DECODER:
            in_decoder = written.placed
        files += written.files
    return files


def settings_json(how: ExportSettings) -> dict[str, Any]:
    """The settings that change a byte of the package, as the manifest records them."""
    return {
        "max_length": how.max_length,
        "memory_budget": how.memory_budget,
        "release_arena": how.release_arena,
        "original_audio_limit": how.original_audio_limit,
        "head": None if how.head is None else str(how.head),
    }


def config_options(plan: ExportPlan, how: ExportSettings) -> ConfigOptions:
    recipe = plan.recipe
    return ConfigOptions(
        layout=recipe.layout,
        provider=recipe.provider,
        float_type=recipe.float_type,
        max_length=how.max_length,
        memory_budget=how.memory_budget,
        adapters=plan.adapter_files,
        release_arena=how.release_arena,
        original_audio_limit=how.original_audio_limit,
    )


def _report(
    target: Path,
    plan: ExportPlan,
    checkpoint: Checkpoint,
    configs: PackageConfigs,
    files: tuple[WrittenFile, ...],
    *,
    dry_run: bool,
) -> ExportReport:
    return ExportReport(
        path=target,
        recipe=plan.recipe,
        baked=plan.baked,
        files=files,
        warnings=(*checkpoint.warnings, *configs.warnings, *plan.warnings),
        nbytes=sum(file.nbytes for file in files),
        nbytes_read=plan.nbytes_read,
        kv_nbytes_per_token=configs.kv_bytes_per_token,
        max_length=configs.max_length,
        dry_run=dry_run,
    )
