"""A package folder appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import filelock
import pytest

from phi4mm_export.errors import SystemLimitError, UsageError
from phi4mm_export.package.publish import lock_path, previous_path, recover, staged, staging_path

CONFIG = "genai_config.json"


def _package(folder: Path, text: str = "old") -> Path:
    folder.mkdir()
    (folder / CONFIG).write_text(text)
    return folder


def _neighbours(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_finished_folder_stands_under_its_name_and_nothing_else_remains(tmp_path: Path) -> None:
    with staged(tmp_path / "out", overwrite=False) as folder:
        (folder / CONFIG).write_text("new")
    assert _neighbours(tmp_path) == {"out"}
    assert (tmp_path / "out" / CONFIG).read_text() == "new"


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt, MemoryError])
def test_after_an_error_or_an_interrupt_nothing_remains(tmp_path: Path, fault: type[BaseException]) -> None:
    def work() -> None:
        with staged(tmp_path / "out", overwrite=False) as folder:
            (folder / "half").write_text("x")
            raise fault

    with pytest.raises(fault):
        work()
    assert _neighbours(tmp_path) == set()


def test_an_existing_target_is_refused_and_untouched(tmp_path: Path) -> None:
    _package(tmp_path / "out")
    with pytest.raises(UsageError, match="--overwrite"), staged(tmp_path / "out", overwrite=False):
        pass
    assert (tmp_path / "out" / CONFIG).read_text() == "old"


def test_the_old_package_stands_until_the_new_one_is_complete(tmp_path: Path) -> None:
    _package(tmp_path / "out")
    with staged(tmp_path / "out", overwrite=True) as folder:
        (folder / CONFIG).write_text("new")
        assert (tmp_path / "out" / CONFIG).read_text() == "old"
    assert (tmp_path / "out" / CONFIG).read_text() == "new"
    assert _neighbours(tmp_path) == {"out"}


def test_a_failed_replacement_leaves_the_old_package(tmp_path: Path) -> None:
    _package(tmp_path / "out")
    with pytest.raises(ValueError, match="late"), staged(tmp_path / "out", overwrite=True):
        raise ValueError("late")
    assert (tmp_path / "out" / CONFIG).read_text() == "old"
    assert _neighbours(tmp_path) == {"out"}


def test_a_folder_that_is_no_package_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="not replaced"), staged(tmp_path / "out", overwrite=True):
        pass
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_a_file_or_a_link_in_place_of_the_target_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(_package(tmp_path / "real"), target_is_directory=True)
    for name in ("file", "link"):
        with pytest.raises(UsageError), staged(tmp_path / name, overwrite=True):
            pass
    assert (tmp_path / "real" / CONFIG).read_text() == "old"


def test_a_missing_parent_is_named_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(SystemLimitError, match="nowhere"), staged(tmp_path / "nowhere" / "out", overwrite=False):
        pass


def test_a_second_run_on_the_same_target_is_refused(tmp_path: Path) -> None:
    lock, second = filelock.FileLock(lock_path(tmp_path / "out")), staged(tmp_path / "out", overwrite=False)
    with lock, pytest.raises(SystemLimitError, match="another run"), second:
        pass


def test_the_lock_file_of_a_dead_run_does_not_block(tmp_path: Path) -> None:
    lock_path(tmp_path / "out").touch()
    with staged(tmp_path / "out", overwrite=False) as folder:
        (folder / CONFIG).write_text("new")
    assert _neighbours(tmp_path) == {"out"}


def test_leftovers_of_a_killed_run_are_swept_by_the_next(tmp_path: Path) -> None:
    staging_path(tmp_path / "out").mkdir()
    (staging_path(tmp_path / "out") / "half").write_text("x")
    with staged(tmp_path / "out", overwrite=False) as folder:
        assert not any(folder.iterdir())
        (folder / CONFIG).write_text("new")
    assert _neighbours(tmp_path) == {"out"}


def test_a_run_killed_between_the_two_renames_gets_its_old_package_back(tmp_path: Path) -> None:
    _package(tmp_path / "out").rename(previous_path(tmp_path / "out"))
    recover(tmp_path / "out")
    assert (tmp_path / "out" / CONFIG).read_text() == "old"
    assert _neighbours(tmp_path) == {"out"}


def test_a_run_killed_before_it_removed_the_old_package_keeps_the_new_one(tmp_path: Path) -> None:
    _package(tmp_path / "gone").rename(previous_path(tmp_path / "out"))
    _package(tmp_path / "out", "new")
    recover(tmp_path / "out")
    assert (tmp_path / "out" / CONFIG).read_text() == "new"
    assert _neighbours(tmp_path) == {"out"}


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_parent_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(SystemLimitError, match="cannot be written"), staged(tmp_path / "out", overwrite=False):
            pass
    finally:
        tmp_path.chmod(0o755)
