"""Going on with a data file that an interrupted run left: a journal of what was finished, proved by its digest.

The journal `NAME.journal` starts with the identity of the whole file's plan and has one line per finished stream: how
many are done, the bytes they take, the sha256 of the file up to there, and the stream's own identity: everything that
decides its bytes, what the stored tensors hold (`ContentOf`) included. Recovery trusts nothing else: a file of another
plan is deleted; of the same plan, it is hashed again, and goes on after the last stream for which both agree.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import phi4mm_export
from phi4mm_export.checkpoint.digests import ContentOf
from phi4mm_export.spec.on_disk import is_file
from phi4mm_export.weights.streams import Stream

CHUNK = 8 << 20
JOURNAL_SUFFIX = ".journal"


@dataclass(frozen=True)
class Resume:
    """Where a graph's data file is written, and where its journal: folders, under the data file's name.

    content_of: tells what a stored tensor holds.
    """

    data: Path
    journals: Path
    content_of: ContentOf


@dataclass(frozen=True)
class Mark:
    """Where to go on: streams finished, the bytes they take, and the running sha256 of those bytes."""

    streams: int
    nbytes: int
    digest: Any
    """A hashlib object: the standard library does not export its class."""


def plan_identity(streams: Sequence[Stream]) -> str:
    """sha256 over everything that decides a file's bytes but the contents of stored tensors."""
    return _digest([_facts(stream) for stream in streams])


def identity(stream: Stream, content_of: ContentOf) -> str:
    """sha256 over code version, tensors, settings, and what the stored tensors hold that the stream reads."""
    sources = stream.origin.sources if stream.origin else ()
    return _digest([_facts(stream), [content_of(source) for source in sources]])


@functools.cache
def code_version() -> str:
    """sha256 over this package's own source and data files and the versions of what computes with it."""
    versions = (phi4mm_export.__version__, np.__version__, ml_dtypes.__version__, platform.python_version())
    return _digest([code_digest(Path(phi4mm_export.__file__).parent), versions])


def code_digest(root: Path) -> str:
    """sha256 over name and content of every file below a folder, compiled ones excepted."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if is_file(path) and path.suffix != ".pyc":
            name, content = path.relative_to(root).as_posix().encode(), path.read_bytes()
            digest.update(b"%d %b %d " % (len(name), name, len(content)) + content)
    return digest.hexdigest()


class Journal:
    """The journal of one data file. Lines are appended after the bytes that they describe.

    identity_of: the `identity` of a stream by its number; plan: the `plan_identity` of the file.
    """

    def __init__(self, data: Path, path: Path, plan: str, identity_of: Callable[[int], str]) -> None:
        self._data, self._path, self._plan, self._identity_of = data, path, plan, identity_of

    def note(self, streams: int, nbytes: int, sha256: str) -> None:
        """Streams 0 .. streams-1 are in the file, which has `nbytes` bytes with this digest."""
        self._append([streams, nbytes, sha256, self._identity_of(streams - 1)])

    def recover(self) -> Mark | None:
        """The last mark that the file's bytes prove, None when there is none; bytes after it are cut off.

        A file that proves nothing is deleted, never written over: whoever may still hold it open writes into nothing.
        """
        marks = self._read()
        found = self._prove(marks) if marks and is_file(self._data) else None
        self._path.unlink(missing_ok=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._append([self._plan])
        if found is None:
            self._data.unlink(missing_ok=True)
            return None
        with self._data.open("r+b") as file:
            file.truncate(found.nbytes)
        for line in marks[: found.streams]:
            self._append(line)
        return found

    def _append(self, line: list[Any]) -> None:
        with self._path.open("a", encoding="ascii") as out:
            out.write(json.dumps(line) + "\n")

    def _read(self) -> list[list[Any]]:
        """The complete lines after that of this plan, in order; a torn last line is left out."""
        if not is_file(self._path):
            return []
        lines: list[list[Any]] = []
        for text in self._path.read_text(encoding="ascii", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                break
            if not lines and line != [self._plan]:
                return []
            lines.append(line)
        return lines[1:]

    def _prove(self, marks: list[list[Any]]) -> Mark | None:
        digest, at, found = hashlib.sha256(), 0, None
        with self._data.open("rb", buffering=0) as file:
            for number, line in enumerate(marks):
                streams, nbytes, sha256, made_of = line if len(line) == 4 else (0, 0, "", "")
                if streams != number + 1 or made_of != self._identity_of(number):
                    break
                while at < nbytes and (piece := file.read(min(CHUNK, nbytes - at))):
                    digest.update(piece)
                    at += len(piece)
                if at != nbytes or digest.hexdigest() != sha256:
                    break
                found = Mark(streams, nbytes, digest.copy())
        return found


def journal_path(folder: Path, data_name: str) -> Path:
    """The journal of a data file in the folder of journals."""
    return folder / (data_name + JOURNAL_SUFFIX)


def _facts(stream: Stream) -> list[Any]:
    """What decides a stream's bytes, but for the contents of stored tensors."""
    tensors = [[spec.name, spec.dtype.name, list(spec.shape)] for spec in stream.outputs]
    if stream.origin is None:
        raise ValueError(f"the stream of {stream.outputs[0].name} does not say what it is made from")
    stored = [[source.stored_name, source.dtype.value, list(source.shape)] for source in stream.origin.sources]
    return [code_version(), tensors, dict(stream.origin.settings), stored]


def _digest(value: Any) -> str:
    """sha256 of a value as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
