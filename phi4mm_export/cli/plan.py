"""Say what an export will write and what the package takes to make and to run, from headers alone.

CHECKPOINT is a folder, a folder with config.json alone, or a hub id.

Example: phi4mm plan microsoft/Phi-4-multimodal-instruct --precision int4 --ram 8GiB --prompt-tokens 3344 --crops 5
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phi4mm_export.cli import export_options as options
from phi4mm_export.cli import plan_build, render
from phi4mm_export.cli.choices import adapter_paths, adapter_role
from phi4mm_export.cli.options import MANIFEST_FILES, MANIFEST_NAMES, JsonFlag, Quiet
from phi4mm_export.spec.contract import PackageLayout, Provider
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.recipe import LoraForm, Precision
from phi4mm_export.spec.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from phi4mm_export.pipeline.plan import PlanReport, PlanSettings
    from phi4mm_export.pipeline.plan_build import DiskRoom
    from phi4mm_export.pipeline.plan_fit import Candidate

Option = typer.Option


def command(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="CHECKPOINT|PACKAGE", help="Folder, or hub id.")],
    max_length: options.MaxLength = None,
    ep: Annotated[str | None, Option(metavar="cpu|cuda", help="Provider; of a package, the one it names.")] = None,
    vram: Annotated[str | None, Option(metavar="SIZE", help="Memory of the GPU to judge by, as 12GiB.")] = None,
    ram: Annotated[str | None, Option(metavar="SIZE", help="Memory of the host to judge by, for example 8GiB.")] = None,
    prompt_tokens: Annotated[int, Option(min=1, help="Tokens of the prompt, placeholders included.")] = 3344,
    crops: Annotated[int, Option(min=0, help="Crops of all images, each image's global one included.")] = 5,
    seconds: Annotated[float, Option(min=0, help="Seconds of audio.")] = 30.0,
    precision: options.DecoderPrecision = Precision.INT8,
    encoder_precision: options.EncoderWeights = None,
    embedding_precision: options.TableWeights = None,
    lora_precision: options.LoraWeights = None,
    block_size: options.BlockSize = None,
    accuracy_level: options.AccuracyLevel = None,
    rotate: options.Rotate = None,
    lora: options.Form = LoraForm.GATED,
    adapter: options.Adapter = None,
    adapter_path: options.AdapterPath = None,
    layout: options.FileLayout = PackageLayout.FLAT,
    full_logits: options.FullLogits = False,
    head: options.HeadChoice = None,
    revision: options.Revision = None,
    jobs: options.Jobs = None,
    fit: Annotated[str | None, Option(metavar="SIZE", help="Search the recipes that run in this memory.")] = None,
    errors: Annotated[
        Path | None, Option(metavar="FILE", help="JSON: error by recipe (int4, or int4/int8/fp16/gated), for --fit.")
    ] = None,
    recipe_name: plan_build.RecipeName = None,
    calibration: plan_build.Samples = None,
    key: plan_build.Key = False,
    check_disk: plan_build.CheckDisk = None,
    stream: options.Stream = False,
    json: JsonFlag = False,
    quiet: Quiet = False,
) -> None:
    from phi4mm_export.pipeline.plan import PlanSettings, plan
    from phi4mm_export.pipeline.plan_memory import Workload
    from phi4mm_export.pipeline.plan_source import is_package
    from phi4mm_export.spec.phi4mm_config import parse_provider
    from phi4mm_export.spec.recipe import Recipe

    build = plan_build.build_recipe(recipe_name)
    settings = PlanSettings(
        workload=Workload(prompt_tokens, crops, seconds),
        max_length=max_length or plan_build.length_of(build),
        provider=parse_provider(ep) if ep else None,
        vram=parse_bytes(vram, where="--vram") if vram else None,
        ram=parse_bytes(ram, where="--ram") if ram else None,
        revision=revision,
        head=head.value if head else None,
        jobs=jobs,
    )
    paths, provider = adapter_paths(adapter_path, adapter), parse_provider(ep or "cpu")
    choices: dict[str, Any] = {
        "precision": precision, "embedding_precision": embedding_precision, "lora_precision": lora_precision,
        "encoder_precision": Precision(encoder_precision) if encoder_precision else None,
        "block_size": block_size, "accuracy_level": accuracy_level, "rotate": rotate,
        "lora": lora, "adapter": adapter_role(adapter), "layout": layout, "full_logits": full_logits,
    }  # fmt: skip
    given = {name: value for name, value in choices.items() if _is_given(ctx, name)}
    _refuse_idle(fit, errors, budgets=bool(vram or ram), both=bool(build and given))
    if fit is not None:
        _search(model, fit, provider, given, paths, errors, settings, json=json)
        return
    recipe, named = Recipe.resolve(provider=provider, **choices), adapter is not None
    if build is not None:
        recipe, named = build.export.recipe(), build.export.adapter is not None
    if key:
        plan_build.show_key(model, recipe, build, calibration, revision, paths, json=json)
        return
    wanted = recipe if given or build or not is_package(model) else None
    report = plan(model, recipe=wanted, adapter_named=named, adapter_paths=paths, settings=settings)
    render.warnings(report.warnings, quiet=quiet or json)
    room = plan_build.room_of(report, check_disk, model, build, recipe, streamed=stream)
    _present(report, room, json=json)
    plan_build.judge_room(room, check_disk, quiet=json)
    report.raise_for_budget(length_asked=max_length is not None)


def _present(report: PlanReport, room: DiskRoom | None, *, json: bool) -> None:
    if json:
        render.document(as_json(report) | ({"disk": asdict(room)} if room else {}))
    else:
        _show(_lines(report))


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Whether a parameter was typed, not filled in from its default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_idle(fit: str | None, errors: Path | None, *, budgets: bool, both: bool) -> None:
    """Raise UsageError for options that would change nothing."""
    from phi4mm_export.errors import UsageError

    if fit is None and errors is not None:
        raise UsageError("figures are used by a search only", where="--errors", fix="add --fit SIZE, or leave them out")
    if fit is not None and budgets:
        raise UsageError("a search has one budget, that of --fit", where="--vram, --ram", fix="leave these two out")
    if both:
        raise UsageError("a recipe settles what --precision, --lora and the like choose", where="--recipe",
                         fix="leave one side out")  # fmt: skip


def _search(
    model: str,
    budget: str,
    provider: Provider,
    given: Mapping[str, Any],
    paths: Mapping[Role, Path],
    errors: Path | None,
    settings: PlanSettings,
    *,
    json: bool,
) -> None:
    from phi4mm_export.pipeline.plan_fit import check_labels
    from phi4mm_export.pipeline.plan_fit import fit as search

    nbytes, figures = parse_bytes(budget, where="--fit"), _errors(errors)
    check_labels(figures, where=str(errors))
    found = search(
        model, nbytes, provider=provider, given=given, adapter_paths=paths, errors=figures, settings=settings
    )
    if json:
        render.document([{"label": one.label, **asdict(one)} for one in found])
    else:
        _show(_fit_lines(found, budget))


def as_json(report: PlanReport) -> dict[str, Any]:
    """The plan as plain values in a fixed order."""
    return {
        "kind": report.kind,
        "name": report.name,
        "bytes": report.nbytes,
        **{key: value for key, value in asdict(report).items() if key not in ("kind", "name")},
    }


def _errors(path: Path | None) -> dict[str, float]:
    if path is None:
        return {}
    from phi4mm_export.errors import UsageError
    from phi4mm_export.spec.json_text import read_object

    raw = read_object(path, error=UsageError)
    wrong = [key for key, value in raw.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong:
        raise UsageError(f"expected a number for {wrong[0]}", where=str(path), fix='write for example {"int4": 0.08}')
    return {key: float(value) for key, value in raw.items()}


def _show(lines: Iterator[str]) -> None:
    for line in lines:
        render.text(line)


def _lines(report: PlanReport) -> Iterator[str]:
    run = report.run
    sealed = f" with {MANIFEST_NAMES}" if any(file.name in MANIFEST_FILES for file in report.files) else ""
    yield f"{report.kind} {report.name}: {format_bytes(report.nbytes)} in {len(report.files)} files{sealed}"
    for file in report.files:
        yield f"  {file.nbytes:>15,}  {file.name}"
    if report.export is not None:
        yield (
            f"export: reads {format_bytes(report.export.nbytes_read)}, takes {format_bytes(report.export.disk_peak)} "
            f"of disk and {format_bytes(report.export.memory_peak)} of memory"
        )
    yield "weights at run time:"
    for part in report.weights:
        held = part.device or part.anonymous
        yield f"  {part.component}: {format_bytes(held)} held, {format_bytes(part.mapped)} mapped"
    yield f"cache: {run.kv_per_token:,} B per token, {format_bytes(run.kv)} for max_length {run.max_length:,}"
    used, other = (run.logits_full, run.logits_last) if run.full_logits else (run.logits_last, run.logits_full)
    names = ("every position", "the last only") if run.full_logits else ("the last only", "every position")
    yield f"logits of {names[0]}: {used:,} B; of {names[1]} ({run.prompt_tokens:,} tokens): {other:,} B"
    yield f"prompt of {run.prompt_tokens:,} tokens: {format_bytes(run.prompt)} of activations"
    if run.scores:
        reserved = format_bytes(run.scores_reserved)
        yield f"  of it {format_bytes(run.scores)} attention scores, which reserve {reserved} of address space"
    yield f"vision, {run.crops} crops: {format_bytes(run.vision)} of activations"
    yield f"speech, {run.seconds:g} s: {format_bytes(run.speech)} of activations"
    where = "device memory" if run.device_peak else "resident memory"
    yield f"{where} at its peak: text {format_bytes(run.peak_text)}, with images {format_bytes(run.peak_image)},"
    yield f"  with audio {format_bytes(run.peak_audio)}, both in one process {format_bytes(run.peak_both_kept)},"
    yield f"  both with --release-arena {format_bytes(run.peak_both_released)}"
    yield f"memory while the model loads: {format_bytes(run.load_peak)}"
    for verdict in report.verdicts:
        word = "enough" if verdict.fits else "too little"
        yield (
            f"{verdict.kind} {format_bytes(verdict.budget)}: {word}, {format_bytes(verdict.needed)} needed; "
            f"the largest max_length that fits is {verdict.largest_max_length:,}"
        )


def _fit_lines(found: tuple[Candidate, ...], budget: str) -> Iterator[str]:
    yield f"{len(found)} recipes run in {budget}; * is on the frontier of size, context, modes and accuracy"
    yield "  decoder/table/encoders/adapters        data files    max_length   error"
    for one in found:
        mark = "*" if one.on_frontier else " "
        error = "" if one.error is None else f"{one.error:.4g}"
        yield f"{mark} {one.label:<34} {format_bytes(one.data_nbytes):>12} {one.max_length:>12,}   {error}".rstrip()
