"""Finished stages of a build: used again only when key and every byte agree, taken apart without a loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phi4mm_export.package.write import WrittenFile, write_file
from phi4mm_export.pipeline.build_stages import Stage, Stages, deliver, open_stages, stage_key


def finished(stages: Stages, name: str = "export", key: str = "k") -> Stage:
    """A stage of two files."""
    stages.place(name).mkdir()
    files = [write_file(stages.place(name), each, each.encode()) for each in ("a.onnx", "sub/b.data")]
    return stages.finish(name, key, files, {"gates": {}})


def test_a_finished_stage_is_found_again_with_its_facts(tmp_path: Path) -> None:
    made = finished(Stages(tmp_path))

    found = Stages(tmp_path).finished("export", "k")

    assert found is not None
    assert (found.files, found.facts, found.reused) == (made.files, made.facts, True)
    assert Stages(tmp_path).known()


def test_a_stage_of_another_key_counts_as_unfinished(tmp_path: Path) -> None:
    finished(Stages(tmp_path))

    assert Stages(tmp_path).finished("export", "other") is None


@pytest.mark.parametrize("damage", ["changed", "same size", "missing", "linked"])
def test_a_stage_with_a_file_that_is_not_as_it_was_counts_as_unfinished(tmp_path: Path, damage: str) -> None:
    finished(Stages(tmp_path))
    file = tmp_path / "export" / "a.onnx"
    file.unlink()
    if damage == "changed":
        file.write_bytes(b"something else")
    elif damage == "same size":
        file.write_bytes(b"A.onnx")
    elif damage == "linked":
        (tmp_path / "elsewhere").write_bytes(b"a.onnx")
        file.symlink_to(tmp_path / "elsewhere")

    assert Stages(tmp_path).finished("export", "k") is None


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"[]",
        b'{"key": "k"}',
        b'{"key": "k", "files": [["../a", 1, "x"]]}',
        b'{"key": "k", "files": [1]}',
        b"\xff",
        b'{"key": "k", "files": [["a.onnx"',
    ],
)
def test_a_record_that_is_none_counts_for_nothing(tmp_path: Path, record: bytes) -> None:
    (tmp_path / "export.done").write_bytes(record)

    assert Stages(tmp_path).finished("export", "k") is None
    Stages(tmp_path).give_back("export", tmp_path)


def test_files_that_a_later_stage_took_come_back_and_replace_nothing(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    finished(stages)
    (tmp_path / "later" / "sub").mkdir(parents=True)
    (tmp_path / "export" / "sub" / "b.data").rename(tmp_path / "later" / "sub" / "b.data")
    (tmp_path / "later" / "a.onnx").write_bytes(b"quantized")

    stages.give_back("export", tmp_path / "later")

    assert stages.finished("export", "k") is not None
    assert (tmp_path / "later" / "a.onnx").read_bytes() == b"quantized"


def test_a_stage_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    finished(stages)

    stages.forget("export")

    assert list(tmp_path.iterdir()) == []


def test_what_another_recipe_left_goes_and_a_dead_exports_claim_stays(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    finished(stages)
    finished(stages, "quantize-speech")
    for name in ("quantize-speech.work", "export.work", ".export.staging"):
        (tmp_path / name).mkdir()

    stages.keep_only(("export",))

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".export.staging", "export", "export.done", "export.work",
    ]  # fmt: skip


def test_delivered_files_stand_in_the_package_under_their_names(tmp_path: Path) -> None:
    stages = Stages(tmp_path / "stages")
    (tmp_path / "stages").mkdir()
    stage = finished(stages)
    (tmp_path / "package").mkdir()

    moved = deliver(stage, tmp_path / "package", left_out=("a.onnx",))

    assert moved == [WrittenFile("sub/b.data", stage.files[1].nbytes, stage.files[1].sha256)]
    assert (tmp_path / "package" / "sub" / "b.data").read_bytes() == b"sub/b.data"


def test_a_key_names_choices_inputs_and_the_stage_before() -> None:
    keys = {
        stage_key("a", {"x": 1}),
        stage_key("a", {"x": 2}),
        stage_key("b", {"x": 1}),
        stage_key("a", {"x": 1}, after="k"),
    }

    assert len(keys) == 4
    assert stage_key("a", {"x": 1, "y": 2}) == stage_key("a", json.loads('{"y": 2, "x": 1}'))


def test_stages_in_a_work_folder_outlive_an_error_with_what_was_delivered(tmp_path: Path) -> None:
    package = tmp_path / "target" / "token" / "package"
    package.mkdir(parents=True)
    work = tmp_path / "work"

    def fail() -> None:
        with open_stages(package, work, ("export",)) as stages:
            deliver(finished(stages), package)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    with open_stages(package, work, ("export",)) as stages:
        assert stages.finished("export", "k") is not None
    assert list(work.iterdir()) == []
