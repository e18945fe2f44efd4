"""Refuse Python files over 400 lines, functions over 80 lines, and modules named after nothing in particular.

    python scripts/check_lengths.py [FOLDER ...]

Without folders: phi4mm_export, tests, scripts and examples. Exit code 1 lists every offender as path:line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
VAGUE_NAMES = frozenset({"utils", "util", "common", "helpers", "helper", "misc"})
FOLDERS = ("phi4mm_export", "tests", "scripts", "examples")


def offences(path: Path) -> Iterator[str]:
    """Every rule that one Python file breaks, as "path:line: sentence"."""
    source = path.read_text(encoding="utf-8")
    lines = source.count("\n") + (not source.endswith("\n") and source != "")
    if lines > MAX_FILE_LINES:
        yield f"{path}:{lines}: the file has {lines} lines, at most {MAX_FILE_LINES} are allowed"
    for name in {path.stem, path.parent.name} & VAGUE_NAMES:
        yield f"{path}:1: {name!r} says nothing about what the module does; name it after that"
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES} are allowed"


def main(folders: list[str]) -> int:
    """Check every .py file below the folders; the exit code."""
    roots = [Path(name) for name in folders or FOLDERS]
    files = sorted(path for root in roots if root.is_dir() for path in root.rglob("*.py"))
    found = [line for path in files for line in offences(path)]
    passed = f"{len(files)} files within {MAX_FILE_LINES} lines, functions within {MAX_FUNCTION_LINES}"
    print("\n".join(found or [passed]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
