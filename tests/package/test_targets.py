"""Targets that must not be replaced, because something would be lost with them or nothing can be put there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.plain_models import write_model

from phi4mm_export.errors import SystemLimitError, UsageError
from phi4mm_export.package.claim import claim_path, claimed
from phi4mm_export.package.publish import check_apart, check_target, staged
from phi4mm_export.package.publish_model import check_model_target, staged_model
from phi4mm_export.pipeline.build import BuildSettings, build
from phi4mm_export.pipeline.doctor import doctor
from phi4mm_export.pipeline.evaluate import evaluate
from phi4mm_export.pipeline.export import ExportSettings, export
from phi4mm_export.pipeline.quantize import quantize
from phi4mm_export.pipeline.rebuild import rebuild
from phi4mm_export.spec.model import Role

CONFIG = "genai_config.json"
LONGEST = 255 - 30
"""Bytes of a name on usual file systems, less what claims add to it."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """An old package, in which something else lies."""
    for name in (CONFIG, "evaluation.json", "inside/precious"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("{}")
    return tmp_path / "out"


def test_a_mount_point_is_refused_before_any_work(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == old)
    with pytest.raises(UsageError, match="where a file system is mounted"):
        check_target(old, overwrite=True)


@pytest.mark.parametrize("place", [".", "inside"])
def test_the_current_folder_is_never_replaced(old: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(old / place)
    with pytest.raises(UsageError, match="current folder"):
        check_target(old, overwrite=True)


@pytest.mark.parametrize("name", ["inside/..", "/"])
def test_a_target_without_a_name_of_its_own_is_refused(old: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no name of its own"):
        check_target(old / name, overwrite=True)


def test_the_longest_name_that_fits_is_published_and_one_byte_more_is_refused(tmp_path: Path) -> None:
    most = os.pathconf(tmp_path, "PC_NAME_MAX") - 30 if hasattr(os, "pathconf") else LONGEST
    with staged(tmp_path / ("n" * most), overwrite=False) as folder:
        (folder / CONFIG).write_text("new")
    with staged(tmp_path / ("n" * most), overwrite=True) as folder:
        (folder / CONFIG).write_text("newer")
    assert (tmp_path / ("n" * most) / CONFIG).read_text() == "newer"
    with pytest.raises(UsageError, match=f"{most + 1} bytes, expected at most {most}"):
        check_target(tmp_path / ("n" * (most + 1)), overwrite=False)
    with pytest.raises(UsageError, match="choose a shorter name"):
        check_model_target(tmp_path / ("é" * (most // 2) + ".onnx"), overwrite=False)


@pytest.mark.skipif(os.name == "nt", reason="names are text there")
@pytest.mark.parametrize("name", ["two\nlines", os.fsdecode(b"not \xff text"), "[a-z]*", " ", "-o", "out.staging"])
def test_odd_names_are_published_and_leave_nothing_beside_them(tmp_path: Path, name: str) -> None:
    for text in ("first", "second"):
        with staged(tmp_path / name, overwrite=True) as folder:
            (folder / CONFIG).write_text(text)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / CONFIG).read_text() == "second"
    with staged_model(tmp_path / f"{name}.onnx", overwrite=False) as folder:
        (folder / f"{name}.onnx").write_text("graph")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, f"{name}.onnx"])


def test_what_is_read_may_not_lie_in_the_target(old: Path) -> None:
    for path in (old, old / "inside", str(old / "inside" / "*.png"), old / "inside" / ".." / "inside"):
        with pytest.raises(UsageError, match="holds nothing else of this run"):
            check_apart(old, reads=(None, path))
    check_apart(old, reads=(None, old.parent, old.parent / "out2", "builtin", old / "nothing there"))


def test_what_is_written_elsewhere_may_not_lie_in_the_target_even_if_neither_exists(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds nothing else of this run"):
        check_apart(tmp_path / "out", writes=(tmp_path / "out" / "work",))
    check_apart(tmp_path / "out", writes=(None, tmp_path))


def test_a_package_may_be_replaced_by_its_own_new_form_but_not_the_folder_around_it(old: Path) -> None:
    check_apart(old, replaced=old)
    with pytest.raises(UsageError, match="holds nothing else of this run"):
        check_apart(old, replaced=old / "inside")


def test_a_link_does_not_hide_where_something_lies(old: Path) -> None:
    (old.parent / "elsewhere").symlink_to(old / "inside")
    with pytest.raises(UsageError, match="elsewhere"):
        check_apart(old, reads=(old.parent / "elsewhere",))


Run = Callable[[Path], Any]
OVER = ExportSettings(overwrite=True)
TAKING: dict[str, Run] = {
    "export, the checkpoint": lambda out: export(out / "inside", out, settings=OVER),
    "export, the target itself": lambda out: export(out, out, settings=OVER),
    "export, an adapter": lambda out: export(
        "org/name", out, adapter_paths={Role.VISION: out / "inside"}, settings=OVER
    ),
    "export, the package it takes from": lambda out: export(
        "org/name", out, from_package=out / "inside", settings=OVER
    ),
    "export, the work folder": lambda out: export(
        "org/name", out, settings=ExportSettings(overwrite=True, work_dir=out / "work")
    ),
    "build, the checkpoint": lambda out: build(
        "fp16", out, model=out / "inside", settings=BuildSettings(overwrite=True)
    ),
    "build, an adapter": lambda out: build(
        "fp16",
        out,
        model="org/name",
        adapter_paths={Role.VISION: out / "inside"},
        settings=BuildSettings(overwrite=True),
    ),
    "build, the statistics": lambda out: build(
        "int8-gptq",
        out,
        model="org/name",
        calibration="builtin",
        settings=BuildSettings(overwrite=True, save_statistics=out / "kept"),
    ),
    "evaluate, the package": lambda out: evaluate(out / "inside", "org/name", report=out, overwrite=True),
}


@pytest.mark.parametrize("run", list(TAKING.values()), ids=list(TAKING))
def test_a_command_keeps_what_lies_in_a_target_that_it_would_replace(old: Path, run: Run) -> None:
    with pytest.raises(UsageError, match="holds nothing else of this run"):
        run(old)
    assert (old / "inside" / "precious").exists()
    assert [path.name for path in old.parent.iterdir()] == ["out"]


def test_commands_on_packages_keep_what_lies_in_the_target_and_stay_out_of_their_source(
    old: Path, gated_package: Path
) -> None:
    for run in (
        lambda: doctor(gated_package, fix=gated_package / "fixed"),
        lambda: quantize(gated_package, old, method="rtn", calibration=old / "inside", overwrite=True),
        lambda: quantize(gated_package, old, method="rtn", save_statistics=old / "kept", overwrite=True),
    ):
        with pytest.raises(UsageError):
            run()
    assert (old / "inside" / "precious").exists()


def test_a_graphs_samples_may_not_lie_where_its_new_form_is_put(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in" / "model.onnx")
    with pytest.raises(UsageError, match="holds nothing else of this run"):
        quantize(model, tmp_path / "out.onnx", method="rtn", work_dir=tmp_path / "out.onnx")


def test_a_rebuild_that_is_not_kept_is_prepared_in_a_claim_that_the_next_one_sweeps(
    built: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in ("phi4mm.json", "SHA256SUMS", "README.md"):
        (package / name).write_bytes((built / name).read_bytes())
    beside = tmp_path / "package-rebuilt"
    with claimed(beside), pytest.raises(SystemLimitError, match="another run"):
        rebuild(package, model=tiny_checkpoint)
    (claim_path(beside) / "0123456789abcdef" / "package").mkdir(parents=True)
    with pytest.raises(UsageError, match="--model"):
        rebuild(package)
    assert rebuild(package, model=tiny_checkpoint).same
    assert [path.name for path in tmp_path.iterdir()] == ["package"]
