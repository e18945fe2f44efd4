"""Write a synthetic checkpoint in the real layout: exact names, shapes and types, made-up numbers.

Example: phi4mm synth tiny-checkpoint --layout native --seed 7 --set num_hidden_layers=4 --set dtype=float16
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phi4mm_export.checkpoint.synth_settings import Size, WeightStyle
from phi4mm_export.cli import render
from phi4mm_export.cli.options import JsonFlag, Overwrite, Quiet
from phi4mm_export.spec.model import Layout


def command(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; it must not exist yet.")],
    size: Annotated[
        Size, typer.Option(help="tiny: 56 MB, for tests; oracle: 107 MB; full: the real sizes, 11 GB.")
    ] = Size.TINY,
    layout: Annotated[Layout, typer.Option(help="Microsoft's files, or those of transformers.")] = Layout.ORIGINAL,
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another model.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one dimension or file option; repeatable."),
    ] = None,
    weights: Annotated[
        WeightStyle, typer.Option(help="heavy: heavy tails and outlier channels, for quantization.")
    ] = WeightStyle.PLAIN,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
    quiet: Quiet = False,
) -> None:
    from phi4mm_export.pipeline.synth import synth

    report = synth(
        out,
        size=size,
        layout=layout,
        seed=seed,
        settings=settings or (),
        weights=weights,
        overwrite=overwrite,
    )
    if json:
        render.document(
            {
                "path": str(report.path),
                "size": report.size,
                "layout": report.layout,
                "seed": report.seed,
                "weights": report.weights,
                "settings": report.settings.model_dump(),
                "tensors": report.num_tensors,
                "tensor_bytes": report.tensor_nbytes,
                "bytes": report.nbytes,
                "files": list(report.files),
            }
        )
    elif not quiet:
        render.text(
            f"{report.path}: {report.num_tensors:,} tensors, {report.nbytes:,} bytes in {len(report.files)} files "
            f"({report.size}, {report.layout} layout, seed {report.seed}, {report.weights} weights)"
        )
