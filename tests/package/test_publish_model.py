"""An .onnx file and its data appear together or not at all, wherever the run that publishes them is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phi4mm_export.errors import UsageError
from phi4mm_export.package.publish_model import staged_model

KILLED = 77
PUBLISH = """
import os, sys
from pathlib import Path
from phi4mm_export.package.publish_model import staged_model

target, at, with_data = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "data"
calls, rename = 0, Path.rename

def dying_rename(self, to):
    global calls
    if self.name.startswith("model.onnx"):
        calls += 1
        if calls == at:
            os._exit(77)
    return rename(self, to)

Path.rename = dying_rename
with staged_model(target, overwrite=True) as staging:
    (staging / "model.onnx").write_text("new graph")
    if with_data:
        (staging / "model.onnx.data").write_text("new data")
"""


def publish(target: Path, *, graph: str = "new graph", data: str | None = "new data") -> None:
    with staged_model(target, overwrite=True) as staging:
        (staging / "model.onnx").write_text(graph, encoding="utf-8")
        if data is not None:
            (staging / "model.onnx.data").write_text(data, encoding="utf-8")


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()}


def test_a_new_pair_appears_and_nothing_else(tmp_path: Path) -> None:
    publish(tmp_path / "model.onnx")
    assert contents(tmp_path) == {"model.onnx": "new graph", "model.onnx.data": "new data"}
    assert len(list(tmp_path.iterdir())) == 2


def test_old_data_goes_with_the_old_graph_when_the_new_one_has_none(tmp_path: Path) -> None:
    publish(tmp_path / "model.onnx", graph="old graph", data="old data")
    publish(tmp_path / "model.onnx", data=None)
    assert contents(tmp_path) == {"model.onnx": "new graph"}


def test_an_error_in_the_block_leaves_the_old_pair_and_nothing_else(tmp_path: Path) -> None:
    publish(tmp_path / "model.onnx", graph="old graph", data="old data")
    with pytest.raises(TypeError):
        publish(tmp_path / "model.onnx", graph=None)  # type: ignore[arg-type]
    assert contents(tmp_path) == {"model.onnx": "old graph", "model.onnx.data": "old data"}
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.subprocess
@pytest.mark.parametrize("new_data", ["data", "none"])
@pytest.mark.parametrize("old_data", ["old data", None])
@pytest.mark.parametrize("old_graph", ["old graph", None])
def test_a_run_killed_at_any_rename_leaves_a_whole_pair_after_the_next_run_looked(
    tmp_path: Path, old_graph: str | None, old_data: str | None, new_data: str
) -> None:
    target = tmp_path / "model.onnx"
    if old_graph is None:
        old_data = None
    new = {"model.onnx": "new graph"} | ({"model.onnx.data": "new data"} if new_data == "data" else {})
    old = {"model.onnx": old_graph} if old_graph else {}
    old |= {"model.onnx.data": old_data} if old_data else {}
    moves = len(old) + len(new)
    for at in range(1, moves + 1):
        for path in list(tmp_path.iterdir()):
            if path.is_file():
                path.unlink()
        if old_graph:
            publish(target, graph=old_graph, data=old_data)
        arguments = [sys.executable, "-c", PUBLISH, str(target), str(at), new_data]
        assert subprocess.run(arguments, check=False).returncode == KILLED
        with pytest.raises(RuntimeError), staged_model(target, overwrite=True):
            raise RuntimeError
        assert contents(tmp_path) == old, at


def test_data_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.onnx.data").write_text("somebody else's", encoding="utf-8")
    with pytest.raises(UsageError, match=r"model.onnx.data exists and belongs to no model.onnx"):
        publish(tmp_path / "model.onnx")
    assert contents(tmp_path) == {"model.onnx.data": "somebody else's"}


@pytest.mark.parametrize("name", ["model", "model.bin"])
def test_another_ending_is_refused(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(UsageError, match=r"expected the name of an .onnx file"),
        staged_model(tmp_path / name, overwrite=False),
    ):
        pass


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "real.onnx").write_text("graph", encoding="utf-8")
    (tmp_path / "model.onnx").symlink_to(tmp_path / "real.onnx")
    with pytest.raises(UsageError, match="not a plain file"):
        publish(tmp_path / "model.onnx")
