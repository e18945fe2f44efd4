"""Packages of the tiny checkpoint in every form, exported once per test run; read-only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from phi4mm_export.checks.goldens import Goldens, read_goldens
from phi4mm_export.pipeline.export import export
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe

BuildOnce = Callable[[str, Callable[[Path], object]], Path]
GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
RECIPES = {
    "gated": Recipe.resolve(precision=Precision.FP32, full_logits=True),
    "last-logits": Recipe.resolve(precision=Precision.FP32),
    "merged": Recipe.resolve(precision=Precision.FP32, lora=LoraForm.MERGED, full_logits=True),
    "branch": Recipe.resolve(precision=Precision.FP32, lora=LoraForm.BRANCH, full_logits=True),
    "adapters": Recipe.resolve(precision=Precision.FP32, lora=LoraForm.ADAPTERS),
    "no-adapter": Recipe.resolve(precision=Precision.FP32, lora=LoraForm.MERGED, adapter=None),
    "fp16": Recipe.resolve(provider=Provider.CUDA, precision=Precision.FP16),
    "int8": Recipe.resolve(),
    "int4": Recipe.resolve(precision=Precision.INT4),
}

PackageOf = Callable[[str], Path]


@pytest.fixture(scope="session")
def package_of(built_once: BuildOnce, tiny_checkpoint: Path) -> PackageOf:
    """`package_of(name)`: the package that the recipe of this name makes of the tiny checkpoint."""

    def package(name: str) -> Path:
        recipe = RECIPES[name]
        return built_once(f"parity-{name}", lambda folder: export(tiny_checkpoint, folder, recipe=recipe))

    return package


@pytest.fixture(scope="session")
def goldens() -> Goldens:
    """The stored goldens, read once per worker."""
    return read_goldens(GOLDENS)
