"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text; errors too.")]
Verbose = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more; twice for debugging detail.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but results and errors.")]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", "--force", help="Replace an existing package in one step when the new one is complete."
    ),
]
OutputDir = Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must not exist yet.")]
