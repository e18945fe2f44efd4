"""After a power failure at any moment, with any unsynced operation lost, a package is old, new or absent.

The long form is scripts/crash_states.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.crashes import Recording, crash_states, recording
from support.syscalls import Watch, watched

from phi4mm_export.package.publish import recover, staged
from phi4mm_export.package.publish_model import staged_model

OLD = {"out/genai_config.json": b"old", "out/model.onnx": b"old graph", "out/phi4mm.json": b"old list"}
NEW = {
    "genai_config.json": b"new",
    "model.onnx": b"new graph",
    "model.onnx.data": b"new data",
    "phi4mm.json": b"new list",
}
OLD_PAIR = {"out.onnx": b"old graph", "out.onnx.data": b"old data"}
NEW_PAIR = {"out.onnx": b"new graph", "out.onnx.data": b"new data"}


def _write(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def _recorded_package(root: Path, before: dict[str, bytes]) -> Recording:
    _write(root, before)
    with watched(Watch(root, record=True)) as watch, staged(root / "out", overwrite=True) as folder:
        _write(folder, NEW)
    return recording(before, watch.ops)


def _recorded_pair(root: Path, before: dict[str, bytes]) -> Recording:
    _write(root, before)
    with watched(Watch(root, record=True)) as watch, staged_model(root / "out.onnx", overwrite=True) as folder:
        _write(folder, NEW_PAIR)
    return recording(before, watch.ops)


@pytest.mark.parametrize("before", [{}, OLD], ids=["new", "over-old"])
def test_no_crash_shows_a_package_that_is_neither_old_nor_new(tmp_path: Path, before: dict[str, bytes]) -> None:
    old = {name.removeprefix("out/"): data for name, data in before.items()}
    states = 0
    for disk in crash_states(_recorded_package(tmp_path, before), lost=2):
        assert disk.tree("out") in ({}, old, NEW)
        states += 1
    assert states >= 500


@pytest.mark.parametrize("before", [{}, OLD_PAIR], ids=["new", "over-old"])
def test_no_crash_shows_a_graph_beside_another_graphs_data(tmp_path: Path, before: dict[str, bytes]) -> None:
    states = 0
    for disk in crash_states(_recorded_pair(tmp_path, before), lost=2):
        seen = {name: data for name, data in disk.tree().items() if not name.startswith(".")}
        assert "out.onnx" not in seen or seen in (before, NEW_PAIR)
        states += 1
    assert states >= 500


def test_the_next_start_heals_every_crash_of_a_replacement(tmp_path: Path) -> None:
    (tmp_path / "recorded").mkdir()
    seen = set()
    for disk in crash_states(_recorded_package(tmp_path / "recorded", OLD), lost=1):
        tree = disk.tree()
        key = tuple(sorted(tree.items()))
        if key in seen:
            continue
        seen.add(key)
        root = tmp_path / f"crash{len(seen)}"
        root.mkdir()
        _write(root, tree)
        with watched(Watch(root, sync=False)):
            recover(root / "out")
        found = {path.name: path.read_bytes() for path in (root / "out").iterdir()}
        assert found in ({name.removeprefix("out/"): data for name, data in OLD.items()}, NEW)
        assert [path.name for path in root.iterdir()] == ["out"]
    assert len(seen) >= 20


def test_a_publish_without_its_syncs_would_be_caught(tmp_path: Path) -> None:
    _write(tmp_path, OLD)
    with watched(Watch(tmp_path, record=True)) as watch, staged(tmp_path / "out", overwrite=True) as folder:
        _write(folder, NEW)
    unsynced = [op for op in watch.ops if op.call != "fsync"]
    old = {name.removeprefix("out/"): data for name, data in OLD.items()}
    states = crash_states(recording(OLD, unsynced), lost=2)
    assert any(disk.tree("out") not in ({}, old, NEW) for disk in states)
