"""Build a package again as its manifest records it, and compare every byte.

PACKAGE is a folder that phi4mm build wrote, or the README.md in it. Exit code 0: the same bytes; 5: something differs.

Example: phi4mm rebuild phi4mm-int8/README.md --model ./checkpoint -o rebuilt
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phi4mm_export.cli import render
from phi4mm_export.cli.choices import adapter_paths as paths_of
from phi4mm_export.cli.export_options import Jobs, Stream
from phi4mm_export.cli.options import JsonFlag, Overwrite, Quiet

Option = typer.Option


def command(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE|README.md", help="What to build again.")],
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="DIR", help="Keep the new package there; it is removed otherwise."),
    ] = None,
    model: Annotated[
        str | None, Option("--model", metavar="CHECKPOINT", help="The checkpoint, where no hub id is recorded.")
    ] = None,
    calibration: Annotated[
        str | None, Option(metavar="PATH|GLOB|LIST|ZIP", help="The samples that the package was calibrated on.")
    ] = None,
    against: Annotated[
        str | None, Option(metavar="PACKAGE", help="The float package that the build was judged by.")
    ] = None,
    adapter_path: Annotated[
        list[str] | None, Option(metavar="[ROLE=]DIR", help="The adapter folders it was built with; repeatable.")
    ] = None,
    stream: Stream = False,
    jobs: Jobs = None,
    work_dir: Annotated[Path | None, Option(metavar="DIR", help="Keep finished stages here after an error.")] = None,
    statistics: Annotated[
        Path | None, Option(metavar="DIR", help="The Hessians that the package was built from.")
    ] = None,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
    quiet: Quiet = False,
) -> None:
    from phi4mm_export.cli.diff import report_lines
    from phi4mm_export.cli.quantize import layer_progress
    from phi4mm_export.pipeline.build import BuildSettings
    from phi4mm_export.pipeline.diff import DiffReport
    from phi4mm_export.pipeline.rebuild import rebuild

    with render.progress("rebuild", quiet=quiet or json) as progress:
        result = rebuild(
            package,
            output,
            model=model,
            calibration=calibration,
            against=against,
            adapter_paths=paths_of(adapter_path, None),
            settings=BuildSettings(
                stream=stream, jobs=jobs, work_dir=work_dir, overwrite=overwrite, statistics=statistics
            ),
            on_stage=None if quiet or json else render.note,
            on_bytes=progress,
            on_layer=None if quiet or json else layer_progress(),
        )
    if json:
        render.document(result.as_json())
    elif result.same:
        render.text(f"same bytes: {result.compared} files of {result.package}, {result.build.manifest.package_digest}")
    else:
        report = DiffReport(result.package, "rebuilt", 0.0, result.differences)
        for line in report_lines(report, every=False):
            render.text(line)
        render.warnings((f"other versions: {line}" for line in result.other_versions), quiet=quiet)
    if not result.same:
        raise typer.Exit(int(result.exit_code))
