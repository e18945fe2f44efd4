"""An .onnx file and its data file that appear together or not at all.

Two files cannot be renamed at once, so the graph file is what counts: it comes last, and with an existing target the
old graph goes first. `recover_model` heals a run that died in between: the old pair comes back, or the new one stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from phi4mm_export.errors import SystemLimitError, UsageError
from phi4mm_export.package.publish import locked, previous_path, staging_path, sync_folder, sync_tree
from phi4mm_export.spec.contract import data_file_name

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
    parent = target.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        kind = "cannot be written" if parent.is_dir() else "does not exist"
        raise SystemLimitError(f"the folder that should hold the output {kind}", where=str(parent))
    data = target.with_name(data_file_name(target.name))
    if target.exists() or target.is_symlink():
        if not overwrite:
            raise UsageError(
                "the target exists already", where=str(target), fix="choose another name, or pass --overwrite"
            )
        if target.is_symlink() or not target.is_file():
            raise UsageError("the target is not a plain file", where=str(target), fix="choose another name")
    elif (data.exists() or data.is_symlink()) and not previous_path(target).exists():
        raise UsageError(
            f"{data.name} exists and belongs to no {target.name}", where=str(parent), fix="remove it, or choose another"
        )


@contextlib.contextmanager
def staged_model(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A fresh folder for `target.name` and its data file; both are moved beside each other when the block ends.

    After an error nothing remains. Raises as `check_model_target`, and SystemLimitError when another run holds it.
    """
    target = target.absolute()
    check_model_target(target, overwrite=overwrite)
    with locked(target):
        recover_model(target)
        check_model_target(target, overwrite=overwrite)
        staging = staging_path(target)
        try:
            staging.mkdir()
            yield staging
            publish_model(staging, target)
        except BaseException:
            recover_model(target)
            raise


def publish_model(staging: Path, target: Path) -> None:
    """Move the staged files beside `target`: the old pair aside, graph first; then the new data, then the new graph."""
    sync_tree(staging)
    previous, pair = previous_path(target), (target, target.with_name(data_file_name(target.name)))
    old = [path for path in pair if path.exists()]
    previous.mkdir()
    (previous / RECORD).write_text("\n".join(path.name for path in old), encoding="utf-8")
    sync_tree(previous)
    for path in old:
        path.rename(previous / path.name)
    for path in reversed(pair):
        if (staging / path.name).exists():
            (staging / path.name).rename(path)
    sync_folder(target.parent)
    shutil.rmtree(previous)
    shutil.rmtree(staging)


def recover_model(target: Path) -> None:
    """Undo or finish what a killed run left beside the target."""
    previous, staging = previous_path(target), staging_path(target)
    graph, data = target, target.with_name(data_file_name(target.name))
    finished = graph.exists() and not (staging / graph.name).exists()
    if (previous / RECORD).exists() and not finished:
        old = (previous / RECORD).read_text(encoding="utf-8").splitlines()
        if data.name not in old:
            data.unlink(missing_ok=True)
        for path in (data, graph):
            if path.name in old and (previous / path.name).exists():
                (previous / path.name).replace(path)
    for folder in (previous, staging):
        if folder.exists():
            shutil.rmtree(folder)
