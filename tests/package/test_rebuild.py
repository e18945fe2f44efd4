"""A package built again: the same bytes, or what differs; never from another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.builds import DESCRIBED, digests
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.errors import CheckpointError, PackageError, Phi4mmError, UsageError
from phi4mm_export.package.manifest_read import read_manifest
from phi4mm_export.pipeline import rebuild as rebuild_module
from phi4mm_export.pipeline.build import BuildResult, BuildSettings, build
from phi4mm_export.pipeline.build_measure import Measured
from phi4mm_export.pipeline.rebuild import rebuild


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def made_again(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rebuild` finds the package of `built` made again, without the work."""

    def copied(recipe: Any, target: Path, **_: Any) -> BuildResult:
        shutil.copytree(built, target)
        return BuildResult(target, recipe, read_manifest(built), (), Measured(), (), ())

    monkeypatch.setattr(rebuild_module, "build", copied)


def test_a_rebuild_gives_the_same_bytes_and_says_so(built: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = run("rebuild", built / "README.md", "--model", tiny_checkpoint, "-o", tmp_path / "again")

    assert result.exit_code == 0, result.stderr
    assert f"same bytes: 17 files of {built.name}" in result.stdout
    assert digests(tmp_path / "again") == digests(built)


def test_a_calibrated_package_is_rebuilt_with_its_gates_and_figures(calibrated: Path, tiny_checkpoint: Path) -> None:
    result = rebuild(calibrated, model=tiny_checkpoint, calibration=calibrated.parent / "pages")

    assert result.same, result.differences
    assert result.path is None
    assert [path.name for path in calibrated.parent.iterdir() if path.name.startswith(".phi4mm")] == []


def test_another_model_is_refused_by_the_name_of_its_file_before_anything_is_written(
    built: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoint, other)
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}), encoding="utf-8")

    with pytest.raises(CheckpointError, match=r"config\.json: this is not the recorded model"):
        rebuild(built, tmp_path / "again", model=other)

    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.usefixtures("made_again")
def test_a_package_that_was_changed_is_told_apart_with_exit_code_5(
    built: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(built, changed)
    data = bytearray((changed / "phi-4-mm-text.onnx.data").read_bytes())
    data[4096] ^= 1
    (changed / "phi-4-mm-text.onnx.data").write_bytes(data)

    told = run("rebuild", changed, "--model", tiny_checkpoint)
    verdict = json.loads(run("rebuild", changed, "--model", tiny_checkpoint, "--json").stdout)

    assert told.exit_code == 5
    assert "file phi-4-mm-text.onnx.data: other bytes" in told.stdout
    assert not verdict["same"]
    assert {"file", "value"} <= {item["level"] for item in verdict["differences"]}


@pytest.mark.usefixtures("made_again")
def test_a_card_with_a_manifest_alone_is_enough_for_a_rebuild(
    built: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    for name in DESCRIBED:
        shutil.copyfile(built / name, tmp_path / name)

    assert rebuild(tmp_path / "README.md", model=tiny_checkpoint).same

    (tmp_path / "README.md").write_text("another card", encoding="utf-8")
    assert [item.where for item in rebuild(tmp_path, model=tiny_checkpoint).differences] == ["README.md"]


@pytest.mark.parametrize("place", ["nothing", "genai_config.json"])
def test_a_rebuild_of_something_else_is_refused(built: Path, place: str) -> None:
    with pytest.raises(UsageError, match=r"expected a package folder or its README\.md"):
        rebuild(built / place)


def test_a_package_that_no_recipe_made_cannot_be_rebuilt(gated_package: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(PackageError, match="records no recipe"):
        rebuild(gated_package, model=tiny_checkpoint)


def test_a_rebuild_without_the_model_asks_for_it_and_never_replaces_what_it_compares(
    built: Path, tiny_checkpoint: Path
) -> None:
    with pytest.raises(UsageError, match="--model"):
        rebuild(built)
    with pytest.raises(UsageError, match="the target"):
        rebuild(built, built, model=tiny_checkpoint)
    with pytest.raises(UsageError, match="the package that is to be compared with"):
        rebuild(built, built, model=tiny_checkpoint, settings=BuildSettings(overwrite=True))


def test_a_package_of_kept_statistics_is_of_class_locked_and_rebuilt_from_them_alone(
    calibrated: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    pages, then = calibrated.parent / "pages", BuildSettings(statistics=calibrated.parent / "hessians")
    build("int8-gptq", tmp_path / "locked", model=tiny_checkpoint, calibration=pages, settings=then)

    with pytest.raises(UsageError, match="built from kept statistics, none were given"):
        rebuild(tmp_path / "locked", model=tiny_checkpoint, calibration=pages)
    with pytest.raises(UsageError, match="vision graph was not built from kept statistics"):
        rebuild(calibrated, model=tiny_checkpoint, calibration=pages, settings=then)
    with pytest.raises(UsageError, match="calibrated on samples that are known by digest alone"):
        rebuild(calibrated, model=tiny_checkpoint)

    vision = "phi-4-mm-vision.onnx.data"
    assert (tmp_path / "locked" / vision).read_bytes() == (calibrated / vision).read_bytes()
    assert read_manifest(tmp_path / "locked").by_name[vision].reproducibility == "locked"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"source": {"model": "/etc"}}, "expected a hub id OWNER/NAME, found"),
        ({"source": {"model": "../x/y"}}, "expected a hub id OWNER/NAME, found"),
        ({"build": {"export": {"precision": "int8", "evil": 1}}}, "export.evil: unknown key"),
        ({"build": {"evaluate": {"against": "model", "images": ["/etc"]}}}, "measured on images that a rebuild"),
        ({"build": {"evaluate": {"against": "/etc"}}}, "a float package that is known to nobody here"),
        ({"build": {"quantize": {"vision": {"calibration": "/etc"}}}}, "samples that are known by digest alone"),
    ],
)
def test_a_manifest_from_elsewhere_leads_a_rebuild_to_no_place_of_this_machine(
    built: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    manifest = json.loads((built / "phi4mm.json").read_text(encoding="utf-8"))
    for key, values in changes.items():
        manifest[key] = {**manifest[key], **values}
    (tmp_path / "phi4mm.json").write_text(json.dumps(manifest), encoding="utf-8")

    with pytest.raises(Phi4mmError) as caught:
        rebuild(tmp_path)

    assert sentence in str(caught.value)
