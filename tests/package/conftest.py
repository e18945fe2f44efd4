"""Packages of the tiny checkpoint, exported once per test run; read-only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.media_files import write_picture

from phi4mm_export.pipeline.build import BuildResult, BuildSettings, build
from phi4mm_export.pipeline.export import ExportSettings, export
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe

BuildOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def gated_package(built_once: BuildOnce, tiny_checkpoint: Path) -> Path:
    """The default export: int8 weights, both adapters gated."""
    return built_once("package-gated", lambda folder: export(tiny_checkpoint, folder))


@pytest.fixture(scope="session")
def adapters_package(built_once: BuildOnce, tiny_checkpoint: Path) -> Path:
    """A float32 decoder with overridable LoRA inputs and two adapter files."""
    recipe = Recipe.resolve(precision=Precision.FP32, lora=LoraForm.ADAPTERS)
    return built_once("package-adapters", lambda folder: export(tiny_checkpoint, folder, recipe=recipe))


@pytest.fixture(scope="session")
def cuda_package(built_once: BuildOnce, tiny_checkpoint: Path) -> Path:
    """The export for CUDA: int8 weights, float16 activations, arenas released."""
    recipe, settings = Recipe.resolve(provider=Provider.CUDA), ExportSettings(release_arena=True)
    return built_once("package-cuda", lambda folder: export(tiny_checkpoint, folder, recipe=recipe, settings=settings))


@pytest.fixture(scope="session")
def built(built_once: BuildOnce, tiny_checkpoint: Path) -> Path:
    """The named recipe int8-gated, built; the same export as `cuda_package`."""
    return built_once("build-int8-gated", lambda folder: build("int8-gated", folder, model=tiny_checkpoint))


@pytest.fixture(scope="session")
def calibrated(built_once: BuildOnce, tiny_checkpoint: Path) -> Path:
    """The published recipe, its vision graph calibrated on the folder `pages` beside it; `hessians` lies there too."""

    def make(folder: Path) -> BuildResult:
        pages = folder.parent / "pages"
        pages.mkdir(exist_ok=True)
        for number, (width, height) in enumerate([(300, 200), (448, 448), (200, 400)]):
            write_picture(pages, f"page {number}.png", width, height)
        kept = BuildSettings(save_statistics=folder.parent / "hessians")
        return build("int8-gptq", folder, model=tiny_checkpoint, calibration=pages, settings=kept)

    return built_once("build-int8-gptq", make)
