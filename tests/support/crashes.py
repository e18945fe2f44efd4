"""What a disk may hold after a power failure, from a recorded list of operations.

Every operation is resolved to inodes as if all had been applied. A crash after the first k of them may lose any that
no fsync has made durable: data of a file by an fsync of that file, an entry of a folder by an fsync of the folder
(a rename needs both folders). What is lost and what is kept of the rest is chosen by `crash_states`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from support.syscalls import Op

ROOT = 0
MAX_PENDING = 24
"""Of more pending operations than this, only the last ones are lost one by one: the earlier ones have company."""


@dataclass(frozen=True)
class Effect:
    """An operation on inodes: bytes put into a file, its size, an entry removed, an entry made."""

    inode: int = -1
    data: bytes | None = None
    at: int = 0
    size: int | None = None
    gone: tuple[int, str] | None = None
    made: tuple[int, str, int] | None = None
    is_folder: bool = False


@dataclass
class Disk:
    """Folders and files by inode."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    def find(self, path: str) -> int | None:
        """The inode that a path names."""
        inode: int | None = ROOT
        for part in PurePosixPath(path).parts:
            inode = self.folders.get(inode, {}).get(part) if inode is not None else None
        return inode

    def tree(self, path: str = "") -> dict[str, bytes]:
        """Relative path -> bytes of every file below a path; empty folders are left out."""
        start = self.find(path)
        found: dict[str, bytes] = {}
        waiting = [("", start)] if start is not None else []
        while waiting:
            name, inode = waiting.pop()
            if inode in self.files:
                found[name] = self.files[inode]
            for child, number in self.folders.get(inode, {}).items():
                waiting.append((f"{name}/{child}".lstrip("/"), number))
        return found

    def apply(self, effect: Effect) -> None:
        if effect.gone is not None:
            self.folders.get(effect.gone[0], {}).pop(effect.gone[1], None)
        if effect.made is not None:
            folder, name, inode = effect.made
            self.folders.setdefault(folder, {})[name] = inode
            if effect.is_folder:
                self.folders.setdefault(inode, {})
            else:
                self.files.setdefault(inode, b"")
        if effect.data is not None:
            old = self.files.get(effect.inode, b"").ljust(effect.at, b"\0")
            self.files[effect.inode] = old[: effect.at] + effect.data + old[effect.at + len(effect.data) :]
        if effect.size is not None:
            self.files[effect.inode] = self.files.get(effect.inode, b"").ljust(effect.size, b"\0")[: effect.size]

    def copy(self) -> Disk:
        return Disk({inode: dict(entries) for inode, entries in self.folders.items()}, dict(self.files))


@dataclass(frozen=True)
class Recording:
    """The disk before, the effects in order, and after how many of them each one is durable (None: never)."""

    before: Disk
    effects: tuple[Effect, ...]
    durable_after: tuple[int | None, ...]


def recording(before: Mapping[str, bytes], ops: list[Op]) -> Recording:
    """Resolve recorded operations; `before` are the files that were there, durable."""
    disk, numbers = Disk(), itertools.count(1)
    for path, data in sorted(before.items()):
        folder = ROOT
        *parents, name = PurePosixPath(path).parts
        for part in parents:
            folder = disk.folders[folder].setdefault(part, 0) or _new_folder(disk, folder, part, next(numbers))
        inode = next(numbers)
        disk.folders[folder][name], disk.files[inode] = inode, data
    start, effects, synced = disk.copy(), list[Effect](), list[tuple[int, int]]()
    for op in ops:
        if op.call == "fsync":
            inode = disk.find(op.path)
            synced += [(len(effects), inode)] if inode is not None else []
            continue
        effect = _resolve(disk, op, numbers)
        if effect is not None:
            disk.apply(effect)
            effects.append(effect)
    return Recording(start, tuple(effects), tuple(_durable(e, i, synced) for i, e in enumerate(effects)))


def crash_states(recorded: Recording, *, lost: int) -> Iterator[Disk]:
    """Every prefix, with up to `lost` pending operations lost and the others kept, and the other way round; also
    with all pending data, all pending entries, and everything pending lost."""
    for count in range(len(recorded.effects) + 1):
        pending = [i for i in range(count) if (after := recorded.durable_after[i]) is None or after > count]
        data = {i for i in pending if recorded.effects[i].data is not None or recorded.effects[i].size is not None}
        choices = {frozenset(data), frozenset(set(pending) - data), frozenset(pending)}
        tail = pending[-MAX_PENDING:]
        for size in range(lost + 1):
            for chosen in itertools.combinations(tail, size):
                choices |= {frozenset(chosen), frozenset(set(pending) - set(chosen))}
        for dropped in sorted(choices, key=sorted):
            disk = recorded.before.copy()
            for i in range(count):
                if i not in dropped:
                    disk.apply(recorded.effects[i])
            yield disk


def _new_folder(disk: Disk, parent: int, name: str, inode: int) -> int:
    disk.folders[parent][name], disk.folders[inode] = inode, {}
    return inode


def _resolve(disk: Disk, op: Op, numbers: Iterator[int]) -> Effect | None:
    parent, name = _place(disk, op.path)
    if op.call in ("create", "mkdir"):
        inode = disk.find(op.path)
        if op.call == "create" and inode is not None:
            return Effect(inode=inode, size=0)
        return Effect(made=(parent, name, next(numbers)), is_folder=op.call == "mkdir")
    inode = disk.find(op.path)
    if inode is None:
        return None
    if op.call == "write":
        return Effect(inode=inode, data=op.data, at=op.at)
    if op.call == "truncate":
        return Effect(inode=inode, size=op.at)
    if op.call in ("unlink", "rmdir"):
        return Effect(gone=(parent, name))
    if op.call == "rename":
        folder, new = _place(disk, op.other)
        return Effect(gone=(parent, name), made=(folder, new, inode), is_folder=inode in disk.folders)
    raise ValueError(f"no effect is known for {op.call}")


def _place(disk: Disk, path: str) -> tuple[int, str]:
    pure = PurePosixPath(path)
    parent = disk.find(str(pure.parent)) if str(pure.parent) != "." else ROOT
    return (parent if parent is not None else -1), pure.name


def _durable(effect: Effect, number: int, synced: list[tuple[int, int]]) -> int | None:
    """After how many effects this one is durable: the last sync that it needs, counted from the first after it."""
    needed = {effect.inode} if effect.data is not None or effect.size is not None else set()
    if effect.gone is not None:
        needed.add(effect.gone[0])
    if effect.made is not None:
        needed.add(effect.made[0])
    times = [next((at for at, inode in synced if at > number and inode == one), None) for one in needed]
    return None if None in times else max(time for time in times if time is not None)
