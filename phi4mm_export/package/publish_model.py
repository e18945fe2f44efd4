"""An .onnx file and its data file that appear together or not at all.

Two files cannot be renamed at once, so the graph file is what counts: it comes last, and with an existing target the
old graph goes first. `heal_pair` heals a run that died in between: the old pair comes back, or the new one stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from phi4mm_export.errors import UsageError
from phi4mm_export.package.claim import PREVIOUS, claim_path, claimed, insist, remove
from phi4mm_export.package.publish import PACKAGE, check_parent, sync_folder, sync_tree, sync_way_to
from phi4mm_export.package.room import check_room, disk_errors
from phi4mm_export.spec.contract import data_file_name
from phi4mm_export.spec.on_disk import exists, is_file, is_link

ONNX_SUFFIX = ".onnx"
RECORD = "old-files.txt"
"""In the folder of the old pair: which files there were, so that recovery can tell old data from new."""


def check_model_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that must not be written, before any work.

    Raises UsageError for a name that does not end in .onnx, an existing target without `overwrite`, a target that is no
    plain file, and a data file that belongs to no target; SystemLimitError for a folder that cannot be written.
    """
    if target.suffix != ONNX_SUFFIX:
        raise UsageError(
            f"expected the name of an .onnx file, because the source is one, found {target.name}",
            where="--output",
            fix=f"write {target.name}.onnx",
        )
    check_parent(target)
    data = target.with_name(data_file_name(target.name))
    if exists(target) or is_link(target):
        if not overwrite:
            raise UsageError(
                "the target exists already", where=str(target), fix="choose another name, or pass --overwrite"
            )
        if is_link(target) or not is_file(target):
            raise UsageError("the target is not a plain file", where=str(target), fix="choose another name")
    elif (exists(data) or is_link(data)) and not exists(claim_path(target)):
        raise UsageError(
            f"{data.name} exists and belongs to no {target.name}",
            where=str(target.parent),
            fix="remove it, or choose another",
        )


@contextlib.contextmanager
def staged_model(target: Path, *, overwrite: bool, need: int = 0, keep_left: bool = False) -> Iterator[Path]:
    """A fresh folder for `target.name` and its data file; both are moved beside each other when the block ends.

    need: bytes that both will take, compared with the room there is. After an error nothing remains.
    Raises as `check_model_target`, and SystemLimitError when a living run holds the target, when there is no room, and
    for whatever the system refuses to do inside the block.
    """
    target = target.absolute()
    check_model_target(target, overwrite=overwrite)
    holding = claimed(target, heal=heal_pair, keep_left=keep_left)
    with disk_errors(target.parent, need), holding as claim:
        check_model_target(target, overwrite=overwrite)
        check_room(target.parent, need, what="the graph")
        (claim.work / PACKAGE).mkdir()
        yield claim.work / PACKAGE
        check_model_target(target, overwrite=overwrite)
        publish_model(claim.work, target)


def publish_model(work: Path, target: Path) -> None:
    """Move the files in `work`/package beside `target`: the old pair aside, graph first; then new data, then new graph.

    After an error the old pair stands.
    """
    package, previous = work / PACKAGE, work / PREVIOUS
    pair = (target, target.with_name(data_file_name(target.name)))
    sync_tree(package)
    old = [path for path in pair if exists(path)]
    try:
        previous.mkdir()
        (previous / RECORD).write_text("\n".join(path.name for path in old), encoding="utf-8")
        sync_tree(previous)
        sync_way_to(work)
        for path in old:
            path.rename(previous / path.name)
            _sync_all(target.parent, previous)
        for path in reversed(pair):
            if exists(package / path.name):
                (package / path.name).rename(path)
                _sync_all(target.parent, package)
    except BaseException:
        insist(lambda: _roll_back(work, target))
        raise


def _sync_all(*folders: Path) -> None:
    """Each rename is on disk before the next one: a graph must never stand beside another graph's data."""
    for folder in folders:
        sync_folder(folder)


def _roll_back(work: Path, target: Path) -> None:
    """Take back what `publish_model` moved so far."""
    package, previous = work / PACKAGE, work / PREVIOUS
    pair = (target, target.with_name(data_file_name(target.name)))
    if not exists(previous / RECORD):
        remove(previous)  # nothing was moved yet
        return
    with contextlib.suppress(OSError):
        old = (previous / RECORD).read_text(encoding="utf-8").splitlines()
        for path in pair:
            moved_in = exists(path) and not exists(package / path.name)
            if moved_in and (path.name not in old or exists(previous / path.name)):
                path.rename(package / path.name)
        for path in reversed(pair):
            if exists(previous / path.name):
                (previous / path.name).rename(path)
        remove(previous)


def heal_pair(work: Path, target: Path) -> None:
    """Undo what a dead run began, unless its graph arrived: then everything did."""
    package, previous = work / PACKAGE, work / PREVIOUS
    graph, data = target, target.with_name(data_file_name(target.name))
    finished = exists(graph) and not exists(package / graph.name)
    if exists(previous / RECORD) and not finished:
        old = (previous / RECORD).read_text(encoding="utf-8").splitlines()
        if data.name not in old and not exists(package / data.name):
            data.unlink(missing_ok=True)
        for path in (data, graph):
            if path.name in old and exists(previous / path.name):
                (previous / path.name).replace(path)
