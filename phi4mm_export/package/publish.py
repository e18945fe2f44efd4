"""A folder that appears whole or not at all.

Work happens in a sibling `.NAME.staging`; `publish` syncs it and renames it into place. With an existing target:
target -> `.NAME.previous`, staging -> target, previous removed; `recover` heals a run that died in between.
Correctness rests on the renames; the lock only keeps two runs from wasting work.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import filelock

from phi4mm_export.errors import SystemLimitError, UsageError

MARKERS = ("genai_config.json", "phi4mm.json")
"""A folder with one of these is a package, and may be replaced with --overwrite."""


def staging_path(target: Path) -> Path:
    """The hidden sibling in which a folder is prepared."""
    return target.parent / f".{target.name}.staging"


def previous_path(target: Path) -> Path:
    """Where the old folder stands for the instant of the exchange."""
    return target.parent / f".{target.name}.previous"


def lock_path(target: Path) -> Path:
    """The lock beside the target; it exists only while a run holds it."""
    return target.parent / f".{target.name}.lock"


def check_target(target: Path, *, overwrite: bool, markers: tuple[str, ...] = MARKERS) -> None:
    """Refuse a target that must not be replaced, before any work.

    Raises UsageError for an existing target without `overwrite` and for one that holds none of `markers`;
    SystemLimitError where the parent does not exist or cannot be written.
    """
    parent = target.parent
    if not parent.is_dir():
        raise SystemLimitError(
            "the folder that should hold the output does not exist", where=str(parent), fix="create it first"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SystemLimitError(
            "the folder that should hold the output cannot be written", where=str(parent), fix="choose another"
        )
    if not (target.exists() or target.is_symlink()):
        return
    if not overwrite:
        raise UsageError("the target exists already", where=str(target), fix="choose another name, or pass --overwrite")
    if target.is_symlink() or not target.is_dir():
        raise UsageError(
            "the target is not a folder", where=str(target), fix="remove it yourself, or choose another name"
        )
    if any(target.iterdir()) and not any((target / name).is_file() for name in markers):
        raise UsageError(
            f"the target is a folder that holds none of {', '.join(markers)}, so it is not replaced",
            where=str(target),
            fix="remove it yourself, or choose another name",
        )


@contextlib.contextmanager
def staged(target: Path, *, overwrite: bool, markers: tuple[str, ...] = MARKERS) -> Iterator[Path]:
    """A fresh folder to fill; renamed to `target` when the block ends, removed when it raises.

    Raises as `check_target`, and SystemLimitError when another run holds the target.
    """
    target = target.absolute()
    check_target(target, overwrite=overwrite, markers=markers)
    with locked(target):
        recover(target)
        check_target(target, overwrite=overwrite, markers=markers)
        staging = staging_path(target)
        try:
            staging.mkdir()
            yield staging
            publish(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def publish(staging: Path, target: Path) -> None:
    """Sync a finished folder and rename it into place."""
    sync_tree(staging)
    previous = previous_path(target)
    if target.exists():
        target.rename(previous)
        try:
            staging.rename(target)
        except BaseException:
            previous.rename(target)
            raise
    else:
        staging.rename(target)
    sync_folder(target.parent)
    if previous.exists():
        shutil.rmtree(previous)


def recover(target: Path) -> None:
    """Undo or finish what a killed run left: an old folder without a new one comes back, leftovers go."""
    previous, staging = previous_path(target), staging_path(target)
    if previous.exists():
        if target.exists():
            shutil.rmtree(previous)
        else:
            previous.rename(target)
    if staging.exists():
        shutil.rmtree(staging)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below, deepest first."""
    for root, folders, files in os.walk(folder, topdown=False):
        for name in sorted(files):
            with (Path(root) / name).open("rb+") as handle:
                os.fsync(handle.fileno())
        for name in sorted(folders):
            sync_folder(Path(root) / name)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """fsync a folder where the system can (not on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the target's lock. Raises SystemLimitError when another run holds it."""
    path = lock_path(target)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as err:
        raise SystemLimitError(
            "another run is writing this target", where=str(target), fix="wait for it, or choose another name"
        ) from err
    except NotImplementedError:
        yield  # no file locks on this file system: the renames alone keep the target whole
        return
    try:
        yield
    finally:
        lock.release()
        with contextlib.suppress(OSError):
            path.unlink()
