"""The manifest of a package one of whose graphs was quantized."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phi4mm_export.package.manifest import (
    LIBRARIES,
    Manifest,
    Reproducibility,
    changed_manifest,
    file_entries,
    library_versions,
    make_manifest,
)
from phi4mm_export.package.write import WrittenFile, hashed
from phi4mm_export.spec.contract import data_file_name
from phi4mm_export.spec.on_disk import is_file

RUNTIMES = ("onnxruntime", "onnxruntime-gpu")
"""Calibration runs the graph, so the runtime's version takes part in the bytes."""


@dataclass(frozen=True)
class Quantized:
    """What happened to one graph. entry: every choice, and the samples' digests; calibrated: whether samples or a
    foreign engine took part; exact: whether the solver's bits are those of every machine; statistics: digest of the
    saved calibration used; libraries: what else the bytes depend on."""

    graph: str
    entry: Mapping[str, Any]
    calibrated: bool
    exact: bool
    statistics: str | None = None
    libraries: tuple[str, ...] = ()

    @property
    def reproducibility(self) -> Reproducibility:
        """The class of the graph's files."""
        if not self.calibrated:
            return Reproducibility.EXACT
        return Reproducibility.LOCKED if self.statistics and self.exact else Reproducibility.SAME_MACHINE


def quantized_manifest(old: Manifest | None, files: Iterable[WrittenFile], done: Quantized) -> Manifest:
    """The new manifest: the old one's other keys stay, an earlier entry of the same component is replaced.

    old: None for a package of another tool.
    """
    classes = {entry.name: entry.reproducibility for entry in old.files} if old else {}
    classes |= dict.fromkeys((done.graph, data_file_name(done.graph)), done.reproducibility)
    earlier = [e for e in (old.quantization if old else ()) if e.get("component") != done.entry.get("component")]
    entry = {**done.entry, "statistics": done.statistics}
    quantization = tuple(sorted([*earlier, entry], key=lambda e: str(e.get("component"))))
    libraries = library_versions((*LIBRARIES, *(RUNTIMES if done.calibrated else ()), *done.libraries))
    entries = file_entries(files, classes)
    if old is None:
        return make_manifest(entries, quantization=quantization, libraries=libraries)
    return changed_manifest(old, entries, quantization=quantization, libraries={**old.libraries, **libraries})


def digest_of(path: Path) -> str:
    """sha256 of a file, or of the lines `SHA256  NAME` of a folder's files, sorted by name."""
    if is_file(path):
        return hashed(path.parent, path.name).sha256
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if is_file(file))
    lines = "".join(f"{hashed(path, name).sha256}  {name}\n" for name in names)
    return hashlib.sha256(lines.encode("utf-8")).hexdigest()
