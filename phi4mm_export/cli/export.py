"""Turn a checkpoint into a package that ONNX Runtime GenAI runs.

MODEL is a folder or a hub id (revision with --revision). Weights are streamed: memory stays small at any size.

Example: phi4mm export microsoft/Phi-4-multimodal-instruct -o phi4mm-int8 --precision int8 --lora gated
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phi4mm_export.cli import render
from phi4mm_export.cli.choices import AdapterName, EncoderPrecision, Head, adapter_paths, adapter_role, provider_of
from phi4mm_export.cli.options import JsonFlag, OutputDir, Overwrite, Quiet, Verbose
from phi4mm_export.spec.contract import Component, PackageLayout
from phi4mm_export.spec.recipe import LoraForm, Precision

if TYPE_CHECKING:
    from phi4mm_export.pipeline.export import ExportReport


def command(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or a hub id.")],
    output: OutputDir,
    component: Annotated[list[Component] | None, typer.Option(help="Only these graphs; repeatable.")] = None,
    ep: Annotated[str, typer.Option(help="Execution provider: cpu or cuda. The float type follows it.")] = "cpu",
    precision: Annotated[Precision, typer.Option(help="Decoder weights.")] = Precision.INT8,
    encoder_precision: Annotated[EncoderPrecision | None, typer.Option(help="Vision and speech weights.")] = None,
    embedding_precision: Annotated[Precision | None, typer.Option(help="Token table.")] = None,
    lora_precision: Annotated[Precision | None, typer.Option(help="Adapters; as the decoder by default.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Weights per scale: 16 to 256; default 128 for int8, 32 for int4.")
    ] = None,
    accuracy_level: Annotated[
        int | None, typer.Option(help="MatMulNBits accuracy level, 0 to 4; default 4 on cpu, 0 on cuda.")
    ] = None,
    lora: Annotated[LoraForm, typer.Option(help="How the adapters reach the decoder.")] = LoraForm.GATED,
    adapter: Annotated[
        AdapterName | None, typer.Option(help="The adapter of --lora merged and branch; default vision.")
    ] = None,
    adapter_path: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ROLE=]DIR", help="PEFT folder that replaces the built-in adapter of its role; repeatable."
        ),
    ] = None,
    layout: Annotated[PackageLayout, typer.Option(help="File names.")] = PackageLayout.FLAT,
    from_package: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take what is not exported from this package, unchanged.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="search.max_length; default the context length.")] = None,
    memory_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest max_length whose cache fits, e.g. 4GiB.")
    ] = None,
    full_logits: Annotated[bool, typer.Option(help="Logits of every position, not only the last.")] = False,
    head: Annotated[Head | None, typer.Option(help="Which head counts when a tied one is also stored.")] = None,
    release_arena: Annotated[bool, typer.Option(help="Give encoder memory back after each run.")] = False,
    original_audio_limit: Annotated[
        bool, typer.Option(help="Cut clips at 30 s as the runtime does by default.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag of a hub id.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Threads; never changes a byte.")] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, typer.Option(help="Say what would be written, and stop.")] = False,
    json: JsonFlag = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    from phi4mm_export.pipeline.export import ExportSettings, export
    from phi4mm_export.spec.recipe import Recipe
    from phi4mm_export.spec.sizes import parse_bytes

    recipe = Recipe.resolve(
        provider=provider_of(ep),
        precision=precision,
        encoder_precision=Precision(encoder_precision) if encoder_precision else None,
        embedding_precision=embedding_precision,
        lora_precision=lora_precision,
        block_size=block_size,
        accuracy_level=accuracy_level,
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
        jobs=jobs,
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
    for line in report.warnings:
        render.warning(line)
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
    baked = ", ".join(report.baked) or "none"
    render.text(f"{report.path}: {verb} {format_bytes(report.nbytes)} in {len(report.files)} files")
    render.text(
        f"decoder {recipe.precision}, adapters {recipe.lora} ({baked}), {recipe.float_type} on {recipe.provider}"
    )
    cache = format_bytes(report.kv_nbytes_per_token * report.max_length)
    render.text(f"max_length {report.max_length:,}: the key-value cache takes {cache} when a generator opens")
    if verbose:
        for file in report.files:
            render.text(f"  {file.nbytes:>15,}  {file.name}")
