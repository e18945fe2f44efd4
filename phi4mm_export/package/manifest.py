"""`phi4mm.json`: what a package is made of. No clock, host, user or path of the machine that made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phi4mm_export import __version__
from phi4mm_export.package.write import WrittenFile
from phi4mm_export.spec.json_text import json_bytes
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.recipe import Recipe

MANIFEST_FILE = "phi4mm.json"
"""Not manifest.json: that name belongs to ONNX Runtime's model packages."""
SCHEMA_VERSION = 1


def recipe_json(recipe: Recipe, baked: Sequence[Role]) -> dict[str, Any]:
    """The resolved recipe as plain values, in a fixed order."""
    return {
        "provider": recipe.provider.value,
        "layout": recipe.layout.value,
        "components": [component.value for component in recipe.components],
        "float_type": recipe.float_type.value,
        "precision": recipe.precision.value,
        "encoder_precision": recipe.encoder_precision.value,
        "embedding_precision": recipe.embedding_precision.value,
        "lora_precision": recipe.lora_precision.value,
        "block_size": recipe.block_size,
        "accuracy_level": recipe.accuracy_level,
        "lora": recipe.lora.value,
        "adapters": [role.value for role in baked],
        "full_logits": recipe.full_logits,
    }


def manifest_bytes(recipe: Recipe, baked: Sequence[Role], files: Iterable[WrittenFile]) -> bytes:
    """The manifest of a package that was just exported; it does not list itself."""
    listed = sorted(files, key=lambda file: file.name)
    return json_bytes(
        {
            "schema_version": SCHEMA_VERSION,
            "tool": {"name": "phi4mm", "version": __version__},
            "recipe": recipe_json(recipe, baked),
            "files": [{"name": file.name, "size": file.nbytes, "sha256": file.sha256} for file in listed],
        }
    )


def requantized_bytes(old: Mapping[str, Any] | None, files: Iterable[WrittenFile], entry: Mapping[str, Any]) -> bytes:
    """The manifest of a package one of whose graphs was quantized.

    old: the manifest it had, whose other keys stay; None for a package of another tool. entry: what was done, with the
    digests of the calibration samples; it takes the place of an earlier entry of the same component.
    """
    kept = dict(old or {})
    known = kept.pop("quantization", [])
    earlier = [e for e in known if isinstance(e, dict) and e.get("component") != entry.get("component")]
    kept.pop("files", None)
    listed = sorted(files, key=lambda file: file.name)
    head = {"schema_version": SCHEMA_VERSION, "tool": {"name": "phi4mm", "version": __version__}}
    return json_bytes(
        {
            **head,
            **{key: value for key, value in kept.items() if key not in head},
            "quantization": sorted([*earlier, dict(entry)], key=lambda e: str(e.get("component"))),
            "files": [{"name": file.name, "size": file.nbytes, "sha256": file.sha256} for file in listed],
        }
    )
