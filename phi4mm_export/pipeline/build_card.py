"""The facts of a built package that its model card tells, gathered from the package itself."""

from __future__ import annotations

from pathlib import Path

from phi4mm_export.package.manifest import FileEntry, Manifest, Reproducibility
from phi4mm_export.package.model_card import CardFacts, MemoryFigures
from phi4mm_export.package.model_card import card_text as written
from phi4mm_export.package.source_card import SourceCard
from phi4mm_export.package.write import WrittenFile
from phi4mm_export.pipeline.build_measure import Measured
from phi4mm_export.pipeline.plan import plan
from phi4mm_export.runtime.package import open_package
from phi4mm_export.spec.build_recipe import BuildRecipe
from phi4mm_export.spec.build_recipe_read import toml_text


def card_text(package: Path, manifest: Manifest, recipe: BuildRecipe, source: SourceCard, measured: Measured) -> str:
    """The model card of a finished package folder; `manifest` is the one without the card."""
    run = plan(package).run
    memory = MemoryFigures(
        image=run.peak_image,
        audio=run.peak_audio,
        both=run.peak_both_released if recipe.export.release_arena else run.peak_both_kept,
        max_length=run.max_length,
        prompt_tokens=run.prompt_tokens,
        crops=run.crops,
        seconds=run.seconds,
    )
    return written(
        CardFacts(
            manifest=manifest,
            recipe=recipe,
            recipe_toml=toml_text(recipe.recorded()),
            source=source,
            memory=memory,
            rope_switch=open_package(package).rope_switch,
            gates=measured.gates,
            evaluation=measured.evaluation,
        )
    )


def card_entry(card: WrittenFile, measured: Measured) -> FileEntry:
    """The card in the manifest: of figures that a runtime gave it is only sure to be the same on one machine."""
    kind = Reproducibility.SAME_MACHINE if measured.anything else Reproducibility.EXACT
    return FileEntry(name=card.name, size=card.nbytes, sha256=card.sha256, reproducibility=kind)
