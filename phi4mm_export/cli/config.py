"""Write genai_config.json, vision_processor.json and speech_processor.json for graphs that already stand in a folder.

Example: phi4mm config Phi-4-multimodal-instruct --package somebodys-graphs --memory-budget 8GiB
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phi4mm_export.cli import render
from phi4mm_export.cli.options import JsonFlag


def command(
    model: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder; only its small JSON files are read.")],
    package: Annotated[
        Path, typer.Option("--package", metavar="DIR", help="Folder with the graphs; the files are written there.")
    ],
    ep: Annotated[str, typer.Option("--ep", "--provider", metavar="cpu|cuda", help="Execution provider.")] = "cpu",
    device_id: Annotated[int, typer.Option("--device-id", help="CUDA device; only 0 is possible.")] = 0,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Most tokens of prompt and answer; default the context length.")
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            "--memory-budget",
            metavar="SIZE",
            help="Memory for the key-value cache, such as 8GiB; picks the largest length.",
        ),
    ] = None,
    release_arena: Annotated[
        bool, typer.Option("--release-arena", help="Give the towers' memory back after each image or clip.")
    ] = False,
    original_audio_limit: Annotated[
        bool, typer.Option("--original-audio-limit", help="Cut clips after 30 s, as the runtime does by default.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    json: JsonFlag = False,
) -> None:
    """Map the runtime's names to the graphs' own, and say what cannot be mapped."""
    from phi4mm_export.pipeline.config import config
    from phi4mm_export.spec.phi4mm_config import parse_provider
    from phi4mm_export.spec.sizes import format_bytes, parse_bytes

    result = config(
        model,
        package,
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
    for warning in result.warnings:
        render.warning(warning)
    for component, file in result.graphs.items():
        render.text(f"{component:<10} {file}")
    for key, name in result.renamed.items():
        render.text(f"mapped     {key} -> {name}")
    render.text(
        f"max_length {result.max_length:,}: the key-value cache takes {format_bytes(result.kv_cache_nbytes)} "
        f"per sequence ({format_bytes(result.kv_bytes_per_token)} per token)"
    )
    render.text(f"{'wrote' if result.written else 'would write'} {', '.join(result.files)}")
