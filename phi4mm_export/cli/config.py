"""Write genai_config.json, vision_processor.json and speech_processor.json for graphs that already stand in a folder.

The runtime's names are mapped to the graphs' own; what cannot be mapped is said.

Example: phi4mm config Phi-4-multimodal-instruct --package somebodys-graphs --memory-budget 8GiB
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phi4mm_export.cli import export_options as options
from phi4mm_export.cli import render
from phi4mm_export.cli.options import JsonFlag, Quiet


def command(
    model: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder, or hub id; only its small JSON files are read.")
    ],
    package: Annotated[
        Path, typer.Option("--package", metavar="DIR", help="Folder with the graphs; the files are written there.")
    ],
    ep: Annotated[str, typer.Option("--ep", "--provider", metavar="cpu|cuda", help="Execution provider.")] = "cpu",
    device_id: Annotated[int, typer.Option("--device-id", "--device", help="CUDA device; only 0 is possible.")] = 0,
    max_length: options.MaxLength = None,
    memory_budget: options.MemoryBudget = None,
    release_arena: options.ReleaseArena = False,
    original_audio_limit: options.OriginalAudioLimit = False,
    revision: options.Revision = None,
    dry_run: options.DryRun = False,
    json: JsonFlag = False,
    quiet: Quiet = False,
) -> None:
    from phi4mm_export.pipeline.config import config
    from phi4mm_export.spec.phi4mm_config import parse_provider
    from phi4mm_export.spec.sizes import format_bytes, parse_bytes

    result = config(
        model,
        package,
        revision=revision,
        provider=parse_provider(ep),
        device_id=device_id,
        max_length=max_length,
        memory_budget=None if memory_budget is None else parse_bytes(memory_budget),
        release_arena=release_arena,
        original_audio_limit=original_audio_limit,
        dry_run=dry_run,
    )
    if json:
        render.document(
            {
                "package": str(result.package),
                "written": result.written,
                "graphs": dict(result.graphs),
                "renamed": dict(result.renamed),
                "warnings": list(result.warnings),
                "max_length": result.max_length,
                "kv_bytes_per_token": result.kv_bytes_per_token,
                "kv_cache_bytes": result.kv_cache_nbytes,
                "files": dict(result.files),
            }
        )
        return
    render.warnings(result.warnings, quiet=quiet)
    if quiet:
        return
    for component, file in result.graphs.items():
        render.text(f"{component:<10} {file}")
    for key, name in result.renamed.items():
        render.text(f"mapped     {key} -> {name}")
    render.text(
        f"max_length {result.max_length:,}: the key-value cache takes {format_bytes(result.kv_cache_nbytes)} "
        f"per sequence ({format_bytes(result.kv_bytes_per_token)} per token)"
    )
    render.text(f"{'wrote' if result.written else 'would write'} {', '.join(result.files)}")
