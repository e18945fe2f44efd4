"""Going on with a data file that an interrupted run left: a journal of what was finished, proved by its digest.

The journal `NAME.journal` has one line per finished stream: how many are done, the bytes they take, and the sha256 of
the file up to there. Recovery trusts nothing else: it hashes the file again and goes on from the last line that agrees.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 8 << 20
JOURNAL_SUFFIX = ".journal"


@dataclass(frozen=True)
class Mark:
    """Where to go on: streams finished, the bytes they take, and the running sha256 of those bytes."""

    streams: int
    nbytes: int
    digest: Any
    """A hashlib object: the standard library does not export its class."""


class Journal:
    """The journal of one data file. Lines are appended after the bytes that they describe."""

    def __init__(self, data: Path) -> None:
        self._data, self._path = data, journal_path(data)

    def note(self, streams: int, nbytes: int, sha256: str) -> None:
        """Streams 0 .. streams-1 are in the file, which has `nbytes` bytes with this digest."""
        with self._path.open("a", encoding="ascii") as out:
            out.write(json.dumps([streams, nbytes, sha256]) + "\n")

    def recover(self) -> Mark | None:
        """The last mark that the file's bytes prove, None when there is none; bytes after it are cut off."""
        marks = self._read()
        found: Mark | None = None
        if marks and self._data.is_file():
            found = self._prove(marks)
            with self._data.open("r+b") as file:
                file.truncate(found.nbytes if found else 0)
        self._path.unlink(missing_ok=True)
        if found:
            self.note(found.streams, found.nbytes, found.digest.hexdigest())
        return found

    def _read(self) -> list[tuple[int, int, str]]:
        """The complete lines, in order; a torn last line is left out."""
        if not self._path.is_file():
            return []
        marks = []
        for line in self._path.read_text(encoding="ascii", errors="replace").splitlines():
            try:
                streams, nbytes, sha256 = json.loads(line)
                marks.append((int(streams), int(nbytes), str(sha256)))
            except (ValueError, TypeError):
                break
        return marks

    def _prove(self, marks: list[tuple[int, int, str]]) -> Mark | None:
        digest, at, found = hashlib.sha256(), 0, None
        with self._data.open("rb", buffering=0) as file:
            for streams, nbytes, sha256 in marks:
                while at < nbytes and (piece := file.read(min(CHUNK, nbytes - at))):
                    digest.update(piece)
                    at += len(piece)
                if at != nbytes or digest.hexdigest() != sha256:
                    break
                found = Mark(streams, nbytes, digest.copy())
        return found


def journal_path(data: Path) -> Path:
    """The journal beside a data file."""
    return data.with_name(data.name + JOURNAL_SUFFIX)
