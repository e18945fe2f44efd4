"""`phi4mm doctor`: why a package is refused or answers badly, and what to change; on request, a corrected copy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phi4mm_export.checks.claims import Claims, FileFault, read_claims
from phi4mm_export.checks.contract import detect_contract
from phi4mm_export.checks.diagnosis import Diagnosis, diagnose, file_findings, further_findings, is_blocking
from phi4mm_export.checks.files import compare_files
from phi4mm_export.checks.opened import OpenedPackage, open_package
from phi4mm_export.checks.report import Finding, most_severe_first
from phi4mm_export.checks.static import check_package, config_provider
from phi4mm_export.errors import ExitCode, PackageError
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.package.manifest import (
    MANIFEST_FILE,
    SUMS_FILE,
    FileEntry,
    Manifest,
    changed_manifest,
    manifest_documents,
)
from phi4mm_export.package.publish import check_apart, check_target, staged
from phi4mm_export.package.repack import repack
from phi4mm_export.package.scan import Entry, EntryKind, scan
from phi4mm_export.package.write import hashed
from phi4mm_export.pipeline.doctor_repairs import Repairs, plan_repairs, unified_patch
from phi4mm_export.pipeline.validate import open_folder, refuse_empty
from phi4mm_export.spec.contract_file import load_contract
from phi4mm_export.spec.on_disk import home_expanded, is_entry, is_file, is_inside_name, real_path

MOST_ROUNDS = 3
"""A copy is looked at again after its repair; what is left after these rounds is for a person."""


@dataclass(frozen=True)
class DoctorReport:
    """What is wrong, most severe first. `patch` is a unified diff of the text files; `copied_to` is the name of the
    corrected copy, and `left` what is still wrong with it."""

    package: str
    diagnoses: tuple[Diagnosis, ...]
    patch: str
    copied_to: str = ""
    left: tuple[Diagnosis, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the package, or the copy where one was made, can be used."""
        return not any(map(is_blocking, self.left if self.copied_to else self.diagnoses))

    @property
    def exit_code(self) -> ExitCode:
        """0, or 4 while something blocks."""
        return ExitCode.OK if self.ok else ExitCode.PACKAGE

    def as_json(self) -> dict[str, Any]:
        """The report as plain data with a fixed key order."""
        return {
            "package": self.package,
            "ok": self.ok,
            "diagnoses": [item.as_json() for item in self.diagnoses],
            "patch": self.patch,
            "copied_to": self.copied_to,
            "left": [item.as_json() for item in self.left],
        }


def doctor(
    package: str | os.PathLike[str], *, fix: str | os.PathLike[str] | None = None, overwrite: bool = False
) -> DoctorReport:
    """Name the causes of what is wrong with anybody's package; with `fix`, write a corrected copy there.

    The copy has corrected JSON files, data files under the names that graphs want and without dead bytes; graphs and
    weights are the same. What only a person can decide stays, and is in `left`.

    Raises UsageError for a path that is no package and for a target that is the source's own inside; PackageError and
    SystemLimitError as publishing does.
    """
    folder = Path(package)
    target = None if fix is None else home_expanded(fix).absolute()
    if target is not None:
        _check_target(folder, target, overwrite=overwrite)
    opened = open_folder(folder)
    if not is_entry(folder / MANIFEST_FILE):
        refuse_empty(opened)
    findings, manifest = _examine(opened)
    repairs = plan_repairs(opened, findings, manifest)
    diagnoses = _told(findings, repairs)
    report = DoctorReport(real_path(folder).name, diagnoses, unified_patch(folder, repairs))
    if target is None:
        return report
    entries = scan(folder)
    need = sum(entry.nbytes for entry in entries.values())
    with staged(target, overwrite=overwrite, need=need) as staging:
        _copy(folder, entries, repairs, staging)
        written = {*repairs.texts, *repairs.renamed, *_repack(opened, repairs, staging)}
        left = _repair_again(staging, manifest, written)
        if manifest is not None:
            _refresh(staging, manifest, written)
            left = _told(_examine(open_package(staging))[0], Repairs())
    return replace(report, copied_to=target.name, left=left)


def _check_target(folder: Path, target: Path, *, overwrite: bool) -> None:
    """Refuse a target before the package is read."""
    check_apart(target, replaced=folder)
    check_target(target, overwrite=overwrite)


def _examine(opened: OpenedPackage) -> tuple[list[Finding], Manifest | None]:
    """Everything that is wrong, most severe first, and the manifest if it can be trusted."""
    _, found = check_package(opened, load_contract(detect_contract(opened)), config_provider(opened))
    manifest, faults = _manifest_faults(opened.folder)
    everything = [*found, *file_findings(faults, found), *further_findings(opened, manifest)]
    return list(most_severe_first(everything)), manifest


def _manifest_faults(folder: Path) -> tuple[Manifest | None, list[FileFault]]:
    if not is_entry(folder / MANIFEST_FILE):
        return None, []
    claims: Claims = read_claims(folder)
    return claims.manifest, [*claims.faults, *compare_files(folder, claims, scan(folder))[0]]


def _told(findings: Iterable[Finding], repairs: Repairs) -> tuple[Diagnosis, ...]:
    return tuple(replace(item, repair=repairs.why.get(item.finding, "")) for item in diagnose(findings))


def _copy(folder: Path, entries: dict[str, Entry], repairs: Repairs, staging: Path) -> None:
    """Plain files, and links that stay inside, as plain files; under their new names."""
    new_names = {old: new for new, old in repairs.renamed.items()}
    home = real_path(folder)
    for name, entry in entries.items():
        if name in repairs.dropped | repairs.repacked | {MANIFEST_FILE, SUMS_FILE}:
            continue
        real = real_path(folder / name)
        inside = entry.kind is EntryKind.LINK and real.is_relative_to(home) and is_file(real)
        if entry.kind is EntryKind.FILE or inside:
            target = staging / new_names.get(name, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, target)
    for name, data in repairs.texts.items():
        if is_inside_name(name):
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).write_bytes(data)


def _repack(package: OpenedPackage, repairs: Repairs, staging: Path) -> set[str]:
    """Data files without their dead bytes, and the graphs that refer to them: the names written."""
    written: set[str] = set()
    for data_file in sorted(repairs.repacked):
        models = {
            graph.file: load_graph(staging / graph.file, where=graph.file)
            for graph in package.all_graphs()
            if is_file(staging / graph.file)
        }
        (staging / data_file).parent.mkdir(parents=True, exist_ok=True)
        before = {file: model.SerializeToString(deterministic=True) for file, model in models.items()}
        try:
            repack(package.folder, models, data_file, staging / data_file)
        except PackageError:
            (staging / data_file).unlink(missing_ok=True)
            shutil.copyfile(package.folder / data_file, staging / data_file)
            continue
        written.add(data_file)
        for file, model in models.items():
            data = model.SerializeToString(deterministic=True)
            if data != before[file]:
                (staging / file).write_bytes(data)
                written.add(file)
    return written


def _repair_again(staging: Path, manifest: Manifest | None, written: set[str]) -> tuple[Diagnosis, ...]:
    """Repair what the first repair brought to light; what is left in the end."""
    for _ in range(MOST_ROUNDS):
        opened = open_package(staging)
        _, found = check_package(opened, load_contract(detect_contract(opened)), config_provider(opened))
        everything = most_severe_first([*found, *further_findings(opened, manifest)])
        repairs = plan_repairs(opened, everything, manifest)
        fresh = {name: data for name, data in repairs.texts.items() if is_inside_name(name)}
        if not fresh:
            break
        for name, data in fresh.items():
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).write_bytes(data)
        written |= set(fresh)
    return _told(everything, Repairs())


def _refresh(staging: Path, manifest: Manifest, written: set[str]) -> None:
    """The old manifest with new entries for what was written; everything else keeps the digest it had, so that a
    damaged file stays known as one."""
    entries = {name: entry for name, entry in manifest.by_name.items() if name not in written}
    for name in sorted(written):
        file = hashed(staging, name)
        old = manifest.by_name.get(name)
        fields = {} if old is None else {"reproducibility": old.reproducibility}
        entries[name] = FileEntry(name=name, size=file.nbytes, sha256=file.sha256, **fields)
    for name, data in manifest_documents(changed_manifest(manifest, entries.values())).items():
        (staging / name).write_bytes(data)
