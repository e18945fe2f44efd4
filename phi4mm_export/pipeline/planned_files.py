"""Every file that an export publishes, with its size, before a byte is written: what the finished folder will hold.

Data, adapter, graph and configuration files are exact; so is the manifest, whose digests are as long as those to come.
Graphs taken out of another package's data file are estimated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.checkpoint.digests import InputDigest
from phi4mm_export.checkpoint.open import Checkpoint
from phi4mm_export.package.borrow import BorrowedPackage, merged_config
from phi4mm_export.package.configs import ConfigOptions, PackageConfigs, package_configs, runtime_configs
from phi4mm_export.package.detach import detached_nbytes
from phi4mm_export.package.manifest import manifest_documents
from phi4mm_export.package.tokenizer import REQUIRED_FILES
from phi4mm_export.package.write import Placed, WrittenFile, graph_nbytes
from phi4mm_export.pipeline.export_adapters import adapter_file_sizes
from phi4mm_export.pipeline.export_manifest import Origin, export_manifest
from phi4mm_export.pipeline.export_plan import ExportPlan, files_of
from phi4mm_export.spec.contract import Component, data_file_name
from phi4mm_export.spec.genai import CONFIG_FILE
from phi4mm_export.spec.model import ModelConfig
from phi4mm_export.spec.on_disk import is_file
from phi4mm_export.spec.processors import SPEECH_PROCESSOR_FILE, VISION_PROCESSOR_FILE
from phi4mm_export.spec.tokens import PUBLISHED_IDS

NO_DIGEST = "0" * 64
"""Stands where the digest of a file that is not written yet will stand."""
PROCESSOR_FILES = {Component.VISION: VISION_PROCESSOR_FILE, Component.SPEECH: SPEECH_PROCESSOR_FILE}


@dataclass(frozen=True)
class PlannedFile:
    """One file of a package, relative to its folder, and its bytes."""

    name: str
    nbytes: int


def planned_files(
    chosen: ExportPlan,
    checkpoint: Checkpoint,
    configs: PackageConfigs,
    origin: Origin,
    settings: Mapping[str, object],
    borrowed: BorrowedPackage | None = None,
) -> tuple[PlannedFile, ...]:
    """Every file, the manifest's two last. The plan's graphs refer to their data files afterwards.

    borrowed: a package that gives the graphs not exported, the processors and the tokenizer.
    """
    sizes = {**files_of(chosen), **_graph_sizes(chosen)}
    if chosen.adapter_files and Component.DECODER in chosen.recipe.components:
        sizes |= adapter_file_sizes(checkpoint, chosen.recipe.float_type)
    if borrowed is None:
        sizes |= {name: len(data) for name, data in side_files(chosen, configs).items()}
    else:
        sizes |= _borrowed_sizes(borrowed, chosen, configs)
    files = [WrittenFile(name, nbytes, NO_DIGEST) for name, nbytes in sizes.items()]
    manifest = manifest_documents(export_manifest(chosen, files, origin, settings))
    sizes |= {name: len(data) for name, data in manifest.items()}
    return tuple(PlannedFile(name, nbytes) for name, nbytes in sizes.items())


def side_files(chosen: ExportPlan, configs: PackageConfigs) -> dict[str, bytes]:
    """Configs and tokenizer of a whole package; of a part, the processor files of the encoders in it."""
    components = chosen.recipe.components
    if set(components) == set(Component):
        return dict(configs.files)
    names = {PROCESSOR_FILES[component] for component in components if component in PROCESSOR_FILES}
    return {name: data for name, data in configs.files.items() if name in names}


def expected_configs(folder: Path, config: ModelConfig, options: ConfigOptions) -> tuple[PackageConfigs, str]:
    """The configs of an export from `folder`, also where no tokenizer lies in it yet; then a remark says so."""
    missing = [name for name in REQUIRED_FILES if not is_file(folder / name)]
    if not missing:
        return package_configs(folder, config, options), ""
    special = {token: min(number, config.vocab_size - 1) for token, number in PUBLISHED_IDS.items()}
    remark = f"no {' and no '.join(missing)} here: the package's tokenizer is not counted"
    return runtime_configs(folder, config, options, special=special), remark


def expected_inputs(read: Mapping[str, Path], stated: Mapping[str, InputDigest]) -> tuple[InputDigest, ...]:
    """The files an export reads, named and measured but not hashed."""
    on_disk = (InputDigest(name, path.stat().st_size, NO_DIGEST) for name, path in read.items() if name not in stated)
    return tuple(sorted((*on_disk, *stated.values()), key=lambda one: one.name))


def _graph_sizes(chosen: ExportPlan) -> dict[str, int]:
    sizes: dict[str, int] = {}
    in_decoder: Mapping[str, Placed] = {}
    for graph in chosen.graphs:
        placed = {**graph.placed, **{name: in_decoder[there] for name, there in graph.borrowed.items()}}
        if graph.built.component is Component.DECODER:
            in_decoder = graph.placed
        sizes[graph.file_name] = graph_nbytes(graph.built.model, placed)
    return sizes


def _borrowed_sizes(borrowed: BorrowedPackage, chosen: ExportPlan, configs: PackageConfigs) -> dict[str, int]:
    sizes = {name: (borrowed.path / name).stat().st_size for name in borrowed.names}
    for graph in borrowed.detached:
        sizes[graph] = (borrowed.path / graph).stat().st_size
        sizes[data_file_name(graph)] = detached_nbytes(borrowed.path, graph)
    ours = json.loads(configs.files[CONFIG_FILE])
    return sizes | {CONFIG_FILE: len(merged_config(borrowed, chosen.recipe.components, ours))}
