"""`phi4mm rebuild`: the package that another one's manifest records, built again and compared byte by byte."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phi4mm_export.errors import CheckpointError, ExitCode, PackageError, UsageError, some
from phi4mm_export.package.claim import claimed
from phi4mm_export.package.diff import Difference, Level
from phi4mm_export.package.manifest import MANIFEST_FILE, SUMS_FILE, FileEntry, InputEntry, Manifest
from phi4mm_export.package.manifest_quantized import digest_of
from phi4mm_export.package.manifest_read import read_manifest
from phi4mm_export.package.model_card import CARD_FILE
from phi4mm_export.package.publish import PACKAGE, check_apart, check_parent, check_target
from phi4mm_export.pipeline.build import BuildResult, BuildSettings, Expected, OnBytes, OnStage, build
from phi4mm_export.pipeline.build_quantize import OnLayer
from phi4mm_export.pipeline.diff import diff
from phi4mm_export.spec.build_recipe import AGAINST_MODEL, AGAINST_NONE, BUILTIN, BuildRecipe
from phi4mm_export.spec.build_recipe_read import recipe_of
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.json_fields import shown
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import home_expanded, is_file, is_folder, real_path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HERE = f"{MANIFEST_FILE}: build"
REBUILT = "-rebuilt"
"""Under the package's name with this ending it is built where it is not to be kept; nothing is published there."""


@dataclass(frozen=True)
class RebuildResult:
    """The verdict. `path` is the new package, None where it was not to be kept. `other_versions` names tools that were
    not those of the first build; `compared` counts the files."""

    package: str
    path: Path | None
    build: BuildResult
    differences: tuple[Difference, ...]
    other_versions: tuple[str, ...]
    compared: int

    @property
    def same(self) -> bool:
        """Whether every byte is the same."""
        return not self.differences

    @property
    def exit_code(self) -> ExitCode:
        """0, or 5 when anything differs."""
        return ExitCode.OK if self.same else ExitCode.QUALITY

    def as_json(self) -> dict[str, Any]:
        """The verdict as plain data with a fixed key order."""
        return {
            "package": self.package,
            "same": self.same,
            "path": None if self.path is None else str(self.path),
            "files": self.compared,
            "package_digest": self.build.manifest.package_digest,
            "reproducibility": self.build.reproducibility.value,
            "other_versions": list(self.other_versions),
            "differences": [item.as_json() for item in self.differences],
        }


def rebuild(
    package: str | Path,
    target: str | Path | None = None,
    *,
    model: str | Path | None = None,
    calibration: str | Path | None = None,
    against: str | Path | None = None,
    adapter_paths: Mapping[Role, Path] | None = None,
    settings: BuildSettings | None = None,
    on_stage: OnStage | None = None,
    on_bytes: OnBytes | None = None,
    on_layer: OnLayer | None = None,
) -> RebuildResult:
    """Build again what a package (a folder, or its README.md) records, and compare every byte.

    target: where the new package goes; without one it is removed after the comparison. model, calibration, against: the
    checkpoint, the samples and the float package, where the manifest knows them by digest alone.

    Raises UsageError for what is missing and for other calibration samples, CheckpointError for another model,
    PackageError for a package that no build made, else as `build`.
    """
    folder = package_folder(Path(package))
    manifest = read_manifest(folder)
    recipe = _recorded_recipe(manifest, calibration, against)
    source, revision = _model(manifest, model)
    how = settings or BuildSettings()
    how = replace(how, revision=how.revision or revision)
    _check_statistics(manifest, how.statistics)
    with ExitStack() as stack:
        if target is None:
            beside = real_path(folder).with_name(f"{real_path(folder).name}{REBUILT}")
            check_parent(beside)
            place = stack.enter_context(claimed(beside)).work / PACKAGE
        else:
            place = home_expanded(target).absolute()
            check_target(place, overwrite=how.overwrite)
            _refuse_itself(folder, place)
            check_apart(place, reads=(folder,))
        result = build(
            recipe,
            place,
            model=source,
            adapter_paths=adapter_paths,
            settings=how,
            expected=_expected(manifest),
            on_stage=on_stage,
            on_bytes=on_bytes,
            on_layer=on_layer,
        )
        (on_stage or (lambda _: None))("comparing every byte")
        differences = tuple(_differences(folder, manifest, place, result.manifest))
    return RebuildResult(
        package=real_path(folder).name,
        path=None if target is None else place,
        build=result,
        differences=differences,
        other_versions=tuple(_other_versions(manifest, result.manifest)),
        compared=len(manifest.files) + 2,
    )


def package_folder(path: Path) -> Path:
    """The package that a folder or a README.md in it stands for. Raises UsageError for anything else."""
    if is_folder(path):
        return path
    if is_file(path) and path.name in (CARD_FILE, MANIFEST_FILE):
        return path.parent
    found = "a file" if is_file(path) else "nothing"
    raise UsageError(
        f"expected a package folder or its {CARD_FILE}, found {found}", where=str(path), fix="pass the folder's path"
    )


def _recorded_recipe(manifest: Manifest, calibration: str | Path | None, against: str | Path | None) -> BuildRecipe:
    if manifest.build is None:
        raise PackageError(
            "the manifest records no recipe, because phi4mm build did not make this package",
            where=HERE,
            fix="its other keys hold the options: give them to phi4mm export and phi4mm quantize",
        )
    recipe = recipe_of(manifest.build, HERE, error=PackageError)
    given = None if calibration is None else str(calibration)
    quantize = {}
    for component, choices in recipe.quantize.items():
        recorded = choices.calibration or recipe.calibration
        if recorded is not None:
            wanted = BUILTIN if recorded == BUILTIN else given
            if wanted is None:
                raise UsageError(
                    f"the {component} graph was calibrated on samples that are known by digest alone",
                    where="--calibration",
                    fix="give the samples that the package was built with",
                )
            choices = replace(choices, calibration=wanted if choices.calibration else None)
        quantize[component] = choices
    samples = recipe.calibration if recipe.calibration in (None, BUILTIN) else given
    return replace(
        recipe,
        quantize=quantize,
        evaluate=_evaluation(recipe, against),
        calibration=samples,
        model=None,
        revision=None,
        output=None,
    )


def _evaluation(recipe: BuildRecipe, against: str | Path | None) -> Any:
    choices = recipe.evaluate
    if choices.against not in (AGAINST_MODEL, AGAINST_NONE):
        if against is None:
            raise UsageError(
                "the figures in the card compare with a float package that is known to nobody here",
                where="--against",
                fix="give the float package that the build was judged by",
            )
        choices = replace(choices, against=str(against))
    if choices.against != AGAINST_NONE and choices.given:
        raise UsageError(
            f"the figures in the card were measured on {', '.join(choices.given)} that a rebuild does not know",
            where=f"{HERE}: evaluate",
            fix="build with the same recipe file, then compare with phi4mm diff",
        )
    return choices


def _model(manifest: Manifest, model: str | Path | None) -> tuple[str, str | None]:
    """MODEL and revision: as given, else the recorded hub id and commit."""
    source = manifest.source
    if model is not None:
        return str(model), None
    if source is None or source.model is None:
        raise UsageError(
            "the package was built from a folder, which is known by digests alone", where="--model", fix="give it"
        )
    if not HUB_ID.fullmatch(source.model) or ".." in source.model:
        raise PackageError(
            f"expected a hub id OWNER/NAME, found {shown(source.model)}",
            where=f"{MANIFEST_FILE}: source.model",
            fix="give the checkpoint with --model",
        )
    return source.model, source.commit


def _check_statistics(manifest: Manifest, statistics: Path | None) -> None:
    """Raise UsageError for kept Hessians that are missing, or not the recorded ones."""
    for entry in manifest.quantization:
        component, recorded = entry.get("component"), entry.get("statistics")
        if recorded is None and statistics is None:
            continue
        if statistics is None:
            what, found = f"the {component} graph was built from kept statistics", "none were given"
        elif recorded is None:
            what, found = f"the {component} graph was not built from kept statistics", "some were given"
        else:
            folder = home_expanded(statistics) / str(component)
            digest = digest_of(folder) if is_folder(folder) else "no such folder"
            if digest == recorded:
                continue
            what, found = f"expected statistics of the {component} graph with sha256 {recorded}", f"found {digest}"
        raise UsageError(
            f"{what}, {found}", where="--statistics", fix="give the folder that the package was built from"
        )


def _refuse_itself(folder: Path, target: Path) -> None:
    if real_path(target) == real_path(folder):
        raise UsageError(
            "the target is the package that is to be compared with", where=str(target), fix="choose another place"
        )


def _expected(manifest: Manifest) -> Expected:
    samples: dict[Component, tuple[str, ...]] = {}
    for entry in manifest.quantization:
        found = entry.get("calibration")
        digests = found.get("sha256") if isinstance(found, dict) else None
        if entry.get("component") in set(Component):
            samples[Component(entry["component"])] = tuple(map(str, digests)) if isinstance(digests, list) else ()
    return Expected(manifest.source.files if manifest.source else (), samples, refuse_another_model)


def refuse_another_model(expected: Sequence[InputEntry], found: Sequence[InputEntry]) -> None:
    """Raise CheckpointError, naming the files, for inputs that are not the recorded ones."""
    wanted, given = ({entry.name: entry.sha256 for entry in side} for side in (expected, found))
    other = [name for name in sorted({*wanted, *given}) if wanted.get(name) != given.get(name)]
    if not other:
        return
    first = other[0]
    raise CheckpointError(
        f"this is not the recorded model: {len(other)} of {len(wanted)} files differ ({some(other, 3)}); expected "
        f"sha256 {wanted.get(first, '(no such file)')}, found {given.get(first, '(no such file)')}",
        where=first,
        fix="give the checkpoint and the adapters that the package was built from",
    )


def _differences(folder: Path, old: Manifest, made: Path, new: Manifest) -> list[Difference]:
    """What differs: by the manifests' digests, and in detail where the first package's files are all there."""
    whole = all(is_file(folder / entry.name) for entry in old.files)
    if whole:
        return list(diff(folder, made).differences)
    found = list(_by_digest(old.by_name, new.by_name))
    for name in (MANIFEST_FILE, SUMS_FILE, CARD_FILE):
        if is_file(folder / name) and (folder / name).read_bytes() != (made / name).read_bytes():
            found.append(Difference(Level.FILE, name, "other bytes"))
    return list({(item.level, item.where): item for item in found}.values())


def _by_digest(old: Mapping[str, FileEntry], new: Mapping[str, FileEntry]) -> list[Difference]:
    found = []
    for name in sorted({*old, *new}):
        if name not in new:
            found.append(Difference(Level.FILE, name, "only in A", f"{old[name].size:,} bytes"))
        elif name not in old:
            found.append(Difference(Level.FILE, name, "only in B", "", f"{new[name].size:,} bytes"))
        elif old[name].sha256 != new[name].sha256:
            found.append(Difference(Level.FILE, name, "other bytes", old[name].sha256, new[name].sha256))
    return found


def _other_versions(old: Manifest, new: Manifest) -> list[str]:
    both = ({"phi4mm": each.tool.version, **each.libraries} for each in (old, new))
    first, second = both
    return [
        f"{name} {first.get(name, 'absent')} then, {second.get(name, 'absent')} now"
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    ]
