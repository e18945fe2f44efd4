"""Digest and class of a package for the action's outputs; a table of both for the step's summary.

python scripts/action/facts.py PACKAGE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from phi4mm_export.cli.github import SUMMARY_VARIABLE, Outcome, summary_table
from phi4mm_export.package.manifest import Reproducibility
from phi4mm_export.package.manifest_read import read_manifest


def main(package: Path) -> None:
    """Print `digest=...` and `class=...`, and append a table to the summary."""
    manifest = read_manifest(package)
    order = list(Reproducibility)
    weakest = max((entry.reproducibility for entry in manifest.files), key=order.index)
    nbytes = sum(entry.size for entry in manifest.files)
    print(f"digest={manifest.package_digest}")
    print(f"class={weakest}")
    facts = (
        ("package digest", manifest.package_digest),
        ("recipe digest", manifest.recipe_digest),
        ("class", f"{weakest}: the weakest among the files"),
        ("size", f"{nbytes:,} bytes in {len(manifest.files)} files"),
    )
    summary = os.environ.get(SUMMARY_VARIABLE)
    if summary:
        with Path(summary).open("a", encoding="utf-8", newline="\n") as file:
            file.write(summary_table(Outcome("action", package, True, "built and checked", (), facts)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
