"""The float side of an evaluation: a package as given, or one exported from the checkpoint for the occasion; and what
differs between the two sides before any graph runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.checks.evaluation import ComponentSize
from phi4mm_export.checks.package_graphs import graph_precision
from phi4mm_export.errors import PackageError, UsageError
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.package.manifest import MANIFEST_FILE
from phi4mm_export.pipeline.export import export
from phi4mm_export.runtime.package import CONFIG_FILE, RunPackage, open_package
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.json_text import read_object
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import home_expanded, is_file
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe

Array = NDArray[Any]


def float_package(
    against: Path | str,
    package: RunPackage,
    folder: Path,
    *,
    provider: Provider,
    on_stage: Callable[[str], None],
) -> tuple[RunPackage, str, tuple[str, ...]]:
    """The package to compare with, "package" or "checkpoint", and remarks.

    A checkpoint is exported into `folder` with float weights, in the LoRA form of `package` (on CUDA in float16, the
    finest that its attention takes). Raises UsageError for a path that is neither.
    """
    path = home_expanded(against)
    if is_file(path / CONFIG_FILE):
        floats = open_package(path)
        _refuse_another_model(package, floats)
        return floats, "package", _form_notes(package, floats)
    if is_file(path):
        raise UsageError(
            "expected a package or checkpoint folder, found a file", where=f"--against {against}", fix="give the folder"
        )
    recipe, notes = float_recipe(package, provider)
    on_stage(f"exporting {path.name} in {recipe.precision.value} for the comparison")
    report = export(against, folder / "float", recipe=recipe)
    return open_package(report.path), "checkpoint", (*notes, *report.warnings)


def float_recipe(package: RunPackage, provider: Provider) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe of a float package in the LoRA form of `package`: as its manifest says, or else as its graphs show."""
    stated = _stated_recipe(package)
    lora = stated.get("lora")
    notes: tuple[str, ...] = ()
    if lora in set(LoraForm):
        form = LoraForm(lora)
    elif package.gated:
        form = LoraForm.GATED
    elif package.adapters:
        form = LoraForm.ADAPTERS
    else:
        form = LoraForm.GATED
        notes = ("the package does not say which adapter it holds: it is compared with the original in every mode",)
    baked = stated.get("adapters") if form in (LoraForm.MERGED, LoraForm.BRANCH) else None
    roles = [Role(name) for name in baked or () if name in set(Role)]
    adapter = Role.VISION if baked is None else roles[0] if roles else None
    precision = Precision.FP16 if provider is Provider.CUDA else Precision.FP32
    return Recipe.resolve(provider=provider, precision=precision, lora=form, adapter=adapter), notes


def preprocessing_differences(package: RunPackage, floats: RunPackage) -> tuple[str, ...]:
    """Files that decide what the graphs are fed and that differ between the two packages, each in a sentence."""
    found: list[str] = []
    for component in (Component.VISION, Component.SPEECH):
        mine, theirs = package.processor_file(component), floats.processor_file(component)
        if mine is None or theirs is None or package.graph(component) is None:
            continue
        if read_object(mine, error=PackageError) != read_object(theirs, error=PackageError):
            found.append(f"differs as preprocessing: {mine.name} of the two packages says different things")
    names = ("tokenizer.json", "tokenizer_config.json")
    for name in names:
        both = [each.tokenizer_dir / name for each in (package, floats)]
        if all(is_file(file) for file in both) and both[0].read_bytes() != both[1].read_bytes():
            found.append(f"differs as preprocessing: {name} of the two packages has different bytes")
    return tuple(found)


def _refuse_another_model(package: RunPackage, floats: RunPackage) -> None:
    both = package, floats
    for what, sizes in (
        ("hidden size", [each.hidden_size for each in both]),
        ("vocabulary", [each.model.get("vocab_size") for each in both]),
    ):
        if sizes[0] != sizes[1]:
            shown = " against ".join(f"{size:,}" if isinstance(size, int) else repr(size) for size in sizes)
            raise UsageError(
                f"the packages hold different models: a {what} of {shown}",
                where=f"--against {floats.path}",
                fix="compare a package with the float form of its own model",
            )


def _stated_recipe(package: RunPackage) -> dict[str, Any]:
    try:
        recipe = read_object(package.path / MANIFEST_FILE, error=PackageError).get("recipe")
    except (PackageError, OSError):
        return {}
    return recipe if isinstance(recipe, dict) else {}


def _form_notes(package: RunPackage, floats: RunPackage) -> tuple[str, ...]:
    forms = [_stated_recipe(each).get("lora") for each in (package, floats)]
    if None in forms or forms[0] == forms[1]:
        return ()
    return (f"the packages hold their adapters in different forms: {forms[0]} against {forms[1]}",)


def component_sizes(package: RunPackage, floats: RunPackage) -> tuple[ComponentSize, ...]:
    """Bytes and number format of each graph that both packages have. Data that two graphs share count for each."""
    found: list[ComponentSize] = []
    for component in Component:
        both = [each.graph(component) for each in (package, floats)]
        if None not in both:
            sizes, formats = zip(*(_size(path) for path in both if path is not None), strict=True)
            found.append(ComponentSize(component.value, *sizes, *formats))
    return tuple(found)


def array_differences(mine: Mapping[str, Array], theirs: Mapping[str, Array]) -> list[str]:
    """How the processed arrays of one request differ, a sentence each."""
    found: list[str] = []
    for name in sorted({*mine, *theirs}):
        if name not in mine or name not in theirs:
            found.append(f"{name} is made by one processor only")
        elif mine[name].shape != theirs[name].shape:
            found.append(f"{name} has shape {list(mine[name].shape)} against {list(theirs[name].shape)}")
        else:
            distance = float(np.abs(mine[name].astype(np.float64) - theirs[name].astype(np.float64)).max(initial=0.0))
            found += [f"{name} differs by up to {distance:.6g}"] if distance else []
    return found


def _size(path: Path) -> tuple[int, str]:
    model = load_graph(path)
    stored = 0
    for tensor in model.graph.initializer:
        length = [entry.value for entry in tensor.external_data if entry.key == "length"]
        stored += int(length[0]) if length else 0
    return path.stat().st_size + stored, graph_precision(model).value
