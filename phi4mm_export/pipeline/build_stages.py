"""The finished stages of a build, kept in one folder until the package is published, and used again by content.

    export/            the package as exported; files that a later stage took over are missing here
    export.done        what made it and the sha256 of every file
    quantize-vision/   the package with that graph replaced
    quantize-vision.done
    evaluate.done      figures alone

A stage counts as finished when its record names the same key (inputs, choices, code version) and every file still has
its digest; anything else is made again. Without a work folder the stages lie in the target's claim, where only a killed
run leaves them; with one they also outlive errors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phi4mm_export.package.claim import Claim, heal_folder, remove
from phi4mm_export.package.file_names import name_fault
from phi4mm_export.package.given_folders import WORK_DIR, made_folder
from phi4mm_export.package.publish import KEPT, PACKAGE, kept_folder, left_folder
from phi4mm_export.package.replace import replace_files
from phi4mm_export.package.resume import code_version
from phi4mm_export.package.write import WrittenFile, hashed
from phi4mm_export.spec.json_text import json_bytes
from phi4mm_export.spec.on_disk import exists, is_file, is_folder, is_link

WORK_NAME = "phi4mm-build"
"""Work folders hold one claim under this name."""
STAGES = "build"


@dataclass(frozen=True)
class Stage:
    """A finished stage: its folder, its key, its files (none for figures alone), and what else it found out."""

    name: str
    folder: Path
    key: str
    files: tuple[WrittenFile, ...]
    facts: Mapping[str, Any]
    reused: bool = False


class Stages:
    """The stages in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def known(self) -> bool:
        """Whether an earlier run finished anything."""
        return any(self.folder.glob("*.done"))

    def place(self, name: str) -> Path:
        """The folder of a stage."""
        return self.folder / name

    def finished(self, name: str, key: str) -> Stage | None:
        """The stage as an earlier run left it; None unless key and every file agree."""
        record = self._record(name)
        if record.get("key") != key:
            return None
        files = _files_of(record)
        if files is None or any(not _is_same(self.place(name), file) for file in files):
            return None
        facts = record.get("facts")
        return Stage(name, self.place(name), key, files, facts if isinstance(facts, dict) else {}, reused=True)

    def finish(self, name: str, key: str, files: Sequence[WrittenFile] = (), facts: Mapping[str, Any] = {}) -> Stage:
        """Record a stage, in one step."""
        body = {
            "key": key,
            "files": [[file.name, file.nbytes, file.sha256] for file in files],
            "facts": dict(facts),
        }
        replace_files(self.folder, {f"{name}.done": json_bytes(body, indent=0)})
        return Stage(name, self.place(name), key, tuple(files), facts)

    def give_back(self, name: str, taken_by: Path) -> None:
        """Files of a stage that another folder took over return, unless something is in their place."""
        for file in _files_of(self._record(name)) or ():
            here, there = self.place(name) / file.name, taken_by / file.name
            if is_file(there) and not is_link(there) and not exists(here):
                here.parent.mkdir(parents=True, exist_ok=True)
                there.rename(here)

    def keep_only(self, names: Sequence[str]) -> None:
        """Remove what other recipes left; the claims of exports that died are those exports' own business."""
        known = {f"{name}{suffix}" for name in names for suffix in ("", ".done", ".work")}
        for path in sorted(self.folder.iterdir()):
            if path.name not in known and not path.name.startswith("."):
                remove(path)

    def forget(self, name: str) -> None:
        """Remove a stage."""
        (self.folder / f"{name}.done").unlink(missing_ok=True)
        remove(self.place(name))

    def _record(self, name: str) -> dict[str, Any]:
        try:
            record = json.loads((self.folder / f"{name}.done").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}


def stage_key(name: str, facts: Any, *, after: str = "") -> str:
    """sha256 over the code version, the stage's choices and inputs, and the key of the stage before it."""
    text = json.dumps([code_version(), name, facts, after], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


@contextlib.contextmanager
def open_stages(package: Path, work_dir: Path | None, names: Sequence[str]) -> Iterator[Stages]:
    """The stages of a package that is staged in `package`; with `work_dir` they stay there after an error.

    names: of the stages that are packages, in order. Raises SystemLimitError when a living run uses the same work
    folder.
    """
    if work_dir is None:
        left = left_folder(package)
        kept_folder(package).mkdir(exist_ok=True)
        yield _taken_over(left / KEPT / STAGES, kept_folder(package) / STAGES, left / PACKAGE, names)
        return
    folder = made_folder(work_dir, WORK_DIR)
    claim, done = Claim(folder / WORK_NAME, heal_folder), False
    try:
        claim.acquire()
        claim.settle(keep_left=True)
        stages = _taken_over(claim.left / STAGES, claim.work / STAGES, left_folder(package) / PACKAGE, names)
        try:
            yield stages
            done = True
        finally:
            if not done and names:
                stages.give_back(_last(stages, names), package)
    finally:
        if done or not exists(claim.work):
            claim.release()
        else:
            claim.keep()


def _taken_over(left: Path, folder: Path, delivered: Path, names: Sequence[str]) -> Stages:
    """What a dead run left, moved to where this one works, with everything that it had already passed on."""
    if is_folder(left) and not is_link(left):
        left.rename(folder)
    else:
        folder.mkdir()
    stages = Stages(folder)
    if names:
        stages.give_back(_last(stages, names), delivered)
    return stages


def _last(stages: Stages, names: Sequence[str]) -> str:
    done = [name for name in names if is_file(stages.folder / f"{name}.done")]
    return done[-1] if done else names[0]


def _files_of(record: Mapping[str, Any]) -> tuple[WrittenFile, ...] | None:
    """The files of a record; None for a record that is not ours."""
    try:
        files = tuple(WrittenFile(str(name), int(nbytes), str(sha256)) for name, nbytes, sha256 in record["files"])
    except (KeyError, TypeError, ValueError):
        return None
    return None if any(name_fault(file.name) for file in files) else files


def _is_same(folder: Path, file: WrittenFile) -> bool:
    path = folder / file.name
    if not is_file(path) or is_link(path) or path.stat().st_size != file.nbytes:
        return False
    return hashed(folder, file.name) == file


def deliver(stage: Stage, package: Path, left_out: Sequence[str] = ()) -> list[WrittenFile]:
    """Move a stage's files into the package, copying where that is on another file system: the files there."""
    from phi4mm_export.package.kept import same_file_system

    moved = [file for file in stage.files if file.name not in left_out]
    for file in moved:
        source, target = stage.folder / file.name, package / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if same_file_system(source.parent, target.parent):
            source.rename(target)
        else:
            shutil.copyfile(source, target)
    return moved
