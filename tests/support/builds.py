"""What tests of built packages look at."""

from __future__ import annotations

import hashlib
from pathlib import Path

from phi4mm_export.package.write import hashed
from phi4mm_export.pipeline.build_stages import Stage

DESCRIBED = {"README.md", "phi4mm.json", "SHA256SUMS"}
"""Files that describe the others."""


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file by its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def card_of(package: Path) -> str:
    """The model card's text."""
    return (package / "README.md").read_text(encoding="utf-8")


def stage_of(package: Path) -> Stage:
    """A package as the finished stage of a build."""
    files = tuple(hashed(package, path.name) for path in sorted(package.iterdir()))
    return Stage("export", package, "key", files, {})
