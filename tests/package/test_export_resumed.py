"""Exports that die and are run again: the same bytes, less work, and nothing of another model."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phi4mm_export.cli.app import app
from phi4mm_export.errors import SystemLimitError, UsageError
from phi4mm_export.package import write
from phi4mm_export.pipeline import export as export_module
from phi4mm_export.pipeline.export import ExportSettings, export
from phi4mm_export.pipeline.synth import synth
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.recipe import Recipe
from phi4mm_export.weights.streams import TensorSpec

SPEECH = Recipe.resolve(components=(Component.SPEECH,))
BEGIN = write.DataFile.begin
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _export(checkpoint: Path, target: Path, work_dir: Path | None = None, jobs: int = 1) -> None:
    export(checkpoint, target, recipe=SPEECH, settings=ExportSettings(work_dir=work_dir, jobs=jobs))


def _names_begun(monkeypatch: pytest.MonkeyPatch, die_at: int | None = None) -> list[str]:
    """From now on, the names of the tensors that are begun; at number `die_at` the process is killed."""
    names: list[str] = []

    def begin(self: write.DataFile, spec: TensorSpec) -> None:
        names.append(spec.name)
        if len(names) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        BEGIN(self, spec)

    monkeypatch.setattr(write.DataFile, "begin", begin)
    return names


def _kill(monkeypatch: pytest.MonkeyPatch, at: int, work: Callable[[], None]) -> None:
    """Run in a process that is killed when it begins tensor number `at`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking with threads around
        child = os.fork()
    if child == 0:
        _names_begun(monkeypatch, die_at=at)
        work()
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@needs_fork
@pytest.mark.parametrize("after", [2, 30])
def test_a_killed_export_goes_on_and_gives_the_same_bytes(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    _export(tiny_checkpoint, tmp_path / "clean")
    names = _names_begun(monkeypatch)
    _export(tiny_checkpoint, tmp_path / "counted")
    total = len(names)
    _kill(monkeypatch, after, lambda: _export(tiny_checkpoint, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    names = _names_begun(monkeypatch)
    _export(tiny_checkpoint, tmp_path / "out")
    assert _digests(tmp_path / "out") == _digests(tmp_path / "clean")
    assert len(names) < total - after + 3
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@needs_fork
def test_another_checkpoint_of_the_same_shapes_never_mixes_in(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synth(tmp_path / "other", seed=2)
    _export(tmp_path / "other", tmp_path / "clean")
    _kill(monkeypatch, 30, lambda: _export(tiny_checkpoint, tmp_path / "out"))
    _export(tmp_path / "other", tmp_path / "out")
    assert _digests(tmp_path / "out") == _digests(tmp_path / "clean")


def test_a_work_folder_keeps_finished_weights_after_an_error_and_is_empty_after_success(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    _export(tiny_checkpoint, tmp_path / "clean")
    with monkeypatch.context() as patched:
        patched.setattr(export_module, "write_manifest", full_disk)
        with pytest.raises(SystemLimitError, match="filled up"):
            _export(tiny_checkpoint, tmp_path / "out", tmp_path / "work")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clean", "work"]
    names = _names_begun(monkeypatch)
    _export(tiny_checkpoint, tmp_path / "out", tmp_path / "work")
    assert names == []
    assert _digests(tmp_path / "out") == _digests(tmp_path / "clean")
    assert not list((tmp_path / "work").iterdir())


def test_without_a_work_folder_nothing_remains_after_an_error(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export_module, "write_manifest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _export(tiny_checkpoint, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_work_folder_that_is_a_file_is_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    (tmp_path / "work").write_text("x")
    with pytest.raises(UsageError, match=r"--work-dir .*expected a folder, found a file at .*name another folder"):
        _export(tiny_checkpoint, tmp_path / "out", tmp_path / "work")
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


def test_the_option_reaches_the_export(tmp_path: Path, tiny_checkpoint: Path) -> None:
    words = ["export", str(tiny_checkpoint), "-o", str(tmp_path / "out"), "--component", "speech", "--quiet"]
    result = CliRunner().invoke(app, [*words, "--work-dir", str(tmp_path / "work")])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "work"]
