"""Arrays between two pieces of a graph: a few in memory, the rest in files: memory does not grow with samples."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEMORY_NBYTES = 512 << 20
"""Bytes of live arrays that stay in memory; those stored when this is full go to files."""


class Spill:
    """Arrays by key. Those beyond `memory` bytes lie as .npy files below `folder` until they are dropped."""

    def __init__(self, folder: Path, memory: int = MEMORY_NBYTES) -> None:
        self._folder, self._room, self._count = folder, memory, 0
        self._kept: dict[Hashable, NDArray[Any]] = {}
        self._files: dict[Hashable, Path] = {}
        self._lock = threading.Lock()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def put(self, key: Hashable, value: NDArray[Any]) -> None:
        """Store one array under a new key."""
        with self._lock:
            fits = value.nbytes <= self._room
            if fits:
                self._room -= value.nbytes
                self._kept[key] = value
                return
            self._count += 1
            path = self._folder / f"{self._count:08d}.npy"
            self._files[key] = path
        np.save(path, value, allow_pickle=False)

    def get(self, key: Hashable) -> NDArray[Any]:
        """The array stored under a key; not to be written to. One in a file is read where it is used."""
        kept = self._kept.get(key)
        return kept if kept is not None else np.asarray(np.load(self._files[key], mmap_mode="r", allow_pickle=False))

    def drop(self, key: Hashable) -> None:
        """Forget an array and free its room."""
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is not None:
                self._room += kept.nbytes
            path = self._files.pop(key, None)
        if path is not None:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything."""
        self._kept.clear()
        self._files.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
