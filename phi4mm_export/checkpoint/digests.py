"""The sha256 of every input file, taken in the background while the same files are exported.

One thread reads the files from start to end; what is written never depends on when it is done.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from phi4mm_export.checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from phi4mm_export.checkpoint.open import Checkpoint
from phi4mm_export.errors import CheckpointError
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import is_file

CHUNK = 4 << 20


@dataclass(frozen=True)
class InputDigest:
    """One input file: its name below the checkpoint (`adapter-ROLE/...` for adapter folders), size, sha256 in hex."""

    name: str
    nbytes: int
    sha256: str


class InputDigests:
    """A context manager that hashes files while its block runs; leaving the block early stops the reading.

    files: name -> path.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files, self._stop = dict(sorted(files.items())), threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="input-digests")
        self._result: Future[tuple[InputDigest, ...]] | None = None

    def __enter__(self) -> InputDigests:
        self._result = self._pool.submit(self._hash_all)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True)

    def result(self) -> tuple[InputDigest, ...]:
        """Every digest, sorted by name; waits for the reading. Raises CheckpointError for a file that changed."""
        if self._result is None:
            raise RuntimeError("the digests are taken inside the with block")
        return self._result.result()

    def _hash_all(self) -> tuple[InputDigest, ...]:
        buffer = bytearray(CHUNK)
        return tuple(self._hash(name, path, buffer) for name, path in self._files.items())

    def _hash(self, name: str, path: Path, buffer: bytearray) -> InputDigest:
        digest, nbytes, view = hashlib.sha256(), 0, memoryview(buffer)
        before = _identity(path)
        with path.open("rb", buffering=0) as file:
            while not self._stop.is_set() and (count := file.readinto(view)):
                digest.update(view[:count])
                nbytes += count
        if not self._stop.is_set() and (_identity(path) != before or nbytes != before[0]):
            raise CheckpointError(
                f"the file changed while it was hashed: {before[0]:,} bytes at first, {nbytes:,} read",
                where=name,
                fix="let the download or save finish, then run again",
            )
        return InputDigest(name, nbytes, digest.hexdigest())


def input_files(
    checkpoint: Checkpoint, *, beside: tuple[str, ...] = (), adapter_paths: Mapping[Role, Path] | None = None
) -> dict[str, Path]:
    """Name -> path of everything an export reads: the checkpoint's files, those named in `beside` that exist, adapters.

    A file is named as the checkpoint names it (a link, not its target), with `/`; an adapter folder by its role.
    """
    files = {}
    for path in (*checkpoint.files, *(checkpoint.path / name for name in beside)):
        if path.is_relative_to(checkpoint.path) and is_file(path):
            files[path.relative_to(checkpoint.path).as_posix()] = path
    for role, folder in sorted((adapter_paths or {}).items()):
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            files[f"adapter-{role}/{name}"] = folder / name
    return files


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
