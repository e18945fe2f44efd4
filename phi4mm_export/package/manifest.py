"""`phi4mm.json` and `SHA256SUMS`: what a package is made of, by digests alone.

No clock, host, user or path of the machine that made it. The versions of the tool and its libraries are in it, so two
library versions give two manifests, and for graphs perhaps two serializations; `package_digest` speaks of the other
files only, `recipe_digest` of the choices only.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from phi4mm_export import __version__
from phi4mm_export.errors import PackageError, some
from phi4mm_export.package.file_names import LEFT_OVERS, name_collision, name_fault
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.json_text import json_bytes
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.recipe import Recipe

if TYPE_CHECKING:
    from phi4mm_export.package.write import WrittenFile

MANIFEST_FILE = "phi4mm.json"
"""Not manifest.json: that name belongs to ONNX Runtime's model packages."""
SUMS_FILE = "SHA256SUMS"
SCHEMA_VERSION = 1
MIN_RUNTIME = "0.14.1"
"""Oldest onnxruntime-genai that packages are tried with: the first release line that feeds a gated decoder."""
TOLERATED = LEFT_OVERS
"""Extra files that a package allows unless it says otherwise."""
LIBRARIES = ("ml_dtypes", "numpy", "onnx", "onnx-ir", "onnxscript", "protobuf")
"""Libraries that take part in writing a package's bytes."""
MEASURED = frozenset({"layers", "calibration", "statistics"})
"""Keys of a quantization entry that tell what it met, not what was asked for."""

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(max_length=1024)]


class Plain(BaseModel):
    """Text from outside: strict kinds, no unknown key, immutable."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Reproducibility(StrEnum):
    """What the same inputs and choices give, with the same versions of tool and libraries.

    exact: the same bytes on any IEEE machine. locked: the same bytes wherever the recorded calibration statistics are
    used. same-machine: the same bytes on one machine; elsewhere close, because calibration ran through a runtime.
    """

    EXACT = "exact"
    LOCKED = "locked"
    SAME_MACHINE = "same-machine"


class InputEntry(Plain):
    """A file that was read: its name in the checkpoint (or `adapter-ROLE/...`), size in bytes, digest."""

    name: Text
    size: Size
    sha256: Sha256


class FileEntry(Plain):
    """A file of the package; `name` is relative to it, with `/`."""

    name: Text
    size: Size
    sha256: Sha256
    reproducibility: Reproducibility = Reproducibility.EXACT


class Tool(Plain):
    """The program that wrote the package."""

    name: Literal["phi4mm"] = "phi4mm"
    version: Text = __version__


class Source(Plain):
    """Where the weights came from: hub id and commit, or digests alone. `package_digest` is that of a package from
    which components were taken over."""

    model: Text | None = None
    commit: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None = None
    package_digest: Sha256 | None = None
    files: tuple[InputEntry, ...] = ()


class AdapterEntry(Plain):
    """An adapter inside the decoder or beside it, and whether it came with the checkpoint or from a folder."""

    role: Role
    origin: Literal["checkpoint", "folder"]


class Runtime(Plain):
    """What runs the package."""

    provider: Text | None = None
    onnxruntime_genai: Text = f">={MIN_RUNTIME}"


class Manifest(Plain):
    """Everything `phi4mm.json` says. `recipe` and `source` are None for a package that another tool wrote."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    tool: Tool = Tool()
    package_digest: Sha256
    recipe_digest: Sha256
    source: Source | None = None
    adapters: tuple[AdapterEntry, ...] = ()
    recipe: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None
    quantization: tuple[dict[str, Any], ...] = ()
    build: dict[str, Any] | None = None
    """The recipe that `phi4mm build` carried out, without places; None for a package that no recipe describes."""
    runtime: Runtime = Runtime()
    libraries: dict[Text, Text] = Field(default_factory=dict)
    tolerated: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(TOLERATED, max_length=100)
    files: tuple[FileEntry, ...] = Field(max_length=100_000)

    @property
    def by_name(self) -> dict[str, FileEntry]:
        """The files by their names."""
        return {entry.name: entry for entry in self.files}


CHOICES_ABOUT: Mapping[tuple[str, ...], tuple[Component, ...]] = {
    ("precision", "lora_precision", "rotate", "lora", "adapters", "full_logits"): (Component.DECODER,),
    ("block_size", "accuracy_level"): (Component.DECODER, Component.EMBEDDING),
    ("encoder_precision",): (Component.VISION, Component.SPEECH),
    ("embedding_precision",): (Component.EMBEDDING,),
}
"""Keys of a recipe that mean nothing unless one of these graphs was exported."""


def recipe_json(recipe: Recipe, baked: Sequence[Role]) -> dict[str, Any]:
    """The resolved recipe as plain values, in a fixed order, without choices about graphs that are not exported."""
    exported = set(recipe.components)
    left_out = {key for keys, components in CHOICES_ABOUT.items() if not exported & set(components) for key in keys}
    values = {
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
        "rotate": recipe.rotate,
        "lora": recipe.lora.value,
        "adapters": [role.value for role in baked],
        "full_logits": recipe.full_logits,
    }
    return {key: value for key, value in values.items() if key not in left_out}


def make_manifest(files: Iterable[FileEntry], **parts: Any) -> Manifest:
    """A manifest of these files, sorted, with both digests computed; `parts` are its other fields.

    Raises PackageError for file names that a manifest cannot hold.
    """
    listed = tuple(sorted(files, key=lambda entry: entry.name))
    draft = Manifest(package_digest="0" * 64, recipe_digest="0" * 64, files=listed, **parts)
    check_names(entry.name for entry in listed)
    return draft.model_copy(update={"package_digest": package_digest(listed), "recipe_digest": recipe_digest(draft)})


def changed_manifest(old: Manifest, files: Iterable[FileEntry], **parts: Any) -> Manifest:
    """`old` with other files and fields, written by this version of the tool; it is no recipe's result any more unless
    `parts` says so."""
    kept = {name: getattr(old, name) for name in Manifest.model_fields}
    for name in ("schema_version", "tool", "package_digest", "recipe_digest", "build", "files"):
        del kept[name]
    return make_manifest(files, **{**kept, **parts})


def check_names(names: Iterable[str]) -> None:
    """Raise PackageError for names that are not safe everywhere, collide somewhere, or are the manifest's own."""
    faults = list(_name_faults(list(names)))
    if faults:
        raise PackageError(
            f"{len(faults)} file names cannot be used: {some(faults, 3)}",
            where=f"{MANIFEST_FILE}: files",
            fix="rename the files; in a package from elsewhere, ask where it came from",
        )


def _name_faults(names: list[str]) -> Iterator[str]:
    for name in names:
        fault = name_fault(name)
        if fault:
            yield f"{name!r}: {fault}"
        elif name in (MANIFEST_FILE, SUMS_FILE):
            yield f"{name!r}: the manifest does not list itself"
    collision = name_collision([*dict.fromkeys(names), MANIFEST_FILE, SUMS_FILE])
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        yield f"{some(map(repr, twice))} listed twice"
    elif collision is not None:
        yield f"{collision[0]!r} and {collision[1]!r} are one file on some systems"


def file_entries(
    files: Iterable[WrittenFile], classes: Mapping[str, Reproducibility] | None = None
) -> tuple[FileEntry, ...]:
    """Entries of written files; `classes` names the files that are not exact."""
    known = classes or {}
    return tuple(
        FileEntry(
            name=file.name,
            size=file.nbytes,
            sha256=file.sha256,
            reproducibility=known.get(file.name, Reproducibility.EXACT),
        )
        for file in files
    )


def manifest_documents(manifest: Manifest) -> dict[str, bytes]:
    """The bytes of phi4mm.json and SHA256SUMS."""
    body = json_bytes(manifest.model_dump(mode="json"), indent=2)
    return {MANIFEST_FILE: body, SUMS_FILE: sums_bytes(manifest, hashlib.sha256(body).hexdigest())}


def write_manifest(folder: Path, manifest: Manifest) -> list[WrittenFile]:
    """Write both files into a package that is being made."""
    from phi4mm_export.package.write import write_file

    return [write_file(folder, name, data) for name, data in manifest_documents(manifest).items()]


def sums_bytes(manifest: Manifest, manifest_sha256: str) -> bytes:
    """SHA256SUMS as `sha256sum --check` reads it: every file, phi4mm.json too, sorted by name."""
    digests = {entry.name: entry.sha256 for entry in manifest.files} | {MANIFEST_FILE: manifest_sha256}
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode("utf-8")


def package_digest(files: Iterable[FileEntry]) -> str:
    """sha256 over one line per file, `SHA256 SIZE NAME`, sorted by name; the manifest itself is none of them."""
    lines = sorted((entry.name, f"{entry.sha256} {entry.size} {entry.name}\n") for entry in files)
    return hashlib.sha256("".join(line for _, line in lines).encode("utf-8")).hexdigest()


def recipe_digest(manifest: Manifest) -> str:
    """sha256 over every choice, inputs and measured results left out."""
    chosen = {
        "recipe": manifest.recipe,
        "settings": manifest.settings,
        "adapters": [entry.model_dump(mode="json") for entry in manifest.adapters],
        "quantization": [
            {key: value for key, value in entry.items() if key not in MEASURED} for entry in manifest.quantization
        ],
    }
    if manifest.build is not None:
        chosen["build"] = manifest.build
    text = json.dumps(chosen, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def library_versions(names: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Installed versions, by the name of the distribution; what is not installed is left out."""
    found = {}
    for name in sorted(names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
