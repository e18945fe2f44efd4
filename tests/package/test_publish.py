"""A package folder appears whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.syscalls import Watch, watched

from phi4mm_export.errors import SystemLimitError, UsageError
from phi4mm_export.package import publish as publish_module
from phi4mm_export.package.claim import PREVIOUS, claim_path
from phi4mm_export.package.publish import kept_folder, left_folder, publish, recover, staged, sync_tree

CONFIG = "genai_config.json"


def _package(folder: Path, text: str = "old") -> Path:
    folder.mkdir()
    (folder / CONFIG).write_text(text)
    return folder


def _work_of_a_dead_run(target: Path) -> Path:
    work = claim_path(target) / "0123456789abcdef"
    work.mkdir(parents=True)
    return work


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


def test_a_second_run_on_the_same_target_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    with staged(tmp_path / "out", overwrite=False) as folder:
        (folder / CONFIG).write_text("first")
        with pytest.raises(SystemLimitError, match=f"process {os.getpid()}"), staged(tmp_path / "out", overwrite=False):
            pass
    assert (tmp_path / "out" / CONFIG).read_text() == "first"
    assert _neighbours(tmp_path) == {"out"}


def test_leftovers_of_a_killed_run_are_swept_by_the_next(tmp_path: Path) -> None:
    claim_path(tmp_path / "out").mkdir()
    (claim_path(tmp_path / "out") / "half").write_text("x")
    with staged(tmp_path / "out", overwrite=False) as folder:
        assert not any(folder.iterdir())
        (folder / CONFIG).write_text("new")
    assert _neighbours(tmp_path) == {"out"}


def test_a_name_that_only_looks_like_a_leftover_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".out.staging-notes").mkdir()
    (tmp_path / ".out.staging-more.staging").mkdir()
    with staged(tmp_path / "out", overwrite=False) as folder:
        (folder / CONFIG).write_text("new")
    assert _neighbours(tmp_path) == {"out", ".out.staging-notes", ".out.staging-more.staging"}


def test_a_run_killed_between_the_two_renames_gets_its_old_package_back(tmp_path: Path) -> None:
    work = _work_of_a_dead_run(tmp_path / "out")
    _package(work / PREVIOUS)
    recover(tmp_path / "out")
    assert (tmp_path / "out" / CONFIG).read_text() == "old"
    assert _neighbours(tmp_path) == {"out"}


def test_a_run_killed_before_it_removed_the_old_package_keeps_the_new_one(tmp_path: Path) -> None:
    _package(_work_of_a_dead_run(tmp_path / "out") / PREVIOUS)
    _package(tmp_path / "out", "new")
    recover(tmp_path / "out")
    assert (tmp_path / "out" / CONFIG).read_text() == "new"
    assert _neighbours(tmp_path) == {"out"}


def test_a_dead_runs_work_is_handed_to_the_next_run_that_asks_for_it(tmp_path: Path) -> None:
    (_work_of_a_dead_run(tmp_path / "out") / "kept").mkdir()
    with staged(tmp_path / "out", overwrite=False, keep_left=True) as folder:
        assert (left_folder(folder) / "kept").is_dir()
        (folder / CONFIG).write_text("new")
    assert _neighbours(tmp_path) == {"out"}


def test_too_little_room_is_refused_with_both_numbers_before_the_block_starts(tmp_path: Path) -> None:
    huge = staged(tmp_path / "out", overwrite=False, need=9 * 10**18)
    with pytest.raises(SystemLimitError, match=r"needs 9,[0,]+ bytes, the disk has [\d,]+ free"), huge:
        pytest.fail("the block must not start")
    assert _neighbours(tmp_path) == set()


def test_a_disk_that_fills_up_is_a_sentence_with_both_numbers_and_nothing_remains(tmp_path: Path) -> None:
    _package(tmp_path / "out")
    small = staged(tmp_path / "out", overwrite=True, need=7)
    with pytest.raises(SystemLimitError, match=r"the work needs 7 bytes in all, [\d,]+ are free"), small:
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (tmp_path / "out" / CONFIG).read_text() == "old"
    assert _neighbours(tmp_path) == {"out"}


def test_a_target_that_appears_while_the_run_works_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"), staged(tmp_path / "out", overwrite=False):
        _package(tmp_path / "out", "another")
    assert (tmp_path / "out" / CONFIG).read_text() == "another"
    assert _neighbours(tmp_path) == {"out"}


def test_a_second_ctrl_c_during_the_clean_up_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = shutil.rmtree, []

    def interrupted_once(*args: object, **options: object) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(*args, **options)  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "out", overwrite=False) as folder:  # noqa: PT012
        (folder / "half").write_text("x")
        monkeypatch.setattr(shutil, "rmtree", interrupted_once)
        raise KeyboardInterrupt
    assert len(calls) > 1
    assert _neighbours(tmp_path) == set()


def _fail_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the syncs of folders and the renames that follow, number `step` fails."""
    calls = iter(range(100))

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            if next(calls) == step:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args)

        return call

    monkeypatch.setattr(publish_module, "sync_tree", lambda _folder: None)
    monkeypatch.setattr(publish_module, "sync_folder", failing(publish_module.sync_folder))
    monkeypatch.setattr(Path, "rename", failing(Path.rename))


STEPS = range(7)
"""Three syncs on the way, the old folder out, the new one in, two syncs."""


@pytest.mark.parametrize("step", STEPS)
def test_an_error_at_any_step_of_the_exchange_brings_the_old_package_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    _package(tmp_path / "out")
    with pytest.raises(SystemLimitError, match="Input/output"), staged(tmp_path / "out", overwrite=True) as folder:  # noqa: PT012
        (folder / CONFIG).write_text("new")
        _fail_at(step, monkeypatch)
    monkeypatch.undo()
    assert (tmp_path / "out" / CONFIG).read_text() == "old"
    assert _neighbours(tmp_path) == {"out"}


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_a_failed_exchange_puts_the_new_package_back_into_the_work_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, old: bool
) -> None:
    work = _work_of_a_dead_run(tmp_path / "out")
    _package(work / "package", "new")
    if old:
        _package(tmp_path / "out")
    _fail_at(step if old or step < 3 else step - 1, monkeypatch)
    with pytest.raises(OSError, match="Input/output"):
        publish(work, tmp_path / "out")
    monkeypatch.undo()
    assert (work / "package" / CONFIG).read_text() == "new"
    assert _neighbours(work) == {"package"}
    assert _neighbours(tmp_path) == ({"out", ".out.staging"} if old else {".out.staging"})
    if old:
        assert (tmp_path / "out" / CONFIG).read_text() == "old"


def test_a_target_that_another_run_renamed_into_place_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = _work_of_a_dead_run(tmp_path / "out")
    _package(work / "package", "new")
    monkeypatch.setattr(publish_module, "sync_way_to", lambda _work: _package(tmp_path / "out", "another"))
    monkeypatch.setattr(publish_module, "is_entry", lambda path: path.name != "out" and path.exists())
    with pytest.raises(SystemLimitError, match="another run published this target meanwhile"):
        publish(work, tmp_path / "out")
    assert (tmp_path / "out" / CONFIG).read_text() == "another"


def test_every_file_is_synced_before_its_folder_and_every_folder_before_the_one_above(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/b/deep", "a/file", "top"):
        (tmp_path / name).touch()
    with watched(Watch(tmp_path, record=True)) as watch:
        sync_tree(tmp_path)
    synced = [op.path for op in watch.ops if op.call == "fsync"]
    assert synced == ["a/b/deep", "a/file", "a/b", "top", "a", ""]


def test_a_dead_runs_work_is_gone_before_the_block_starts_unless_it_was_asked_for(tmp_path: Path) -> None:
    (_work_of_a_dead_run(tmp_path / "out") / "kept").mkdir()
    with staged(tmp_path / "out", overwrite=False) as folder:
        assert not left_folder(folder).exists()
        (folder / CONFIG).write_text("new")


def test_what_is_worth_keeping_lies_beside_the_folder_that_is_filled(tmp_path: Path) -> None:
    with staged(tmp_path / "out", overwrite=False) as folder:
        assert kept_folder(folder) == folder.with_name("kept")
        (folder / CONFIG).write_text("new")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_parent_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(SystemLimitError, match="cannot be written"), staged(tmp_path / "out", overwrite=False):
            pass
    finally:
        tmp_path.chmod(0o755)
