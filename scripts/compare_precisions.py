"""Errors of every precision against float32, on one checkpoint: the figures in docs/export.md.

    python scripts/compare_precisions.py CHECKPOINT [--work DIR] [--markdown]

Exports the checkpoint as float32, as float16 (a CUDA package, run on the CPU provider), as INT8 with every block size,
accuracy levels 0 and 4, adapters like the base or in float32, and as INT4, and feeds all of them the same seeded
images, clips and prompts. Relative L2 over each whole output; for the quantized decoders also the cosine of the
logits of every position, per mode.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.checks.cases import made_clips, made_images, marked, text_ids
from phi4mm_export.pipeline.export import export
from phi4mm_export.runtime.package import open_package
from phi4mm_export.runtime.stepping import AUDIO_MODE, FourGraphs
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.recipe import Precision, Recipe

Outputs = dict[str, NDArray[np.float64]]
IMAGES = [((1, 2), (31, 64)), ((2, 2), (64, 45))]
CLIPS = (998, 300)
PROMPT_TOKENS = 24
MODES: tuple[Role | None, ...] = (None, Role.VISION, Role.SPEECH)


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    choices: dict[str, Any]
    components: tuple[Component, ...]


WHOLE, DECODER = tuple(Component), (Component.DECODER,)
REFERENCE = Variant("fp32", {"precision": Precision.FP32}, WHOLE)


def _decoder(
    precision: Precision, block_size: int, level: int, lora: Precision | None = None, *, rotate: bool | None = None
) -> Variant:
    name = f"{precision}, block {block_size}, level {level}" + (f", LoRA {lora}" if lora else "")
    choices = {"precision": precision, "block_size": block_size, "accuracy_level": level, "lora_precision": lora}
    return Variant(name + ("" if rotate is None else ", not rotated"), choices | {"rotate": rotate}, DECODER)


VARIANTS = (
    Variant("fp16 (--ep cuda)", {"precision": Precision.FP16, "provider": Provider.CUDA}, WHOLE),
    *(_decoder(Precision.INT8, block, level) for block in (128, 64, 32, 16) for level in (0, 4)),
    *(_decoder(Precision.INT8, block, level, Precision.FP32) for block in (128, 64, 32, 16) for level in (0, 4)),
    *(_decoder(Precision.INT4, block, 4) for block in (32, 128)),
    *(_decoder(precision, 128, 4, rotate=False) for precision in (Precision.INT8, Precision.INT4)),
)


def outputs(package: Path, embeds: Outputs | None, components: tuple[Component, ...]) -> Outputs:
    """Every output of a package, by a name that starts with its graph; the decoder is fed `embeds` where given."""
    graphs = FourGraphs(open_package(package), threads=1, components=components)
    made: dict[str, Any] = {}
    if Component.VISION in components:
        images = made_images("compare", IMAGES)
        made["vision"] = graphs.vision(*(images[k] for k in ("pixel_values", "image_attention_mask", "image_sizes")))
        clips = made_clips("compare", CLIPS)
        frames, frame_mask, sizes = (clips[k] for k in ("audio_embeds", "audio_attention_mask", "audio_sizes"))
        made["speech"] = graphs.speech(frames, frame_mask, sizes, AUDIO_MODE)
    for role in MODES:
        name = role or "none"
        ids = marked(text_ids(f"compare/{name}", PROMPT_TOKENS)[None], role)
        if Component.EMBEDDING in components:
            plain = text_ids(f"compare/{name}", PROMPT_TOKENS)[None]
            made[f"embedding {name}"] = graphs.embedding(plain)
        fed = (embeds or made)[f"embedding {name}"]
        mask = np.ones((1, PROMPT_TOKENS), np.int64)
        made[f"decoder {name}"] = graphs.decoder(fed, mask, input_ids=ids)[0]
    return {name: np.asarray(value, np.float64) for name, value in made.items()}


def relative_l2(found: NDArray[np.float64], wanted: NDArray[np.float64]) -> float:
    """|found - wanted| / |wanted|."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def cosine(found: NDArray[np.float64], wanted: NDArray[np.float64]) -> float:
    """Cosine of the two outputs as one vector each."""
    return float((found * wanted).sum() / (np.linalg.norm(found) * np.linalg.norm(wanted)))


def rows(checkpoint: Path, work: Path) -> Iterator[tuple[str, str, float, float]]:
    """Variant, output, relative L2, cosine."""
    base = _exported(checkpoint, work, REFERENCE)
    wanted = outputs(base, None, WHOLE)
    for variant in VARIANTS:
        package = _exported(checkpoint, work, variant)
        found = outputs(package, None if variant.components == WHOLE else wanted, variant.components)
        for name in found:
            yield variant.name, name, relative_l2(found[name], wanted[name]), cosine(found[name], wanted[name])
        shutil.rmtree(package)


def _exported(checkpoint: Path, work: Path, variant: Variant) -> Path:
    folder = work / "package"
    recipe = Recipe.resolve(full_logits=True, **variant.choices)
    if variant is REFERENCE:
        folder = work / "reference"
    export(checkpoint, folder, recipe=recipe)
    return folder


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--work", type=Path, help="folder for the packages (default: a temporary one)")
    parser.add_argument("--markdown", action="store_true", help="a Markdown table")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        separator = " | " if given.markdown else "  "
        print(separator.join(("variant", "output", "relative L2", "cosine")))
        if given.markdown:
            print("--- | --- | --- | ---")
        for variant, name, error, angle in rows(given.checkpoint, Path(work)):
            print(separator.join((f"{variant:36}", f"{name:18}", f"{error:.2e}", f"{angle:.5f}")), flush=True)


if __name__ == "__main__":
    main()
