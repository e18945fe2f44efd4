"""Opening a checkpoint: every check that headers and small files allow, before any weight is read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from phi4mm_export.checkpoint.adapter_folder import open_adapter_folder
from phi4mm_export.checkpoint.adapters import ADAPTER_CONFIG, Adapter, pair_up, parse_settings
from phi4mm_export.checkpoint.documents import read_object
from phi4mm_export.checkpoint.head import HeadChoice, settle_head
from phi4mm_export.checkpoint.shards import INDEX_FILE, read_shards
from phi4mm_export.checkpoint.source import OpenShard, ShardFile, TensorSource
from phi4mm_export.errors import CheckpointError, UsageError, counted, some
from phi4mm_export.spec.config_json import CONFIG_FILE, GENERATION_FILE, PREPROCESSOR_FILE, parse_config
from phi4mm_export.spec.inventory import adapted_shapes, expected_tensors, optional_tensors
from phi4mm_export.spec.json_fields import Fields
from phi4mm_export.spec.model import Layout, ModelConfig, Role
from phi4mm_export.spec.names import canonical_name, split_lora
from phi4mm_export.spec.on_disk import exists, found_at, is_folder, is_link

PROCESSOR_FILE = "processor_config.json"
"""transformers 5 saves the image processor's settings inside this file."""
IMAGE_PROCESSOR_KEY = "image_processor"
PACKAGE_FILE = "genai_config.json"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; a context manager that closes its files.

    tensors: canonical name -> source, adapters excluded; a tied head is not among them. raw_config,
    raw_generation and raw_preprocessor are the parsed JSON files (None when absent). files: everything
    that was read, sorted. warnings: one sentence each, for the log and the report.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, TensorSource]
    adapters: Mapping[Role, Adapter]
    raw_config: dict[str, Any]
    warnings: tuple[str, ...]
    files: tuple[Path, ...] = ()
    raw_generation: dict[str, Any] | None = None
    raw_preprocessor: dict[str, Any] | None = None
    _closing: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    @property
    def sources(self) -> list[TensorSource]:
        """Every stored tensor that may be read: weights and adapters."""
        pairs = [pair for adapter in self.adapters.values() for pair in adapter.pairs.values()]
        return [*self.tensors.values(), *(source for pair in pairs for source in (pair.a, pair.b))]

    def close(self) -> None:
        """Close every file; later reads are errors."""
        self._closing.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(
    path: Path | str,
    *,
    adapter_paths: Mapping[Role, Path] | None = None,
    head: HeadChoice | None = None,
    open_shard: OpenShard = ShardFile,
) -> Checkpoint:
    """The checkpoint in the folder `path`, of either layout.

    adapter_paths: PEFT folders that replace the built-in adapter of their role. head: which output head counts
    where `tie_word_embeddings` and a stored `lm_head.weight` contradict one another: "stored", or "tied" (the
    embedding table). open_shard: opens one file of weights, given its path and its name in errors.
    Raises UsageError for a path that is no folder, CheckpointError for everything in the folder that cannot be
    used. Reads no weight, except to compare a stored head with a tied one.
    """
    folder = _existing_folder(path)
    with ExitStack() as opening:
        opened = _Opening(folder, opening, open_shard)
        documents = _Documents.read(folder)
        sources, adapter_sources = opened.weights()
        config = parse_config(
            documents.config,
            {name: source.shape for name, source in sources.items()},
            preprocessor=documents.preprocessor,
            generation=documents.generation,
            preprocessor_file=documents.preprocessor_file,
        )
        config, tensors = settle_head(config, sources, head)
        _check_inventory(config, tensors)
        adapters = opened.adapters(config, documents.config, adapter_sources, adapter_paths or {})
        return Checkpoint(
            path=folder,
            config=config,
            tensors=tensors,
            adapters=adapters,
            raw_config=documents.config,
            warnings=tuple(opened.warnings),
            files=tuple(sorted({*documents.files, *opened.files})),
            raw_generation=documents.generation,
            raw_preprocessor=documents.preprocessor,
            _closing=opening.pop_all(),
        )


def _existing_folder(path: Path | str) -> Path:
    folder = Path(path)
    if is_folder(folder):
        return folder
    found = found_at(folder)
    raise UsageError(f"expected a checkpoint folder, found {found}", where=str(path), fix="pass the folder's path")


@dataclass(frozen=True)
class _Documents:
    """The small JSON files of a checkpoint."""

    config: dict[str, Any]
    generation: dict[str, Any] | None
    preprocessor: dict[str, Any] | None
    preprocessor_file: str
    files: tuple[Path, ...]

    @classmethod
    def read(cls, folder: Path) -> _Documents:
        if not exists(folder / CONFIG_FILE):
            raise _no_config(folder)
        config = read_object(folder / CONFIG_FILE, CONFIG_FILE)
        files = [folder / CONFIG_FILE]
        found: dict[str, dict[str, Any]] = {}
        for name in (GENERATION_FILE, PREPROCESSOR_FILE, PROCESSOR_FILE):
            if exists(folder / name) or is_link(folder / name):
                found[name] = read_object(folder / name, name)
                files.append(folder / name)
        preprocessor, source = found.get(PREPROCESSOR_FILE), PREPROCESSOR_FILE
        if preprocessor is None and PROCESSOR_FILE in found:
            preprocessor = dict(Fields(found[PROCESSOR_FILE], PROCESSOR_FILE).section(IMAGE_PROCESSOR_KEY).raw)
            source = f"{PROCESSOR_FILE}: {IMAGE_PROCESSOR_KEY}"
        return cls(config, found.get(GENERATION_FILE), preprocessor, source, tuple(files))


def _no_config(folder: Path) -> CheckpointError:
    fix = "pass the folder that holds the checkpoint's config.json"
    if exists(folder / PACKAGE_FILE):
        fix = f"this folder holds {PACKAGE_FILE}, it is an exported package; {fix}"
    elif exists(folder / ADAPTER_CONFIG):
        fix = f"this folder holds {ADAPTER_CONFIG}, an adapter: pass the full checkpoint, and this as --adapter-path"
    elif exists(folder / "params.json"):
        fix = f"this is another framework's layout; {fix}"
    return CheckpointError(f"the folder has no {CONFIG_FILE}", where=str(folder), fix=fix)


class _Opening:
    """Collects open files, read paths and warnings while a checkpoint is opened."""

    def __init__(self, folder: Path, closing: ExitStack, open_shard: OpenShard) -> None:
        self.folder, self._closing, self._open_shard = folder, closing, open_shard
        self.files: list[Path] = []
        self.warnings: list[str] = []

    def weights(self) -> tuple[dict[str, TensorSource], list[TensorSource]]:
        """Canonical name -> source without adapters, and the adapter tensors of the shards."""
        shards = read_shards(self.folder)
        self.files += [self.folder / name for name in shards.files]
        self.warnings += shards.warnings
        opened = {name: self._open(name) for name in shards.files if name != INDEX_FILE}
        sources: dict[str, TensorSource] = {}
        for stored, (entry, file) in shards.tensors.items():
            shard = opened[file]
            source = TensorSource(
                canonical_name(stored), stored, shard.path, entry.dtype, entry.shape, entry.offset, shard
            )
            other = sources.setdefault(source.name, source)
            if other is not source:
                raise CheckpointError(
                    f"{other.stored_name} and {stored} are two spellings of {source.name}",
                    where=source.where,
                    fix=f"keep one of the two ({other.where})",
                )
        adapter_sources = [source for name, source in sources.items() if ".lora_" in name]
        return {name: s for name, s in sources.items() if ".lora_" not in name}, adapter_sources

    def adapters(
        self,
        config: ModelConfig,
        raw_config: dict[str, Any],
        stored: list[TensorSource],
        replacements: Mapping[Role, Path],
    ) -> dict[Role, Adapter]:
        """Each role's adapter: the folder given for it, else the shards' tensors, else the native layout's folder."""
        modules = adapted_shapes(config)
        by_role = _by_role(stored)
        adapters: dict[Role, Adapter] = {}
        for role in Role:
            beside = self.folder / f"{role}-lora"
            if role in replacements:
                folder = _existing_adapter(replacements[role], role)
                adapters[role] = self._adapter_folder(folder, role, modules, label=folder.name or str(folder))
            elif role in by_role:
                section = Fields(raw_config, CONFIG_FILE).section(f"{role}_lora")
                settings = parse_settings(section)
                adapters[role] = pair_up(by_role[role], role, settings, modules, source=section.place)
            elif is_folder(beside) and config.layout is Layout.NATIVE:
                adapters[role] = self._adapter_folder(beside, role, modules, label=beside.name)
            elif is_folder(beside):
                self.warnings.append(
                    f"{beside.name} is not used: the shards hold no {role} adapter, so it may be merged into them; "
                    f"pass --adapter-path {role}={beside.name} if it is not"
                )
        return adapters

    def _adapter_folder(
        self, folder: Path, role: Role, modules: Mapping[str, tuple[int, int]], *, label: str
    ) -> Adapter:
        opened = open_adapter_folder(folder, role, modules, label=label, open_shard=self._open_shard)
        self._closing.callback(opened.shard.close)
        self.files += opened.files
        return opened.adapter

    def _open(self, name: str) -> ShardFile:
        shard = self._open_shard(self.folder / name, name)
        self._closing.callback(shard.close)
        return shard


def _existing_adapter(path: Path, role: Role) -> Path:
    if not is_folder(path):
        found = found_at(path)
        raise UsageError(
            f"expected a folder with the {role} adapter, found {found}",
            where=str(path),
            fix=f"pass --adapter-path {role}=DIR with the folder that holds {ADAPTER_CONFIG}",
        )
    return path


def _by_role(stored: list[TensorSource]) -> dict[Role, list[TensorSource]]:
    """The shards' adapter tensors by role; other adapter names and other kinds of tensors are errors."""
    by_role: dict[Role, list[TensorSource]] = {}
    strangers = []
    for source in stored:
        lora = split_lora(source.name)
        role = next((r for r in Role if lora is not None and lora.adapter == r.value), None)
        if role is None:
            strangers.append(source)
        else:
            by_role.setdefault(role, []).append(source)
    if strangers:
        raise CheckpointError(
            f"{counted(len(strangers), 'adapter tensor')} other than the A and B matrices of a vision or speech "
            "adapter: " + some(sorted(s.stored_name for s in strangers)),
            where=strangers[0].where,
            fix="merge the adapter, or save it as a PEFT folder and pass it as --adapter-path vision=DIR or speech=DIR",
        )
    return by_role


def _check_inventory(config: ModelConfig, tensors: Mapping[str, TensorSource]) -> None:
    """Nothing missing, nothing unknown, every shape as config.json says."""
    wanted, optional = expected_tensors(config), optional_tensors(config)
    missing = [name for name in wanted if name not in tensors and name not in optional]
    unknown = sorted(name for name in tensors if name not in wanted)
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"{counted(len(missing), 'tensor')} missing: {some(missing)}")
        if unknown:
            parts.append(f"{counted(len(unknown), 'unknown tensor')}: {some(tensors[n].stored_name for n in unknown)}")
        raise CheckpointError(
            "; ".join(parts),
            where=tensors[unknown[0]].where if unknown else f"{CONFIG_FILE} against the shards",
            fix=_advice(missing, unknown),
        )
    misshapen = [name for name in tensors if tensors[name].shape != wanted[name]]
    if misshapen:
        first = tensors[misshapen[0]]
        raise CheckpointError(
            f"{counted(len(misshapen), 'tensor')} of another shape than {CONFIG_FILE} says: {some(misshapen)}; "
            f"{first.stored_name} is {list(first.shape)}, expected {list(wanted[first.name])}",
            where=first.where,
            fix=f"use {CONFIG_FILE} and shards of one save",
        )


def _advice(missing: list[str], unknown: list[str]) -> str:
    if unknown:
        near = difflib.get_close_matches(unknown[0], missing, n=1, cutoff=0.8)
        if near:
            return f"the nearest name that is missing is {near[0]}"
        return "remove what does not belong to the model; quantized weights are not supported"
    return "fetch the complete checkpoint"
