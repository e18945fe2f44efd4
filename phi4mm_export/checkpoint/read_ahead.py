"""Blocks of remote files, fetched ahead of the reader and kept while they are likely to be read again.

An export reads tensors band by band, a few megabytes each and nearly in the file's order. Reading blocks of one size
turns this into few requests, and the next blocks are on their way while the last ones are packed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from phi4mm_export.checkpoint.ranges import RemoteFile

BLOCK_NBYTES = 8 << 20
KEPT_BLOCKS = 12
"""96 MiB: the base weight's blocks and those of the adapter matrices beside it."""
AHEAD = 2
DOWNLOADS = 4
"""Requests at a time."""


class ReadAhead:
    """A context manager around the blocks of all remote files of a checkpoint; thread-safe."""

    def __init__(self, *, block_nbytes: int = BLOCK_NBYTES, kept: int = KEPT_BLOCKS, ahead: int = AHEAD) -> None:
        self._block, self._most, self._ahead = block_nbytes, max(kept, ahead + 2), ahead
        self._blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(DOWNLOADS, thread_name_prefix="read-ahead")

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def read_into(self, file: RemoteFile, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes of `file` from `offset` on. Raises as `RemoteFile.read`."""
        done = 0
        while done < len(buffer):
            number, inside = divmod(offset + done, self._block)
            block = self._get(file, number)
            piece = memoryview(block)[inside : inside + len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def _get(self, file: RemoteFile, number: int) -> bytes:
        with self._lock:
            wanted = self._start(file, number)
            for next_one in range(number + 1, number + 1 + self._ahead):
                if next_one * self._block < file.nbytes:
                    self._start(file, next_one)
            self._blocks.move_to_end((file.label, number))
            self._drop_oldest()
        try:
            return wanted.result()
        except BaseException:
            with self._lock:
                if self._blocks.get((file.label, number)) is wanted:
                    del self._blocks[file.label, number]
            raise

    def _start(self, file: RemoteFile, number: int) -> Future[bytes]:
        key = (file.label, number)
        if key not in self._blocks:
            start = number * self._block
            self._blocks[key] = self._pool.submit(file.read, start, min(start + self._block, file.nbytes))
        return self._blocks[key]

    def _drop_oldest(self) -> None:
        """Blocks beyond the limit go, oldest first; a reader that waits for one holds its future itself."""
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
