"""Every error a user can cause, and the exit code each kind has.

    Phi4mmError            1   our bug, or anything not classed below
    ├── UsageError         2   flags, lists and media the user passed
    ├── CheckpointError    3   unusable checkpoint, adapter, tokenizer or ONNX file
    ├── PackageError       4   a package that breaks the contract, the config or parity
    ├── QualityError       5   a quality gate said no
    └── SystemLimitError   6   disk, memory, lock, permissions
        └── MissingExtraError  an optional library is not installed

Exit code 130 is an interrupt (SIGINT, SIGTERM) and has no class here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Process exit codes of every command."""

    OK = 0
    BUG = 1
    USAGE = 2
    CHECKPOINT = 3
    PACKAGE = 4
    QUALITY = 5
    SYSTEM = 6
    INTERRUPTED = 130


class Phi4mmError(Exception):
    """What is wrong, where, and how to go on.

    `what` states what was expected and what was found; `where` names the file and the key or tensor;
    `fix` says how to go on. `str(error)` is one sentence made of the three.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.BUG

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f"; {self.fix}" if self.fix else ""
        return f"{place}{self.what}{advice}"

    def as_json(self) -> str:
        """The error as one JSON object, for `--json`."""
        body = {
            "error": type(self).__name__,
            "exit_code": int(self.exit_code),
            "what": self.what,
            "where": self.where,
            "fix": self.fix,
        }
        return json.dumps(body, ensure_ascii=False)


class UsageError(Phi4mmError):
    """A flag, a list or a medium that the user passed cannot be used."""

    exit_code = ExitCode.USAGE


class CheckpointError(Phi4mmError):
    """A checkpoint, an adapter, a tokenizer or an ONNX file cannot be used."""

    exit_code = ExitCode.CHECKPOINT


class PackageError(Phi4mmError):
    """A package breaks the contract, its own config, or parity with the original."""

    exit_code = ExitCode.PACKAGE


class QualityError(Phi4mmError):
    """A quality gate was missed."""

    exit_code = ExitCode.QUALITY


class SystemLimitError(Phi4mmError):
    """Disk, memory, a lock or a permission stands in the way."""

    exit_code = ExitCode.SYSTEM


class MissingExtraError(SystemLimitError):
    """An optional library is not installed."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {library}, which is not installed",
            fix=f"run: {install_line(extra)}",
        )
        self.library, self.extra = library, extra


def install_line(extra: str) -> str:
    """The command that brings an extra, quoted as every shell takes it."""
    return f'pip install "phi4mm[{extra}]"'


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 tensor", "12 tensors"."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first `limit` names and the count of the rest: "a, b and 3 more"."""
    listed = list(names)
    if len(listed) <= limit:
        return ", ".join(listed)
    return f"{', '.join(listed[:limit])} and {len(listed) - limit:,} more"
