"""Every call that writing and publishing a package makes, made to fail: once and from then on, and killed.

The long form, over whole exports, is scripts/fault_matrix.py.
"""

from __future__ import annotations

import hashlib
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from support.syscalls import ERRORS, Watch, dying, failing, watched

from phi4mm_export.checkpoint.source import DType, ShardFile, TensorSource
from phi4mm_export.errors import SystemLimitError
from phi4mm_export.package.kept import kept_data
from phi4mm_export.package.publish import staged
from phi4mm_export.package.publish_model import staged_model
from phi4mm_export.package.write import Effort, write_file, write_graph
from phi4mm_export.weights.rows import StoredRows
from phi4mm_export.weights.streams import TensorSpec, dense_stream

HEIGHT, WIDTH, COUNT = 8, 16, 2
VALUES = np.arange(COUNT * HEIGHT * WIDTH, dtype="<f4").reshape(COUNT, HEIGHT, WIDTH)
Job = Callable[[Path, ShardFile], None]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")


def _graph() -> ir.Model:
    graph = ir.Graph([], [], nodes=[], initializers=[], opset_imports={"": 20}, name="g")
    for i in range(COUNT):
        graph.initializers[f"w{i}"] = ir.val(f"w{i}", ir.DataType.FLOAT, [HEIGHT, WIDTH])
    return ir.Model(graph, ir_version=10)


def _fill(folder: Path, shard: ShardFile, effort: Effort, name: str = "g.onnx") -> None:
    streams = []
    for i in range(COUNT):
        source = TensorSource(f"t{i}", f"t{i}", shard.path, DType.F32, (HEIGHT, WIDTH), VALUES[0].nbytes * i, shard)
        streams.append(dense_stream(TensorSpec(f"w{i}", ir.DataType.FLOAT, (HEIGHT, WIDTH)), StoredRows(source)))
    write_graph(_graph(), streams, folder, name, effort=effort)


def _package(target: Path, shard: ShardFile) -> None:
    """A package as `export` writes it: data file with a journal, graph, config."""
    with (
        staged(target, overwrite=True, keep_left=True) as folder,
        kept_data(folder, ("g.onnx.data",), lambda source: source.name, work_dir=None, need=0) as kept,
    ):
        _fill(folder, shard, Effort(resume=kept.place))
        write_file(folder, "genai_config.json", b"new")


def _pair(target: Path, shard: ShardFile) -> None:
    """A graph file and its data file as `quantize` writes them."""
    with staged_model(target, overwrite=True) as folder:
        _fill(folder, shard, Effort(), target.name)


def _old_package(target: Path) -> None:
    target.mkdir()
    (target / "genai_config.json").write_text("old")
    (target / "another.onnx").write_text("old")


def _old_pair(target: Path) -> None:
    target.write_text("old")
    target.with_name(target.name + ".data").write_text("old")


def _state(folder: Path) -> dict[str, str]:
    """Relative path -> digest of everything that is not hidden."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(".") and path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


class Bench:
    """A job, run again and again in one folder from the same start."""

    def __init__(self, root: Path, job: Job, prepare: Callable[[Path], None] | None, name: str) -> None:
        self.folder, self._job, self._prepare, self._name = root / "bench", job, prepare, name
        (root / "shard").write_bytes(VALUES.tobytes())
        self._shard = ShardFile(root / "shard", "shard")
        self.reset()
        self.old = _state(self.folder)
        self.run()
        self.new = _state(self.folder)

    def reset(self) -> None:
        """The folder with nothing, or with the old result, in it."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        self.folder.mkdir(exist_ok=True)
        if self._prepare is not None:
            self._prepare(self.folder / self._name)

    def run(self, on_call: Callable[[int, str], int] = lambda _number, _call: 0) -> int:
        """Run the job under a watch; returns the number of calls it made."""
        with watched(Watch(self.folder, on_call, sync=False)) as watch:
            self._job(self.folder / self._name, self._shard)
        return watch.calls

    def hidden(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name.startswith("."))

    def num_calls(self) -> int:
        """How many calls an undisturbed run makes."""
        self.reset()
        return self.run()


@pytest.fixture(params=["package-new", "package-over-old", "pair-new", "pair-over-old"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    job, name = (_package, "out") if request.param.startswith("package") else (_pair, "out.onnx")
    prepare = {"package-over-old": _old_package, "pair-over-old": _old_pair}.get(request.param)
    return Bench(tmp_path, job, prepare, name)


@pytest.mark.parametrize("error", list(ERRORS))
def test_a_call_that_fails_once_leaves_the_old_or_the_new_result_and_nothing_else(bench: Bench, error: str) -> None:
    for number in range(1, bench.num_calls() + 1):
        bench.reset()
        failed = False
        try:
            bench.run(failing(number, ERRORS[error]))
        except SystemLimitError:
            failed = True
        assert _state(bench.folder) == (bench.old if failed else bench.new), f"{error} at call {number}"
        assert not bench.hidden() or not failed, f"{error} at call {number}"


@pytest.mark.parametrize("error", list(ERRORS))
def test_calls_that_fail_from_then_on_never_leave_a_mixture_and_the_next_run_heals(bench: Bench, error: str) -> None:
    for number in range(1, bench.num_calls() + 1):
        bench.reset()
        try:
            bench.run(failing(number, ERRORS[error], sticky=True))
        except SystemLimitError:
            assert error != "short write"
        _check_old_new_or_aside(bench, f"{error} from call {number} on")
        bench.run()
        assert _state(bench.folder) == bench.new, f"{error} from call {number} on"
        assert not bench.hidden()


@needs_fork
def test_a_run_killed_at_any_call_is_healed_by_the_next_with_the_same_bytes(bench: Bench) -> None:
    for number in range(1, bench.num_calls() + 1):
        bench.reset()
        _killed(bench, number)
        _check_old_new_or_aside(bench, f"killed at call {number}")
        bench.run()
        assert _state(bench.folder) == bench.new, f"killed at call {number}"
        assert not bench.hidden(), f"killed at call {number}"


def _killed(bench: Bench, number: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking with threads around
        child = os.fork()
    if child == 0:
        bench.run(dying(number, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def _check_old_new_or_aside(bench: Bench, when: str) -> None:
    """Old or new, whole; or nothing usable under the name while the old result stands aside in the claim."""
    state = _state(bench.folder)
    if state in (bench.old, bench.new):
        return
    assert not {"out.onnx", "out/genai_config.json"} & set(state), when
    assert bench.hidden(), when
