"""Data files that outlive the run that writes them: beside the target after a kill, in a work folder after any error.

Without a work folder data files are written where they will stand, and only a killed run leaves them (in its claim,
package/claim.py). With one they are written there and moved into the package at the end; on another file system they
are copied, so that both need room.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.checkpoint.digests import ContentOf
from phi4mm_export.errors import SystemLimitError
from phi4mm_export.package.claim import Claim, claim_path, heal_folder, remove
from phi4mm_export.package.given_folders import WORK_DIR, made_folder
from phi4mm_export.package.publish import KEPT, PACKAGE, kept_folder, left_folder
from phi4mm_export.package.resume import Resume, journal_path
from phi4mm_export.package.room import check_room, tree_nbytes
from phi4mm_export.package.write import WrittenFile, hashed
from phi4mm_export.spec.on_disk import exists, home_expanded, is_file, is_folder, is_link

WORK_NAME = "phi4mm-export"
"""Work folders hold one claim under this name."""


@dataclass(frozen=True)
class KeptData:
    """Where data files are written (`place`), and the package folder in which they must end."""

    place: Resume
    package: Path

    def deliver(self, files: Sequence[WrittenFile]) -> None:
        """Move finished data files into the package. Raises SystemLimitError if a copy came out different."""
        for file in files:
            source, target = self.place.data / file.name, self.package / file.name
            if source == target:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if same_file_system(source.parent, target.parent):
                source.rename(target)
                continue
            shutil.copyfile(source, target)
            if hashed(self.package, file.name) != file:
                raise SystemLimitError("the copy differs from the file", where=file.name, fix="check the disks")

    def take_back(self, names: Sequence[str]) -> None:
        """After an error: what was moved into the package returns to the work folder."""
        for name in names:
            if exists(self.package / name) and not exists(self.place.data / name):
                (self.package / name).rename(self.place.data / name)


@contextlib.contextmanager
def kept_data(
    package: Path, names: Sequence[str], content_of: ContentOf, *, work_dir: Path | None, need: int
) -> Iterator[KeptData]:
    """Places for the data files `names` of the package that is staged in `package`, with what an earlier run left.

    content_of: tells what a stored tensor holds (`InputDigests.content_of`). need: bytes of all data files, compared
    with the room in `work_dir`. Raises SystemLimitError when a living run uses the same work folder or there is no
    room, UsageError for a work folder that is none.
    """
    if work_dir is None:
        data = KeptData(Resume(package, kept_folder(package), content_of), package)
        _take_over(left_folder(package), data.place, names)
        yield data
        return
    work_dir = made_folder(work_dir, WORK_DIR)
    claim = Claim(work_dir / WORK_NAME, heal_folder)
    done = False
    try:
        claim.acquire()
        claim.settle(keep_left=True)
        check_room(work_dir, need, what="the work folder", already=tree_nbytes(claim.left))
        data = KeptData(Resume(claim.work / PACKAGE, claim.work / KEPT, content_of), package)
        _take_over(claim.left, data.place, names)
        try:
            yield data
            done = True
        finally:
            if not done:
                data.take_back(names)
    finally:
        if done or not exists(claim.work):
            claim.release()
        else:
            claim.keep()


def waiting_nbytes(work_dir: Path | None, folder: Path) -> int:
    """Bytes that an interrupted run left in `work_dir` and that will be renamed into `folder`, not copied."""
    if (
        work_dir is None
        or not is_folder(home_expanded(work_dir))
        or not same_file_system(home_expanded(work_dir), folder)
    ):
        return 0
    return tree_nbytes(claim_path(home_expanded(work_dir).absolute() / WORK_NAME))


def same_file_system(one: Path, other: Path) -> bool:
    """Whether a file can be renamed from one folder into the other."""
    return one.stat().st_dev == other.stat().st_dev


def _take_over(left: Path, place: Resume, names: Sequence[str]) -> None:
    """Move the data files that have a journal to their new places; nothing else of a dead run is worth anything."""
    place.data.mkdir(parents=True, exist_ok=True)
    place.journals.mkdir(parents=True, exist_ok=True)
    for name in names:
        data, journal = left / PACKAGE / name, journal_path(left / KEPT, name)
        if is_file(data) and is_file(journal) and not is_link(data):
            for old, new in ((data, place.data / name), (journal, journal_path(place.journals, name))):
                new.parent.mkdir(parents=True, exist_ok=True)
                old.rename(new)
    remove(left)
