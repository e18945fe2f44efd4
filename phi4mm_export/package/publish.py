"""A folder that appears whole or not at all.

Work happens in a claimed sibling (claim.py); `publish` syncs the finished folder and renames it into place. With an
existing target: target -> TOKEN/previous, TOKEN/package -> target, then the old one goes. A run that died in between
is healed by the next one, before it does anything else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from phi4mm_export.errors import SystemLimitError, UsageError
from phi4mm_export.package.claim import ADDED_NBYTES, OCCUPIED, PREVIOUS, claim_path, claimed, debris_of, insist
from phi4mm_export.package.room import check_room, disk_errors, tree_nbytes
from phi4mm_export.spec.on_disk import exists, home_expanded, is_entry, is_file, is_folder, is_link, real_path

MARKERS = ("genai_config.json", "phi4mm.json")
"""A folder with one of these is a package, and may be replaced with --overwrite."""
PACKAGE, KEPT = "package", "kept"
USUAL_NAME_NBYTES = 255
"""The longest name of nearly every file system, for those that do not tell."""
GLOB = frozenset("*?[")


def kept_folder(staging: Path) -> Path:
    """Beside the folder that `staged` gives: what is worth keeping for the next run should this one be killed."""
    return staging.parent / KEPT


def left_folder(staging: Path) -> Path:
    """With `keep_left`: the work folder of a dead run, holding its `package` and `kept`; may be absent."""
    return staging.parent.parent / "left"


def check_parent(target: Path) -> None:
    """Refuse a place that nothing can be put at.

    Raises SystemLimitError where the folder that should hold `target` does not exist or cannot be written, UsageError
    for a name that is none, or that leaves no room for the longer names of the folders in which it is prepared.
    """
    parent = target.parent
    if target.name in ("", ".."):
        raise UsageError("the target has no name of its own", where=str(target), fix="write out the folder's name")
    if not is_folder(parent):
        raise SystemLimitError(
            "the folder that should hold the output does not exist", where=str(parent), fix="create it first"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SystemLimitError(
            "the folder that should hold the output cannot be written", where=str(parent), fix="choose another"
        )
    nbytes, most = _name_nbytes(target), _longest_name(parent)
    if nbytes > most:
        raise UsageError(
            f"the target's name has {nbytes} bytes, expected at most {most}: it is prepared under a longer one",
            where=str(target),
            fix="choose a shorter name",
        )


def check_apart(
    target: Path,
    *,
    reads: Iterable[str | Path | None] = (),
    writes: Iterable[str | Path | None] = (),
    replaced: Path | None = None,
) -> None:
    """Refuse a target that would take something along with it when it is replaced. Raises UsageError.

    reads: files, folders and globs that the run reads. writes: where it keeps something else. Neither may be the target
    or lie in it. replaced: a package that may be replaced by its own new form; neither may lie deeper in the other.
    """
    home = real_path(target)
    read = [path for path in reads if path is not None and (GLOB & set(str(path)) or exists(home_expanded(path)))]
    others = [home_expanded(path) for path in (*read, *writes) if path is not None]
    if replaced is not None and real_path(replaced) != home:
        if home.is_relative_to(real_path(replaced)):
            raise UsageError("the target lies inside the source", where=str(target), fix="choose another place")
        others.append(replaced)
    for path in others:
        if real_path(path).is_relative_to(home):
            raise UsageError(
                f"expected a target that holds nothing else of this run, found {path} in it",
                where=str(target),
                fix="choose another target: what lies in this one goes when it is replaced",
            )


def check_target(target: Path, *, overwrite: bool, markers: tuple[str, ...] = MARKERS) -> None:
    """Refuse a target that must not be replaced, before any work.

    Raises UsageError for an existing target without `overwrite`, for one that holds none of `markers`, for a mount
    point, and for the current folder and those above it; else as `check_parent`.
    """
    check_parent(target)
    if not is_entry(target):
        return
    if not overwrite:
        raise UsageError("the target exists already", where=str(target), fix="choose another name, or pass --overwrite")
    if is_link(target) or not is_folder(target):
        raise UsageError(
            "the target is not a folder", where=str(target), fix="remove it yourself, or choose another name"
        )
    if os.path.ismount(target):
        raise UsageError(
            "the target is where a file system is mounted, so it cannot be replaced",
            where=str(target),
            fix="choose a folder in it",
        )
    if _is_where_we_are(target):
        raise UsageError(
            "the target is, or holds, the current folder, which would be gone when it is replaced",
            where=str(target),
            fix="start from another folder",
        )
    if any(target.iterdir()) and not any(is_file(target / name) for name in markers):
        raise UsageError(
            f"the target is a folder that holds none of {', '.join(markers)}, so it is not replaced",
            where=str(target),
            fix="remove it yourself, or choose another name",
        )


@contextlib.contextmanager
def staged(
    target: Path,
    *,
    overwrite: bool,
    markers: tuple[str, ...] = MARKERS,
    need: int = 0,
    what: str = "the package",
    keep_left: bool = False,
) -> Iterator[Path]:
    """A fresh folder to fill; renamed to `target` when the block ends, removed when it raises.

    need: bytes that `what` will take, compared with the room there is before the block starts. keep_left: keep a dead
    run's work folder (see `left_folder`) instead of removing it.

    Raises as `check_target`, and SystemLimitError when a living run holds the target, when there is no room, and for
    whatever the system refuses to do inside the block.
    """
    target = target.absolute()
    check_target(target, overwrite=overwrite, markers=markers)
    with disk_errors(target.parent, need), claimed(target, keep_left=keep_left) as claim:
        check_target(target, overwrite=overwrite, markers=markers)
        check_room(target.parent, need, what=what, already=tree_nbytes(claim.left))
        (claim.work / PACKAGE).mkdir()
        yield claim.work / PACKAGE
        check_target(target, overwrite=overwrite, markers=markers)
        publish(claim.work, target)


def publish(work: Path, target: Path) -> None:
    """Sync the finished folder `work`/package and rename it into place; an old target ends in `work`/previous.

    The old folder must be found again whatever a power failure forgets, so the way to it is on disk before it is moved;
    and it must not lose a file before both renames are on disk. Raises SystemLimitError if another run published
    meanwhile; after an error the old target stands.
    """
    package, previous = work / PACKAGE, work / PREVIOUS
    sync_tree(package)
    sync_way_to(work)
    try:
        if is_entry(target):
            target.rename(previous)
        package.rename(target)
        sync_folder(target.parent)
        sync_folder(work)
    except BaseException as err:
        insist(lambda: _roll_back(work, target))
        if isinstance(err, OSError) and err.errno in OCCUPIED:
            raise SystemLimitError(
                "another run published this target meanwhile", where=str(target), fix="look at it, then run again"
            ) from err
        raise


def _name_nbytes(target: Path) -> int:
    """The bytes of a name on disk. Raises UsageError for one that cannot be written down."""
    try:
        name = os.fsencode(target.name)
    except UnicodeEncodeError:
        name = b"\0"
    if b"\0" in name:
        raise UsageError("no file can have this name", where=repr(str(target)), fix="choose another name")
    return len(name)


def _longest_name(folder: Path) -> int:
    """The bytes that a target's name may have there."""
    try:
        most = os.pathconf(folder, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):
        most = USUAL_NAME_NBYTES
    return most - ADDED_NBYTES


def _is_where_we_are(target: Path) -> bool:
    try:
        return real_path(Path.cwd()).is_relative_to(real_path(target))
    except FileNotFoundError:
        return False


def _roll_back(work: Path, target: Path) -> None:
    """Undo the renames of `publish` as far as they happened."""
    package, previous = work / PACKAGE, work / PREVIOUS
    with contextlib.suppress(OSError):
        if is_entry(target) and not exists(package):
            target.rename(package)
        if exists(previous) and not is_entry(target):
            previous.rename(target)


def recover(target: Path) -> None:
    """Undo or finish what a killed run left: an old folder without a new one comes back, leftovers go.

    Raises SystemLimitError when a living run holds the target.
    """
    if exists(claim_path(target)) or debris_of(target):
        with claimed(target):
            pass


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below, deepest first."""
    for root, folders, files in os.walk(folder, topdown=False):
        for name in sorted(files):
            with (Path(root) / name).open("rb+") as handle:
                os.fsync(handle.fileno())
        for name in sorted(folders):
            sync_folder(Path(root) / name)
    sync_folder(folder)


def sync_way_to(work: Path) -> None:
    """fsync a work folder, the claim that holds it and the folder that holds the claim: their entries are on disk."""
    for folder in (work, work.parent, work.parent.parent):
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
