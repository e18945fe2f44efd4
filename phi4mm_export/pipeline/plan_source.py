"""What a plan reads: a checkpoint's headers, its config.json alone, or a package's graphs without their data."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from phi4mm_export.checkpoint.documents import read_object
from phi4mm_export.checkpoint.head import HeadChoice
from phi4mm_export.checkpoint.hub import resolve_model
from phi4mm_export.checkpoint.open import Checkpoint, open_checkpoint
from phi4mm_export.checkpoint.stand_in import WEIGHTS_FILE, header_bytes, write_stand_in
from phi4mm_export.errors import PackageError, UsageError
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.package.scan import package_files
from phi4mm_export.spec.config_json import CONFIG_FILE, GENERATION_FILE, PREPROCESSOR_FILE, parse_config
from phi4mm_export.spec.contract import FILE_NAMES, Component, FloatType, PackageLayout, Provider
from phi4mm_export.spec.genai import CONFIG_FILE as GENAI_FILE
from phi4mm_export.spec.inventory import stored_inventory
from phi4mm_export.spec.json_fields import Fields
from phi4mm_export.spec.json_text import read_object as read_json
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import exists, home_expanded, is_file, real_path

SMALL_FILES = (CONFIG_FILE, GENERATION_FILE, PREPROCESSOR_FILE)


@dataclass(frozen=True)
class OpenedForPlan:
    """A checkpoint whose weights are never read, its name, and the folder of its small files.

    model: the hub id, None for a folder.
    """

    checkpoint: Checkpoint
    name: str
    folder: Path
    warnings: tuple[str, ...] = ()
    model: str | None = None


@contextmanager
def open_for_plan(
    path: str | Path, adapter_paths: Mapping[Role, Path], revision: str | None, head: HeadChoice | None = None
) -> Iterator[OpenedForPlan]:
    """A checkpoint folder, a folder with config.json alone (weights as it implies are assumed), or a hub id.

    Raises UsageError for anything else, CheckpointError as `open_checkpoint`.
    """
    found = resolve_model(str(path), revision=revision)
    if isinstance(found, str):
        from phi4mm_export.checkpoint.remote import open_remote

        with open_remote(found, revision=revision, adapter_paths=adapter_paths, head=head) as (checkpoint, small):
            yield OpenedForPlan(checkpoint, found, small, model=found)
        return
    folder = found
    if not exists(folder / CONFIG_FILE) and any(folder.rglob("*.onnx")):
        raise UsageError(
            f"expected a checkpoint or a whole package, found graphs without {GENAI_FILE}",
            where=str(path),
            fix="write it with phi4mm config, or name the checkpoint",
        )
    if any(folder.glob("*.safetensors*")) or not exists(folder / CONFIG_FILE):
        with open_checkpoint(folder, adapter_paths=adapter_paths, head=head) as checkpoint:
            yield OpenedForPlan(checkpoint, real_path(folder).name, folder)
        return
    with tempfile.TemporaryDirectory(prefix="phi4mm-plan-") as temporary:
        stand_in = Path(temporary)
        remark = _imagine(folder, stand_in)
        with open_checkpoint(stand_in, adapter_paths=adapter_paths) as checkpoint:
            yield OpenedForPlan(checkpoint, real_path(folder).name, folder, (remark,))


def _imagine(folder: Path, stand_in: Path) -> str:
    """A checkpoint without weights, of the tensors that config.json implies; returns what the user should know."""
    raw = read_object(folder / CONFIG_FILE, CONFIG_FILE)
    config = parse_config(raw, {}, preprocessor=None, generation=None)
    shapes = stored_inventory(config)
    write_stand_in(stand_in / WEIGHTS_FILE, *header_bytes(shapes))
    for name in SMALL_FILES:
        if exists(folder / name):
            shutil.copyfile(folder / name, stand_in / name)
    known = ", ".join(sorted(config.lora)) or "none"
    return f"no weights here: bfloat16 tensors of the sizes in {CONFIG_FILE} are assumed, adapters: {known}"


@dataclass(frozen=True)
class PackageHeads:
    """A package's config and graphs; no data file was opened."""

    name: str
    config: Fields
    graphs: Mapping[Component, ir.Model]
    files: Mapping[str, int]
    float_type: FloatType
    provider: Provider
    max_length: int
    arena_released: bool


def is_package(path: str | Path) -> bool:
    """Whether a genai_config.json lies there."""
    return is_file(home_expanded(path) / GENAI_FILE)


def read_package(path: str | Path, provider: Provider | None) -> PackageHeads | None:
    """The package at `path`; None where there is no genai_config.json. Raises PackageError for a broken one."""
    folder = home_expanded(path)
    if not is_package(folder):
        return None
    config = Fields(read_json(folder / GENAI_FILE, error=PackageError), GENAI_FILE, error=PackageError)
    graphs = {component: _graph(folder, config, component) for component in Component}
    files = package_files(folder)
    model = config.section("model")
    options = model.section("decoder").section("session_options").get("provider_options")
    stated = Provider.CUDA if "cuda" in json.dumps(options).lower() else Provider.CPU
    shrinks = [json.dumps(model.section(role.value).get("run_options")) for role in Role]
    return PackageHeads(
        real_path(folder).name,
        config,
        graphs,
        files,
        _cache_type(graphs[Component.DECODER]),
        provider or stated,
        config.section("search").integer("max_length", model.integer("context_length")),
        all("enable_memory_arena_shrinkage" in text for text in shrinks),
    )


def _graph(folder: Path, config: Fields, component: Component) -> ir.Model:
    stated = config.section("model").section(component.value).get("filename")
    name = str(stated or FILE_NAMES[PackageLayout.FLAT][component])
    if not is_file(folder / name):
        raise PackageError(
            f"a plan needs all four graphs, {name} is missing", where=GENAI_FILE, fix="put the file back"
        )
    model: ir.Model = ir.from_proto(load_graph(folder / name, where=name))
    return model


def _cache_type(decoder: ir.Model) -> FloatType:
    """The element type of the key-value cache; float32 where the decoder shows none."""
    for value in decoder.graph.inputs:
        if value.name and value.name.endswith(".key") and value.dtype is ir.DataType.FLOAT16:
            return FloatType.FLOAT16
    return FloatType.FLOAT32
