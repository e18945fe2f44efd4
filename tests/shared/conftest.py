"""The shared folder: checks and damaged inputs made by others, which this repository works without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from phi4mm_export.pipeline.export import export
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe

BuildOnce = Callable[[str, Callable[[Path], object]], Path]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder that PHI4MM_SHARED names, or `../shared` beside the repository."""
    folder = Path(os.environ.get("PHI4MM_SHARED", ROOT.parent / "shared"))
    if not (folder / "oracle" / "check.py").is_file():
        pytest.skip("there is no shared folder: name one in PHI4MM_SHARED")
    return folder.resolve()


@pytest.fixture(scope="session")
def oracle_checkpoint(built_once: BuildOnce, shared: Path) -> Callable[[str], Path]:
    """`oracle_checkpoint(layout)`: the checkpoint that the shared goldens were made from."""

    def checkpoint(layout: str) -> Path:
        def build(folder: Path) -> None:
            staging = folder.with_name(f"{folder.name}.staging")
            script = shared / "oracle" / "make_checkpoint.py"
            subprocess.run(
                [sys.executable, str(script), str(staging), "--layout", layout], check=True, capture_output=True
            )
            staging.rename(folder)

        return built_once(f"oracle-{layout}", build)

    return checkpoint


@pytest.fixture(scope="session")
def oracle_package(built_once: BuildOnce, oracle_checkpoint: Callable[[str], Path]) -> Callable[[str, str, bool], Path]:
    """`oracle_package(form, layout, full_logits)`: a float32 package of that checkpoint."""

    def package(form: str, layout: str, full_logits: bool) -> Path:
        recipe = Recipe.resolve(precision=Precision.FP32, lora=LoraForm(form), full_logits=full_logits)
        name = f"oracle-{layout}-{form}-{'full' if full_logits else 'last'}"
        return built_once(name, lambda folder: export(oracle_checkpoint(layout), folder, recipe=recipe))

    return package
