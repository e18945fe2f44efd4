"""`phi4mm build`: one recipe from a checkpoint to a judged, described and checksummed package.

export -> quantize (each graph the recipe names) -> validate -> evaluate -> model card, manifest, SHA256SUMS -> publish.
Everything happens in one staging folder; finished stages are used again by content (build_stages.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phi4mm_export.checkpoint.digests import InputDigests, input_files
from phi4mm_export.checkpoint.head import HeadChoice
from phi4mm_export.checkpoint.hub import fetch_checkpoint, snapshot_commit
from phi4mm_export.errors import UsageError
from phi4mm_export.package.manifest import (
    MANIFEST_FILE,
    SUMS_FILE,
    InputEntry,
    Manifest,
    Reproducibility,
    changed_manifest,
    file_entries,
    write_manifest,
)
from phi4mm_export.package.manifest_read import read_manifest
from phi4mm_export.package.model_card import CARD_FILE
from phi4mm_export.package.publish import check_apart, check_target, staged
from phi4mm_export.package.source_card import LICENSE_FILES, SourceCard, read_source_card
from phi4mm_export.package.tokenizer import OPTIONAL_FILES, REQUIRED_FILES
from phi4mm_export.package.write import WrittenFile, write_file
from phi4mm_export.pipeline.build_card import card_entry, card_text
from phi4mm_export.pipeline.build_measure import EVALUATE, Measured, check_comparison, measure
from phi4mm_export.pipeline.build_quantize import OnLayer, QuantizeStep, quantized, same_samples
from phi4mm_export.pipeline.build_settings import BuildSettings as BuildSettings
from phi4mm_export.pipeline.build_settings import Expected as Expected
from phi4mm_export.pipeline.build_settings import check_devices, check_folders, check_sources, statistics_of
from phi4mm_export.pipeline.build_stages import Stage, Stages, deliver, open_stages, stage_key
from phi4mm_export.pipeline.export import ExportSettings, check_staged, export, model_id
from phi4mm_export.pipeline.export_source import OpenedModel, open_model
from phi4mm_export.pipeline.quantize import default_rotation
from phi4mm_export.spec.build_recipe import AGAINST_MODEL, BuildRecipe, check_places
from phi4mm_export.spec.build_recipe_read import read_recipe
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import home_expanded, is_file

EXPORT = "export"
OnStage = Callable[[str], None]
"""Called with one line before each stage."""
OnBytes = Callable[[int, int], None]
"""Called with the bytes exported so far and in all."""


@dataclass(frozen=True)
class BuildResult:
    """What was built. `reused` names the stages that an earlier run had finished."""

    path: Path
    recipe: BuildRecipe
    manifest: Manifest
    files: tuple[WrittenFile, ...]
    measured: Measured
    warnings: tuple[str, ...]
    reused: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def reproducibility(self) -> Reproducibility:
        """The weakest class among the files."""
        order = list(Reproducibility)
        return max((entry.reproducibility for entry in self.manifest.files), key=order.index)


@dataclass(frozen=True)
class _Job:
    """A build with everything resolved. `opened` is the checkpoint, open for as long as the job lasts."""

    recipe: BuildRecipe
    model: str
    opened: OpenedModel
    source: SourceCard
    adapter_paths: Mapping[Role, Path]
    settings: BuildSettings
    expected: Expected | None
    on_stage: OnStage
    on_bytes: OnBytes | None
    on_layer: OnLayer | None

    @property
    def steps(self) -> tuple[QuantizeStep, ...]:
        """The graphs to quantize, in order."""
        return tuple(
            QuantizeStep(
                component,
                choices,
                choices.calibration or self.recipe.calibration,
                self.settings.jobs,
                None if self.expected is None else self.expected.samples.get(component, ()),
                statistics_of(self.settings.statistics, component),
                statistics_of(self.settings.save_statistics, component),
                self.on_layer,
            )
            for component, choices in self.recipe.quantize.items()
        )


def build(
    recipe: BuildRecipe | str | Path,
    target: str | Path | None = None,
    *,
    model: str | Path | None = None,
    calibration: str | Path | None = None,
    set_values: Sequence[str] = (),
    adapter_paths: Mapping[Role, Path] | None = None,
    settings: BuildSettings | None = None,
    expected: Expected | None = None,
    on_stage: OnStage | None = None,
    on_bytes: OnBytes | None = None,
    on_layer: OnLayer | None = None,
) -> BuildResult:
    """Carry out a recipe: a name, the path of a TOML file, or a `BuildRecipe`.

    target, model, calibration: in place of the recipe's own. set_values: `key=value` put over a named recipe or a file.
    expected: what a rebuild must find.

    Raises UsageError for faults of the recipe and for what is missing, QualityError for a missed gate, PackageError for
    a package that breaks its contract, else what the steps raise. After an error nothing stands under the
    target's name.
    """
    read = recipe if isinstance(recipe, BuildRecipe) else read_recipe(recipe, set_values)
    read = read.placed()
    chosen = _with_rotation(read.resolved())
    chosen = replace(chosen, calibration=chosen.calibration if calibration is None else str(calibration))
    how = settings or BuildSettings()
    check_places(chosen, with_statistics=how.statistics is not None)
    check_folders(chosen, how)
    check_sources(chosen)
    check_devices(chosen)
    if how.stream and chosen.evaluate.against == AGAINST_MODEL:
        raise UsageError(
            "a streamed model has no weights on disk that a package could be compared with",
            where="--stream",
            fix="leave --stream out, or the comparison: --against none",
        )
    output = home_expanded(_given(target or chosen.output, "output", "-o OUT")).absolute()
    check_target(output, overwrite=how.overwrite)
    source = str(_given(model or chosen.model, "model", "--model MODEL"))
    own = recipe if isinstance(recipe, str | Path) and is_file(Path(recipe)) else None
    check_apart(
        output,
        reads=(own, source, *(adapter_paths or {}).values(), how.statistics, *_read_by(chosen)),
        writes=(how.work_dir, how.save_statistics),
    )
    with ExitStack() as stack:
        opened = stack.enter_context(
            open_model(
                source,
                revision=how.revision or chosen.revision,
                adapter_paths=adapter_paths or {},
                head=_head(chosen),
                stream=how.stream,
                progress=on_bytes,
            )
        )
        job = _Job(
            chosen,
            source,
            opened,
            read_source_card(_with_card(source, opened.folder)),
            adapter_paths or {},
            how,
            expected,
            on_stage or (lambda _: None),
            on_bytes,
            on_layer,
        )
        if chosen.evaluate.against == AGAINST_MODEL:
            check_comparison(chosen, opened.folder, job.adapter_paths, output.parent)
        if expected is not None:
            job.on_stage("comparing the model with the recorded one")
            expected.check(expected.inputs, (*_inputs(job), *_described(job.source)))
        package = stack.enter_context(staged(output, overwrite=how.overwrite, keep_left=True))
        names = (EXPORT, *(step.name for step in job.steps))
        stages = stack.enter_context(open_stages(package, how.work_dir, names))
        last, reused = _last_stage(job, stages, names)
        return _finish(job, output, package, stages, last, reused)


def _with_rotation(recipe: BuildRecipe) -> BuildRecipe:
    """The recipe with the quantizer's own answer to whether inputs are rotated, where it gives none."""
    quantize = {
        part: each if each.rotate is not None else replace(each, rotate=default_rotation(part, each.method))
        for part, each in recipe.quantize.items()
    }
    return replace(recipe, quantize=quantize)


def _read_by(recipe: BuildRecipe) -> Iterator[str | None]:
    """The samples, requests and packages that a recipe names."""
    yield recipe.calibration
    yield recipe.evaluate.against
    for choices in recipe.quantize.values():
        yield choices.calibration
    for texts in recipe.evaluate.sources(str).values():
        yield from texts


def _given(value: str | Path | None, key: str, option: str) -> str | Path:
    if value is None:
        raise UsageError(f"the recipe names no {key}, and none was given", where=option, fix=f"give {option}")
    return value


def _head(recipe: BuildRecipe) -> HeadChoice | None:
    return None if recipe.export.head is None else recipe.export.head.value


def _last_stage(job: _Job, stages: Stages, names: Sequence[str]) -> tuple[Stage, tuple[str, ...]]:
    """The finished package, before it is judged, and which stages an earlier run had finished."""
    stage = _left_stage(job, stages, names)
    reused = names[: names.index(stage.name) + 1] if stage else ()
    if stage is None:
        stage = _exported(job, stages)
    for step in job.steps[names.index(stage.name) :]:
        job.on_stage(f"quantizing the {step.component} graph")
        stage = quantized(step, stage, stages)
    return stage, tuple(reused)


def _with_card(model: str, folder: Path) -> Path:
    """The checkpoint's folder; of a hub model, with card and licence, which an export alone does not fetch."""
    named, commit = model_id(model), snapshot_commit(folder)
    if named is None or commit is None:
        return folder
    return fetch_checkpoint(named, revision=commit, patterns=(CARD_FILE, *LICENSE_FILES))


def _left_stage(job: _Job, stages: Stages, names: Sequence[str]) -> Stage | None:
    """The last stage that an earlier run finished from the same inputs; those after it are taken apart again."""
    stages.keep_only((*names, EVALUATE))
    if not stages.known():
        for name in names:
            stages.forget(name)
        return None
    job.on_stage("looking at what an earlier run finished")
    keys = [_export_key(job, _inputs(job))]
    for step in job.steps:
        keys.append(step.key(after=keys[-1]))
    for number in reversed(range(len(names))):
        stage = stages.finished(names[number], keys[number])
        if stage is not None and (number == 0 or same_samples(job.steps[number - 1], stage, stages)):
            return stage
        if number:
            stages.give_back(names[number - 1], stages.place(names[number]))
        stages.forget(names[number])
    return None


def _exported(job: _Job, stages: Stages) -> Stage:
    job.on_stage("exporting")
    export_choices, how = job.recipe.export, job.settings
    settings = ExportSettings(
        max_length=export_choices.max_length,
        memory_budget=export_choices.memory_budget,
        release_arena=export_choices.release_arena,
        original_audio_limit=export_choices.original_audio_limit,
        revision=how.revision or job.recipe.revision,
        head=_head(job.recipe),
        stream=how.stream,
        jobs=how.jobs,
        memory_limit=how.memory_limit,
    )
    report = export(
        job.model,
        stages.place(EXPORT),
        recipe=export_choices.recipe(),
        adapter_named=export_choices.adapter is not None,
        adapter_paths=job.adapter_paths,
        settings=settings,
        progress=job.on_bytes,
    )
    source = read_manifest(stages.place(EXPORT)).source
    key = _export_key(job, () if source is None else source.files)
    return stages.finish(EXPORT, key, report.files, {"warnings": list(report.warnings)})


def _export_key(job: _Job, inputs: Sequence[InputEntry]) -> str:
    facts = {
        "recipe": job.recipe.plain()["export"],
        "inputs": [[entry.name, entry.sha256] for entry in sorted(inputs, key=lambda entry: entry.name)],
        "commit": snapshot_commit(job.opened.folder) if model_id(job.model) else None,
        "model": model_id(job.model),
    }
    return stage_key(EXPORT, facts)


def _inputs(job: _Job) -> tuple[InputEntry, ...]:
    """Name, size and digest of every file that an export of this checkpoint reads."""
    beside = (*REQUIRED_FILES, *OPTIONAL_FILES)
    read = input_files(job.opened.checkpoint, beside=beside, adapter_paths=job.adapter_paths)
    with InputDigests({name: path for name, path in read.items() if name not in job.opened.stated}) as digests:
        found = job.opened.digests(digests.result())
    return tuple(InputEntry(name=d.name, size=d.nbytes, sha256=d.sha256) for d in found)


def _finish(
    job: _Job, output: Path, package: Path, stages: Stages, last: Stage, reused: tuple[str, ...]
) -> BuildResult:
    """Judge the last stage, describe it, and put it where it is published from."""
    job.on_stage("validating")
    check_staged(last.folder, job.recipe.export.ep)
    measured = measure(
        job.recipe.evaluate,
        last,
        stages,
        model=job.opened.folder,
        adapter_paths=job.adapter_paths,
        head=_head(job.recipe),
        on_stage=job.on_stage,
    )
    job.on_stage("writing the model card and the manifest")
    manifest, licence = read_manifest(last.folder), job.source.license_text
    added = [write_file(package, *licence)] if licence else []
    manifest = changed_manifest(manifest, (*manifest.files, *file_entries(added)))
    text = card_text(last.folder, manifest, job.recipe, job.source, measured)
    files = [*deliver(last, package, left_out=(MANIFEST_FILE, SUMS_FILE)), *added]
    card = write_file(package, CARD_FILE, text.encode("utf-8"))
    manifest = changed_manifest(
        manifest,
        (*manifest.files, card_entry(card, measured)),
        build=job.recipe.recorded(),
        source=_source(manifest, job.source),
    )
    files += [card, *write_manifest(package, manifest)]
    if measured.reused:
        reused = (*reused, EVALUATE)
    warnings = tuple(dict.fromkeys(last.facts.get("warnings", ())))
    return BuildResult(output, job.recipe, manifest, tuple(files), measured, warnings, reused)


def _source(manifest: Manifest, card: SourceCard) -> Any:
    """The manifest's source with the card that was read, and the licence."""
    source = manifest.source
    if source is None:
        return source
    files = tuple(sorted((*source.files, *_described(card)), key=lambda each: each.name))
    return source.model_copy(update={"files": files})


def _described(card: SourceCard) -> list[InputEntry]:
    """The source's card and licence as inputs."""
    found = [] if card.file is None else [InputEntry(name=CARD_FILE, size=card.file.nbytes, sha256=card.file.sha256)]
    if card.license_text is not None:
        name, data = card.license_text
        found.append(InputEntry(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest()))
    return found
