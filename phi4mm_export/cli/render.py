"""The only place that prints: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from phi4mm_export.errors import Phi4mmError



def text(line: str = "") -> None:
    """One line of a result."""
    print(line)


def stream(piece: str) -> None:
    """A piece of a result without a line end, shown at once."""
    print(piece, end="", flush=True)


def document(value: Any) -> None:
    """A result as one JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def note(line: str) -> None:
    """A remark that is not part of the result."""
    print(line, file=sys.stderr)


def warning(line: str) -> None:
    """Something the user should know and the command went on after."""
    print(f"warning: {line}", file=sys.stderr)


def error(err: BaseException) -> None:
    """One sentence on stderr; one JSON object there when the command was called with --json."""
    if isinstance(err, Phi4mmError) and "--json" in sys.argv:
        print(err.as_json(), file=sys.stderr)
    elif isinstance(err, KeyboardInterrupt):
        print("interrupted: nothing was left under the target name", file=sys.stderr)
    elif isinstance(err, Phi4mmError):
        print(f"error: {err}", file=sys.stderr)
    elif isinstance(err, MemoryError):
        print("error: the machine ran out of memory; free some, or lower --jobs or --memory-limit", file=sys.stderr)
    elif isinstance(err, OSError):
        place = f"{err.filename}: " if err.filename else ""
        print(f"error: {place}{err.strerror or err}", file=sys.stderr)
    else:
        print(
            f"error: {type(err).__name__}: {err}; this is a bug of phi4mm: run again with PHI4MM_DEBUG=1 and report it",
            file=sys.stderr,
        )
