"""One run at a time prepares a target: with locks, without them, and with locks that do nothing."""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from phi4mm_export.errors import SystemLimitError
from phi4mm_export.package import lock
from phi4mm_export.package.claim import OWNER, PREVIOUS, Claim, claim_path, claimed, heal_folder, owner_of
from phi4mm_export.package.publish import staged

CONFIG = "genai_config.json"
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="runs forked processes")


def _always(_descriptor: int) -> None:
    """A lock on a file system where every lock succeeds at once."""


def _never(_descriptor: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.fixture(params=[None, _always, _never], ids=["locks", "locks that do nothing", "no locks"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param is not None:
        monkeypatch.setattr(lock, "_lock", request.param)
    return "work" if request.param is None else "do not work"


def _forked(work: Callable[[], object]) -> int:
    """The number of a process that runs `work` and ends at once with 0, with 6 when it was refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking with threads around
        child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except SystemLimitError:
            os._exit(6)
        finally:
            os._exit(1)
    return child


def _exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _left_by_a_dead_process(target: Path) -> int:
    """A claim whose holder ended without giving it up; returns the process's number."""
    child = _forked(lambda: Claim(target, heal_folder).acquire())
    assert _exit_code(child) == 0
    assert claim_path(target).is_dir()
    return child


def _forge(target: Path, **changes: object) -> None:
    """Change what a claim says about its holder."""
    path = claim_path(target) / OWNER
    path.write_text(json.dumps({**owner_of(claim_path(target)), **changes}))


@pytest.mark.usefixtures("locks")
def test_a_living_holder_is_never_displaced(tmp_path: Path) -> None:
    with claimed(tmp_path / "out") as first:
        with pytest.raises(SystemLimitError, match=f"process {os.getpid()}"), claimed(tmp_path / "out"):
            pass
        assert first.work.is_dir()
    assert not list(tmp_path.iterdir())


@needs_fork
@pytest.mark.usefixtures("locks")
def test_a_dead_holder_does_not_block(tmp_path: Path) -> None:
    _left_by_a_dead_process(tmp_path / "out")
    with claimed(tmp_path / "out") as claim:
        assert not claim.left.exists()
    assert not list(tmp_path.iterdir())


@needs_fork
@pytest.mark.usefixtures("locks")
def test_a_process_number_that_was_given_again_does_not_block(tmp_path: Path) -> None:
    _left_by_a_dead_process(tmp_path / "out")
    _forge(tmp_path / "out", pid=os.getpid(), started="1")
    if not Path("/proc/self/stat").exists():
        pytest.skip("the start of a process is read from /proc")
    with claimed(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())


@needs_fork
def test_a_holder_on_another_machine_counts_as_alive_where_locks_do_not_work(tmp_path: Path, locks: str) -> None:
    _left_by_a_dead_process(tmp_path / "out")
    _forge(tmp_path / "out", machine="elsewhere", host="node7")
    if locks == "work":
        with claimed(tmp_path / "out"):
            pass
        assert not list(tmp_path.iterdir())
        return
    with pytest.raises(SystemLimitError, match=r"on node7.*if it is gone, remove .*\.out\.staging"):
        Claim(tmp_path / "out", heal_folder).acquire()
    assert [path.name for path in tmp_path.iterdir()] == [".out.staging"]


@needs_fork
@pytest.mark.usefixtures("locks")
def test_of_many_processes_at_once_one_wins_whole_and_the_others_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def publish_own() -> None:
        with staged(target, overwrite=True) as folder:
            for name in (CONFIG, "a", "b"):
                (folder / name).write_text(str(os.getpid()))

    children = [_forked(publish_own) for _ in range(6)]
    codes = {child: _exit_code(child) for child in children}
    assert set(codes.values()) <= {0, 6}
    winners = {str(child) for child, code in codes.items() if code == 0}
    written = {(target / name).read_text() for name in (CONFIG, "a", "b")}
    assert len(written) == 1
    assert written <= winners
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_that_was_displaced_all_the_same_fails_and_mixes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(SystemLimitError), staged(target, overwrite=True) as displaced:  # noqa: PT012
        (displaced / CONFIG).write_text("displaced")
        claim_path(target).rename(tmp_path / "moved away by a wrong judgement")
        with staged(target, overwrite=True) as folder:
            (folder / CONFIG).write_text("second")
            with pytest.raises(FileNotFoundError):
                (displaced / "late").write_text("displaced")
    assert (target / CONFIG).read_text() == "second"
    assert not (target / "late").exists()


def test_two_targets_do_not_disturb_each_other(tmp_path: Path) -> None:
    with staged(tmp_path / "a", overwrite=False) as one, staged(tmp_path / "b", overwrite=False) as other:
        (one / CONFIG).write_text("a")
        (other / CONFIG).write_text("b")
    assert (tmp_path / "a" / CONFIG).read_text() == "a"
    assert (tmp_path / "b" / CONFIG).read_text() == "b"


def test_a_kept_claim_is_handed_to_the_next_holder(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "work", heal_folder)
    claim.acquire()
    (claim.work / "finished").write_text("x")
    claim.keep()
    with claimed(tmp_path / "work", keep_left=True) as later:
        assert (later.left / "finished").read_text() == "x"
    assert not list(tmp_path.iterdir())


def test_an_old_target_that_could_not_be_put_back_stays_in_the_claim(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "out", heal_folder)
    claim.acquire()
    (claim.work / PREVIOUS).mkdir()
    (claim.work / PREVIOUS / CONFIG).write_text("old")
    claim.release()
    with claimed(tmp_path / "out"):
        assert (tmp_path / "out" / CONFIG).read_text() == "old"


def test_a_claim_that_something_else_stands_in_the_way_of_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    claim_path(tmp_path / "out").write_text("a file")
    with pytest.raises(SystemLimitError, match="refused a file operation"), staged(tmp_path / "out", overwrite=False):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".out.staging"]
