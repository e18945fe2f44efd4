"""A file lock that dies with its process, and the question whether a process still lives.

filelock is not used here: it leaves its file behind, and where a file system has no locks it falls back to marker
files, which outlive their process. A claim (claim.py) needs the bare operation, on a file that has its own life.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

_CONTENTION = frozenset({errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK})
_LOCKED_BYTE = 1 << 30
"""Windows locks bytes, and locked bytes cannot be read: one far behind the record's end is taken."""


class LockState(Enum):
    """What trying to lock a file found."""

    TAKEN = "taken"
    HELD_ELSEWHERE = "held elsewhere"
    UNSUPPORTED = "unsupported"


def try_lock(descriptor: int) -> LockState:
    """Lock an open file for this descriptor, without waiting; closing the descriptor or its process's end unlocks."""
    try:
        _lock(descriptor)
    except OSError as err:
        return LockState.HELD_ELSEWHERE if err.errno in _CONTENTION else LockState.UNSUPPORTED
    return LockState.TAKEN


def is_locked(path: Path) -> LockState:
    """Whether somebody else holds the lock of `path`: TAKEN means nobody (and it is free again on return)."""
    descriptor = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    try:
        return try_lock(descriptor)
    finally:
        os.close(descriptor)


if sys.platform == "win32":

    def _lock(descriptor: int) -> None:
        import msvcrt

        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:

    def _lock(descriptor: int) -> None:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def process_record() -> dict[str, Any]:
    """This process, so that another one can tell later whether it still lives."""
    return {"pid": os.getpid(), "started": _start_of(os.getpid()), "machine": _machine(), "host": platform.node()}


def may_be_alive(record: Mapping[str, Any]) -> bool:
    """Whether the process of a `process_record` may still run: True where this machine cannot tell."""
    pid = record.get("pid")
    if record.get("machine") != _machine() or not isinstance(pid, int) or os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return record.get("started") in (None, _start_of(pid))


def same_machine(record: Mapping[str, Any]) -> bool:
    """Whether a `process_record` was made on this machine since it started."""
    return record.get("machine") == _machine()


def _machine() -> str:
    """Host, boot and process namespace: within these a process number names one process at a time."""
    return f"{platform.node()} {_text('/proc/sys/kernel/random/boot_id')} {_process_namespace()}"


def _process_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process started, in clock ticks since boot (field 22 of /proc/PID/stat); None where that is not known."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
