"""Files replaced in a folder that is in use: every call made to fail, the run killed, and links laid in its way."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import pytest
from support.syscalls import ERRORS, Watch, dying, failing, watched

from phi4mm_export.package.replace import replace_files
from phi4mm_export.spec.genai import GenaiConfigGenerator

OLD = {"genai_config.json": b"old", "phi4mm.json": b"old list"}
NEW = {"genai_config.json": b"new", "vision_processor.json": b"new too", "phi4mm.json": b"new list"}


def _fresh(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, data in OLD.items():
        (folder / name).write_bytes(data)
    return folder


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _num_calls(folder: Path) -> int:
    with watched(Watch(_fresh(folder), sync=False)) as watch:
        replace_files(folder, NEW)
    assert _content(folder) == NEW
    return watch.calls


@pytest.mark.parametrize("error", list(ERRORS))
def test_a_call_that_fails_once_leaves_all_old_or_all_new_files_and_nothing_else(tmp_path: Path, error: str) -> None:
    folder = tmp_path / "package"
    for number in range(1, _num_calls(folder) + 1):
        failed = False
        try:
            with watched(Watch(_fresh(folder), failing(number, ERRORS[error]), sync=False)):
                replace_files(folder, NEW)
        except OSError:
            failed = True
        assert _content(folder) == (OLD if failed else NEW), f"{error} at call {number}"


def test_an_interrupt_at_any_call_leaves_all_old_files(tmp_path: Path) -> None:
    folder = tmp_path / "package"

    def interrupting(number: int, now: int) -> int:
        if now == number:
            raise KeyboardInterrupt
        return 0

    finished = 0
    for number in range(1, _num_calls(folder) + 1):
        try:
            with watched(Watch(_fresh(folder), lambda now, _call, n=number: interrupting(n, now), sync=False)):
                replace_files(folder, NEW)
        except KeyboardInterrupt:
            pass
        else:
            finished += 1
        visible = {name: data for name, data in _content(folder).items() if not name.startswith(".")}
        assert visible in (OLD, NEW), f"interrupted at call {number}"
    assert finished == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_after_a_kill_each_file_is_whole_and_the_next_run_leaves_only_new_ones(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    for number in range(1, _num_calls(folder) + 1):
        _fresh(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking with threads around
            child = os.fork()
        if child == 0:
            with watched(Watch(folder, dying(number, lambda: os.kill(os.getpid(), signal.SIGKILL)))):
                replace_files(folder, NEW)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        for name, data in _content(folder).items():
            assert name.startswith(".") or data in (OLD.get(name), NEW[name]), f"killed at call {number}"
        replace_files(folder, NEW)
        assert _content(folder) == NEW, f"killed at call {number}"


@pytest.mark.parametrize("suffix", [".tmp", ".old.tmp"])
def test_nothing_is_written_through_a_link_that_a_strangers_package_brings(tmp_path: Path, suffix: str) -> None:
    folder, precious = _fresh(tmp_path / "package"), tmp_path / "precious"
    precious.write_bytes(b"mine")
    for name in NEW:
        (folder / f".{name}{suffix}").symlink_to(precious)
    replace_files(folder, NEW)
    assert precious.read_bytes() == b"mine"
    assert _content(folder) == NEW


def test_a_config_that_is_written_by_hand_goes_through_no_link_either(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / ".genai_config.json.tmp").symlink_to(tmp_path / "precious")
    generator = GenaiConfigGenerator(
        "phi3",
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    generator.write(tmp_path)
    assert (tmp_path / "precious").read_bytes() == b"mine"
