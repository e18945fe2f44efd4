"""The sha256 of every input file, taken in the background while the same files are exported.

One thread reads each file once, from start to end; what is written never depends on when it is done. On the way it
notes the digest of the file up to the end of every stored tensor: what tells a tensor's content without another pass.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from phi4mm_export.checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from phi4mm_export.checkpoint.open import Checkpoint
from phi4mm_export.checkpoint.source import ShardFile, TensorSource
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import is_file

CHUNK = 4 << 20
ContentOf = Callable[[TensorSource], str]
"""Tells what a stored tensor holds: for other bytes another text."""


@dataclass(frozen=True)
class InputDigest:
    """One input file: its name below the checkpoint (`adapter-ROLE/...` for adapter folders), size, sha256 in hex."""

    name: str
    nbytes: int
    sha256: str


class InputDigests:
    """A context manager that hashes files while its block runs; leaving the block early stops the reading.

    files: name -> path. sources: stored tensors in them. A file that holds one is read through the shard from which
    the tensor is exported, so that the digest is that of the exported bytes even if the path leads elsewhere by then.
    """

    def __init__(self, files: Mapping[str, Path], sources: Iterable[TensorSource] = ()) -> None:
        self._files = dict(sorted(files.items()))
        self._shards: dict[Path, ShardFile] = {}
        self._ends: dict[Path, set[int]] = defaultdict(set)
        for source in sources:
            self._shards[source.file] = source.shard
            self._ends[source.file].add(source.offset + source.nbytes)
        self._up_to: dict[tuple[Path, int], str] = {}
        self._over, self._news = False, threading.Condition()
        self._stop = threading.Event()
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

    def content_of(self, source: TensorSource) -> str:
        """The digest of the tensor's file up to the tensor's end, and where it starts; where a server states the digest
        of the whole file, that. Waits until the reading has come so far. Raises as `result`.
        """
        if source.shard.stated_digest is not None:
            return f"{source.shard.stated_digest} at {source.offset}"
        wanted = (source.file, source.offset + source.nbytes)
        with self._news:
            self._news.wait_for(lambda: self._over or wanted in self._up_to)
        if wanted not in self._up_to:
            self.result()
            raise ValueError(f"{source.where} is not among the tensors of the hashed files")
        return f"{self._up_to[wanted]} at {source.offset}"

    def _hash_all(self) -> tuple[InputDigest, ...]:
        buffer = memoryview(bytearray(CHUNK))
        try:
            return tuple(self._hash(name, path, buffer) for name, path in self._files.items())
        finally:
            with self._news:
                self._over = True
                self._news.notify_all()

    def _hash(self, name: str, path: Path, buffer: memoryview) -> InputDigest:
        digest, at = hashlib.sha256(), 0
        with ExitStack() as closing:
            shard = self._shards.get(path)
            if shard is None:
                shard = ShardFile(path, name)
                closing.callback(shard.close)
            for end in sorted({*self._ends[path], shard.nbytes}):
                while at < end and not self._stop.is_set():
                    piece = buffer[: min(CHUNK, end - at)]
                    shard.read_into(piece, at)
                    digest.update(piece)
                    at += len(piece)
                if self._stop.is_set():
                    break
                with self._news:
                    self._up_to[path, end] = digest.hexdigest()
                    self._news.notify_all()
        return InputDigest(name, at, digest.hexdigest())


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
