"""The right to prepare a target: one folder that appears beside it, whole, by one rename.

    .NAME.staging/            the claim; who wins the rename works, everyone else is refused
        owner.json            process and token of the holder, locked while it lives
        TOKEN/                the holder's own work folder; nobody else ever uses this path
        left/                 what a dead run had finished, for the holder to judge
    .NAME.staging-TOKEN/      a claim that is being made, given up, or taken from a dead run

Locks only tell living holders from dead ones. Where they do nothing, process numbers do; where nothing can tell, the
holder counts as alive. Should that judgement ever be wrong, the displaced run finds its own TOKEN folder gone and
fails: two runs never write below one path.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phi4mm_export.errors import SystemLimitError
from phi4mm_export.package.lock import (
    LockState,
    is_locked,
    may_be_alive,
    process_record,
    same_machine,
    try_lock,
)
from phi4mm_export.spec.on_disk import exists, is_entry, is_folder, is_link

OWNER = "owner.json"
LEFT = "left"
PREVIOUS = "previous"
OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST})
TOKEN_NBYTES = 8
ADDED_NBYTES = len("..staging-") + 2 * TOKEN_NBYTES + len("-old")
"""By how much the longest name beside a target is longer than the target's own."""
ATTEMPTS = 20
"""Rounds of "occupied, holder dead, taken aside, occupied again" before giving up; each needs another run's doing."""


Heal = Callable[[Path, Path], None]
"""Called with a dead run's work folder and the target: gives the target back what the run had put aside."""


def claim_path(target: Path) -> Path:
    """The folder beside `target` in which it is prepared."""
    return target.parent / f".{target.name}.staging"


class Claim:
    """A held claim. `work` is the holder's own folder; `left` what a dead run left, if anything."""

    def __init__(self, target: Path, heal: Heal) -> None:
        self._heal = heal
        self.target, self.token = target, secrets.token_hex(TOKEN_NBYTES)
        self.folder = claim_path(target)
        self._made = target.parent / f"{self.folder.name}-{self.token}"
        self._descriptor = -1

    @property
    def work(self) -> Path:
        """The only folder into which the holder writes."""
        return self.folder / self.token

    @property
    def left(self) -> Path:
        """The work folder of a dead run, moved here; absent when there was none worth keeping."""
        return self.folder / LEFT

    def acquire(self) -> None:
        """Win the claim. Raises SystemLimitError, naming the holder, when a living run has it."""
        try:
            self._prepare()
            for _ in range(ATTEMPTS):
                try:
                    self._made.rename(self.folder)
                except OSError as err:
                    occupied = err.errno in OCCUPIED or (os.name == "nt" and exists(self.folder))
                    if not occupied:
                        raise
                    self._take_aside()
                    continue
                self._hold(self.folder)
                return
            raise self._refusal({})
        except BaseException:
            insist(lambda: remove(self._made))
            self._let_go()
            raise

    def release(self) -> None:
        """Give the claim up and remove it; what a failed exchange still needs stays for the next run to heal."""
        if self.target_is_lost():
            self._let_go()
            return
        if os.name == "nt":
            self._let_go()  # Windows renames no folder with an open file
        insist(self._remove_own)
        self._let_go()

    def keep(self) -> None:
        """Give the claim up and leave the work folder as `left` of the next holder."""
        remove(self.left)
        move(self.work, self.left)
        with contextlib.suppress(OSError):
            (self.folder / OWNER).unlink()
        self._let_go()

    def target_is_lost(self) -> bool:
        """Whether the old target stands aside and no target is in its place."""
        return exists(self.work / PREVIOUS) and not is_entry(self.target)

    def settle(self, *, keep_left: bool) -> None:
        """Heal the target from what dead runs left; with `keep_left` the newest work folder becomes `left`, the rest
        goes."""
        dead = [self.folder / LEFT, *self._work_folders_of_the_dead()]
        for folder in dead:
            if exists(folder / PREVIOUS):
                self._heal(folder, self.target)
        if keep_left:
            found = [folder for folder in dead if is_folder(folder)]
            best = max(found, key=lambda folder: (folder.stat().st_mtime_ns, folder.name), default=None)
            if best is not None and best != self.left:
                remove(self.left)
                best.rename(self.left)
        else:
            remove(self.left)
        for debris in self._debris():
            remove(debris)

    def _prepare(self) -> None:
        self._made.mkdir()
        (self._made / self.token).mkdir()
        record = json.dumps({"token": self.token, **process_record()})
        (self._made / OWNER).write_text(record, encoding="utf-8")
        if os.name != "nt":
            self._hold(self._made)

    def _hold(self, folder: Path) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(folder / OWNER, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
            try_lock(self._descriptor)

    def _remove_own(self) -> None:
        if owner_of(self.folder).get("token") == self.token:
            move(self.folder, self._made)
        for folder in (self._made, self.folder):
            if owner_of(folder).get("token") == self.token:
                remove(folder)

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _take_aside(self) -> None:
        """Move a dead run's claim out of the way. Raises SystemLimitError if its holder lives."""
        holder = owner_of(self.folder)
        if self._is_alive(self.folder, holder):
            raise self._refusal(holder)
        aside = self._made.with_name(f"{self._made.name}-old")
        remove(aside)
        try:
            self.folder.rename(aside)
        except FileNotFoundError:
            return
        if owner_of(aside).get("token") != holder.get("token"):  # somebody claimed in this very moment
            with contextlib.suppress(OSError):
                aside.rename(self.folder)

    def _is_alive(self, folder: Path, holder: dict[str, Any]) -> bool:
        try:
            state = is_locked(folder / OWNER)
        except FileNotFoundError:
            return False  # a claim is made with its owner inside: this is debris
        except OSError:
            return True
        if state is LockState.HELD_ELSEWHERE:
            return True
        return not (state is LockState.TAKEN and self._locks_work()) and may_be_alive(holder)

    def _locks_work(self) -> bool:
        """Whether a second lock on our own record is refused, as it must be."""
        record = (self._made if exists(self._made) else self.folder) / OWNER
        return self._descriptor < 0 or is_locked(record) is LockState.HELD_ELSEWHERE

    def _debris(self) -> list[Path]:
        """Claims of dead runs that were being made, given up or taken."""
        return [path for path in debris_of(self.target) if not self._is_alive(path, owner_of(path))]

    def _work_folders_of_the_dead(self) -> list[Path]:
        return sorted(folder for debris in self._debris() if is_folder(debris) for folder in debris.iterdir())

    def _refusal(self, holder: dict[str, Any]) -> SystemLimitError:
        who = f"process {holder['pid']}" if isinstance(holder.get("pid"), int) else "a process"
        fix = "wait for it, or choose another name"
        if holder and not same_machine(holder):
            who += f" on {holder.get('host')}"
            fix = f"wait for it; if it is gone, remove {self.folder}"
        return SystemLimitError(f"another run ({who}) is writing this target", where=str(self.target), fix=fix)


def heal_folder(work: Path, target: Path) -> None:
    """An old folder that stands aside comes back, unless a new one took its place."""
    if not is_entry(target):
        (work / PREVIOUS).rename(target)


@contextlib.contextmanager
def claimed(target: Path, *, heal: Heal = heal_folder, keep_left: bool = False) -> Iterator[Claim]:
    """Hold the claim on `target` for a block; what dead runs left is healed and cleared first.

    Raises SystemLimitError when a living run holds it.
    """
    claim = Claim(target, heal)
    try:
        claim.acquire()
        claim.settle(keep_left=keep_left)
        yield claim
    finally:
        claim.release()


def debris_of(target: Path) -> list[Path]:
    """Claims on `target` that are being made, were given up or taken aside, by runs living or dead."""
    pattern = re.compile(rf"{re.escape(claim_path(target).name)}-[0-9a-f]{{{2 * TOKEN_NBYTES}}}(-old)?")
    return sorted(path for path in target.parent.iterdir() if pattern.fullmatch(path.name))


def owner_of(folder: Path) -> dict[str, Any]:
    """The record of a claim's holder; empty when there is none."""
    try:
        record = json.loads((folder / OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def insist(work: Callable[[], None]) -> None:
    """Run a clean-up to its end although the user presses Ctrl-C again; the interrupt is raised afterwards."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            work()
            break
        except KeyboardInterrupt as err:
            interrupt = err
    if interrupt is not None:
        raise interrupt


def move(source: Path, target: Path) -> None:
    """Rename if there is something to rename and it can be done."""
    with contextlib.suppress(OSError):
        source.rename(target)


def remove(path: Path) -> None:
    """Delete a file or a folder with everything in it, as far as possible."""
    if is_folder(path) and not is_link(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
