"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from phi4mm_export.errors import UsageError


class ReportFormat(StrEnum):
    """How a command that judges a package says what it found."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


MANIFEST_FILES = ("phi4mm.json", "SHA256SUMS")
"""The two files in which a package states its own digests; they count wherever files of a package are counted."""
MANIFEST_NAMES = " and ".join(MANIFEST_FILES)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text; errors too.")]
Format = Annotated[
    ReportFormat | None,
    typer.Option(
        "--format",
        help="text (default), json (as --json), or github: annotations and the step's summary.",
    ),
]
Verbose = Annotated[int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say more.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but results and errors.")]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", "--force", help="Replace an existing package in one step when the new one is complete."
    ),
]
OutputDir = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write; it must not exist yet.")
]


def chosen_format(asked: ReportFormat | None, *, json: bool) -> ReportFormat:
    """The format that --format and --json ask for together. Raises UsageError where they contradict."""
    if json and asked not in (None, ReportFormat.JSON):
        raise UsageError(
            f"--json and --format {asked} contradict one another", where="--format", fix="give one of the two"
        )
    return ReportFormat.JSON if json else asked or ReportFormat.TEXT
