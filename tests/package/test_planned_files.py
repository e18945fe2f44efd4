"""One way to count a package: a dry run, a plan, the export, `verify` and `inspect` name the same files and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from phi4mm_export.pipeline.export import ExportReport, ExportSettings, export
from phi4mm_export.pipeline.inspect import inspect
from phi4mm_export.pipeline.plan import plan
from phi4mm_export.pipeline.verify import verify
from phi4mm_export.spec.contract import Component, PackageLayout
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe

RECIPES = {
    "default": Recipe.resolve(),
    "nested": Recipe.resolve(layout=PackageLayout.NESTED, lora=LoraForm.MERGED, precision=Precision.INT4),
    "shared table": Recipe.resolve(embedding_precision=Precision.INT8),
    "adapter files": Recipe.resolve(precision=Precision.FP32, lora=LoraForm.ADAPTERS),
    "one component": Recipe.resolve(components=(Component.SPEECH,)),
}


def _sizes(report: ExportReport) -> dict[str, int]:
    assert report.nbytes == sum(file.nbytes for file in report.files)
    return {file.name: file.nbytes for file in report.files}


def _on_disk(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_dry_run_names_every_file_of_the_finished_folder_to_the_byte(
    tiny_checkpoint: Path, tmp_path: Path, recipe: Recipe
) -> None:
    dry = export(tiny_checkpoint, tmp_path / "p", recipe=recipe, settings=ExportSettings(dry_run=True))
    assert dry.dry_run
    assert not (tmp_path / "p").exists()
    written = _on_disk(export(tiny_checkpoint, tmp_path / "p", recipe=recipe).path)
    assert _sizes(dry) == written


def test_a_dry_run_counts_what_is_taken_from_another_package(tiny_checkpoint: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    export(tiny_checkpoint, base, recipe=RECIPES["shared table"])
    part = Recipe.resolve(components=(Component.DECODER,), precision=Precision.INT4)
    dry = export(tiny_checkpoint, tmp_path / "p", recipe=part, from_package=base, settings=ExportSettings(dry_run=True))
    written = _on_disk(export(tiny_checkpoint, tmp_path / "p", recipe=part, from_package=base).path)
    assert set(_sizes(dry)) == set(written)
    assert _sizes(dry) == pytest.approx(written, rel=0.01)


def test_plan_export_verify_and_inspect_agree(tiny_checkpoint: Path, gated_package: Path) -> None:
    written = _on_disk(gated_package)
    planned = {file.name: file.nbytes for file in plan(tiny_checkpoint).files}
    of_package = {file.name: file.nbytes for file in plan(gated_package).files}
    assert planned == of_package == written
    verified, package = verify(gated_package), inspect(gated_package).package
    assert package is not None
    counts = {(verified.files, verified.nbytes), (package.files, package.nbytes)}
    assert counts == {(len(written), sum(written.values()))}


def test_left_overs_of_downloads_and_systems_are_not_counted(tmp_path: Path, tiny_checkpoint: Path) -> None:
    recipe = RECIPES["one component"]
    folder = export(tiny_checkpoint, tmp_path / "p", recipe=recipe).path
    before = inspect(folder).package
    (folder / ".DS_Store").write_bytes(b"x" * 100)
    (folder / ".gitattributes").write_bytes(b"x" * 100)
    after = inspect(folder).package
    assert before is not None
    assert after is not None
    assert (after.files, after.nbytes) == (before.files, before.nbytes)
