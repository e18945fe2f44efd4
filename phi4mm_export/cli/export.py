"""Turn a checkpoint into a package that ONNX Runtime GenAI runs.

CHECKPOINT is a folder or a hub id (revision with --revision). Weights are streamed: memory stays small at any size.

Example: phi4mm export microsoft/Phi-4-multimodal-instruct -o phi4mm-int8 --precision int8 --lora gated

Example: phi4mm export ./checkpoint -o my-package --adapter-path vision=./my-vision-adapter
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phi4mm_export.cli import export_options as options
from phi4mm_export.cli import render
from phi4mm_export.cli.choices import adapter_paths, adapter_role
from phi4mm_export.cli.options import MANIFEST_NAMES, JsonFlag, OutputDir, Overwrite, Quiet, Verbose
from phi4mm_export.spec.contract import Component, PackageLayout
from phi4mm_export.spec.recipe import LoraForm, Precision

if TYPE_CHECKING:
    from phi4mm_export.pipeline.export import ExportReport


def command(
    model: options.Model,
    output: OutputDir,
    component: options.Components = None,
    ep: options.Ep = "cpu",
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
    from_package: options.FromPackage = None,
    max_length: options.MaxLength = None,
    memory_budget: options.MemoryBudget = None,
    full_logits: options.FullLogits = False,
    head: options.HeadChoice = None,
    release_arena: options.ReleaseArena = False,
    original_audio_limit: options.OriginalAudioLimit = False,
    revision: options.Revision = None,
    stream: options.Stream = False,
    jobs: options.Jobs = None,
    memory_limit: options.MemoryLimit = None,
    work_dir: options.WorkDir = None,
    overwrite: Overwrite = False,
    dry_run: options.DryRun = False,
    json: JsonFlag = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    from phi4mm_export.pipeline.export import ExportSettings, export
    from phi4mm_export.spec.phi4mm_config import parse_provider
    from phi4mm_export.spec.recipe import Recipe
    from phi4mm_export.spec.sizes import parse_bytes

    recipe = Recipe.resolve(
        provider=parse_provider(ep),
        precision=precision,
        encoder_precision=Precision(encoder_precision) if encoder_precision else None,
        embedding_precision=embedding_precision,
        lora_precision=lora_precision,
        block_size=block_size,
        accuracy_level=accuracy_level,
        rotate=rotate,
        lora=lora,
        adapter=adapter_role(adapter),
        layout=layout,
        full_logits=full_logits,
        components=tuple(component or ()),
    )
    settings = ExportSettings(
        max_length=max_length,
        memory_budget=parse_bytes(memory_budget) if memory_budget else None,
        release_arena=release_arena,
        original_audio_limit=original_audio_limit,
        revision=revision,
        head=head.value if head else None,
        stream=stream,
        jobs=jobs,
        memory_limit=parse_bytes(memory_limit, where="--memory-limit") if memory_limit else None,
        work_dir=work_dir,
        overwrite=overwrite,
        dry_run=dry_run,
    )
    with render.progress("export", quiet=quiet or json) as progress:
        report = export(
            model,
            output,
            recipe=recipe,
            adapter_named=adapter is not None,
            adapter_paths=adapter_paths(adapter_path, adapter),
            from_package=from_package,
            settings=settings,
            progress=progress,
        )
    tell(report, json=json, quiet=quiet, verbose=verbose)


def tell(report: ExportReport, *, json: bool, quiet: bool, verbose: int) -> None:
    """Warnings, then the report in the form that was asked for."""
    render.warnings(report.warnings, quiet=quiet or json)
    if json:
        render.document(as_json(report))
    elif not quiet:
        show(report, verbose=verbose)


def as_json(report: ExportReport) -> dict[str, Any]:
    """The report as plain values."""
    from phi4mm_export.package.manifest import recipe_json

    return {
        "path": str(report.path),
        "dry_run": report.dry_run,
        "recipe": recipe_json(report.recipe, report.baked),
        "bytes": report.nbytes,
        "bytes_read": report.nbytes_read,
        "max_length": report.max_length,
        "kv_bytes_per_token": report.kv_nbytes_per_token,
        "kv_bytes": report.kv_nbytes_per_token * report.max_length,
        "warnings": list(report.warnings),
        "files": [{"name": file.name, "size": file.nbytes, "sha256": file.sha256} for file in report.files],
    }


def show(report: ExportReport, *, verbose: int) -> None:
    """The report for people: what stands where, how large, and what its cache will cost."""
    from phi4mm_export.spec.sizes import format_bytes

    recipe, verb = report.recipe, "would write" if report.dry_run else "wrote"
    size = f"{format_bytes(report.nbytes)} in {len(report.files)} files with {MANIFEST_NAMES}"
    render.text(f"{report.path}: {verb} {size}")
    render.text(f"{', '.join(recipe.components)}; {recipe.float_type} on {recipe.provider}")
    if Component.DECODER in recipe.components:
        held = ", ".join(report.baked) or ("in files beside it" if recipe.lora is LoraForm.ADAPTERS else "none")
        render.text(f"decoder {recipe.precision}, LoRA form {recipe.lora}, adapters: {held}")
    if set(recipe.components) == set(Component):
        cache = format_bytes(report.kv_nbytes_per_token * report.max_length)
        render.text(f"max_length {report.max_length:,}: the key-value cache takes {cache} when a generator opens")
    if verbose:
        for file in report.files:
            render.text(f"  {file.nbytes:>15,}  {file.name}")
