"""Calls to the system, below one folder, that are counted, recorded, and made to fail.

Patched are the functions that Python code can reach: `os.*` (pathlib and shutil call them by name) and `open`, whose
files become ones with a counting `write`. Everything outside the folder goes through untouched.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATH_CALLS = ("open", "mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink", "truncate")
DESCRIPTOR_CALLS = ("write", "pwrite", "fsync", "ftruncate", "sendfile")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
BURST = 20
SHORT = -1
"""In place of an error number: half of the bytes are written and reported."""


class Killed(BaseException):
    """Stands for the end of the process: from then on no call has any effect."""


@dataclass(frozen=True)
class Op:
    """One recorded operation. `path` and `other` (the target of a rename) are relative to the folder."""

    call: str
    path: str
    other: str = ""
    data: bytes = b""
    at: int = 0


@dataclass
class Watch:
    """What happens to the calls below `folder`: `on_call(number, call)` may raise, or return SHORT for a write."""

    folder: Path
    on_call: Callable[[int, str], int] = lambda _number, _call: 0
    record: bool = False
    sync: bool = True
    """False: fsync is counted and not done; only a power failure could tell."""
    calls: int = 0
    ops: list[Op] = field(default_factory=list)
    descriptors: dict[int, str] = field(default_factory=dict)

    def inside(self, path: object) -> str | None:
        """The path relative to the folder, None for one outside it."""
        if isinstance(path, int) or not isinstance(path, str | bytes | os.PathLike):
            return None
        full = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - links must not be followed
        root = str(self.folder)
        return full[len(root) + 1 :] if full.startswith(root + os.sep) else "" if full == root else None

    def hit(self, call: str) -> int:
        """Count one call and let `on_call` decide."""
        self.calls += 1
        return self.on_call(self.calls, call)

    def note(self, call: str, path: str, other: str = "", data: bytes = b"", at: int = 0) -> None:
        """Record a call that succeeded."""
        if self.record:
            self.ops.append(Op(call, path, other, data, at))


def failing(number: int, code: int, *, sticky: bool = False) -> Callable[[int, str], int]:
    """Call `number` fails with an error number (or SHORT, for writes), and with `sticky` every one after it.

    Interrupted calls come back after a while: Python tries some of them again for ever.
    """
    last = number if not sticky else number + BURST if code == errno.EINTR else sys.maxsize

    def on_call(now: int, call: str) -> int:
        if not number <= now <= last:
            return 0
        if code == SHORT:
            return SHORT
        raise OSError(code, f"{os.strerror(code)} (call {now}: {call})")

    return on_call


def dying(number: int, die: Callable[[], object] | None = None) -> Callable[[int, str], int]:
    """From call `number` on nothing happens any more; `die` ends the process, without it `Killed` is raised."""

    def on_call(now: int, call: str) -> int:
        del call
        if now >= number:
            if die is not None:
                die()
            raise Killed
        return 0

    return on_call


class _File(io.FileIO):
    """A file whose writes, truncations and syncs are counted."""

    def __init__(self, watch: Watch, path: str, inside: str, mode: str) -> None:
        super().__init__(path, mode)
        self._watch, self._inside = watch, inside
        watch.descriptors[self.fileno()] = inside

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._watch.hit("write") == SHORT and len(view) > 1:
            view = view[: len(view) // 2]
        at = super().tell()
        count = super().write(view)
        self._watch.note("write", self._inside, data=bytes(view[:count]), at=at)
        return count

    def truncate(self, size: int | None = None) -> int:
        self._watch.hit("ftruncate")
        done = super().truncate(size)
        self._watch.note("truncate", self._inside, at=done)
        return done

    def close(self) -> None:
        if not self.closed:
            self._watch.descriptors.pop(self.fileno(), None)
        super().close()


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[Watch]:
    """Put the counting functions in place for a block."""
    real = {name: getattr(os, name) for name in (*PATH_CALLS, *DESCRIPTOR_CALLS, "close") if hasattr(os, name)}
    real_open = builtins.open
    for name in PATH_CALLS:
        setattr(os, name, _path_call(watch, name, real[name]))
    for name in DESCRIPTOR_CALLS:
        if name in real:
            setattr(os, name, _descriptor_call(watch, name, real[name]))
    os.close = _closing(watch, real["close"])
    builtins.open = io.open = _opening(watch, real_open)  # type: ignore[assignment]
    try:
        yield watch
    finally:
        builtins.open = io.open = real_open
        for name, function in real.items():
            setattr(os, name, function)


def _path_call(watch: Watch, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *args: Any, **options: Any) -> Any:
        folder = watch.descriptors.get(options["dir_fd"]) if options.get("dir_fd") is not None else None
        inside = os.path.join(folder, path) if folder is not None else watch.inside(path)  # noqa: PTH118
        reading = name == "open" and not (args and args[0] & WRITING)
        if inside is None:
            return real(path, *args, **options)
        if not reading:
            watch.hit(name)
        full = os.path.join(watch.folder, inside)  # noqa: PTH118
        makes = name == "open" and not reading and bool(args[0] & os.O_TRUNC or not os.path.lexists(full))
        done = real(path, *args, **options)
        if name == "open":
            watch.descriptors[done] = inside
            if makes:
                watch.note("create", inside)
        else:
            other = watch.inside(args[0]) if name in ("rename", "replace", "link") else ""
            watch.note({"replace": "rename", "remove": "unlink"}.get(name, name), inside, other or "")
        return done

    return call


def _descriptor_call(watch: Watch, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(descriptor: Any, *args: Any) -> Any:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        inside = watch.descriptors.get(number)
        if inside is None:
            return real(descriptor, *args)
        if watch.hit(name) == SHORT:
            if name in ("write", "pwrite") and len(args[0]) > 1:
                args = (args[0][: len(args[0]) // 2], *args[1:])
            elif name == "sendfile" and args[2] > 1:
                args = (args[0], args[1], args[2] // 2)
        at = os.lseek(number, 0, os.SEEK_CUR) if name == "write" else 0
        done = real(descriptor, *args) if watch.sync or name != "fsync" else None
        if name == "fsync":
            watch.note("fsync", inside)
        elif name == "write":
            watch.note("write", inside, data=bytes(args[0][:done]), at=at)
        return done

    return call


def _closing(watch: Watch, real: Callable[[int], None]) -> Callable[[int], None]:
    def close(descriptor: int) -> None:
        watch.descriptors.pop(descriptor, None)
        real(descriptor)

    return close


def _opening(watch: Watch, real: Callable[..., Any]) -> Callable[..., Any]:
    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        inside = watch.inside(file)
        if inside is None or not set(mode) & set("wxa+"):
            return real(file, mode, buffering, *args, **options)
        new = not os.path.lexists(file) or "w" in mode
        watch.hit("open")
        raw = _File(watch, os.fspath(file), inside, mode.replace("b", "").replace("t", ""))
        if new:
            watch.note("create", inside)
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)

    return opened


ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EINTR": errno.EINTR, "short write": SHORT}
