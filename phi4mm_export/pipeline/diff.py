"""`phi4mm diff`: what differs between two packages, two graphs or two JSON files; or one of them as canonical text."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phi4mm_export.errors import CheckpointError, PackageError, UsageError
from phi4mm_export.package.diff import Difference, Level, compare_json, compare_packages, same_file_bytes
from phi4mm_export.package.diff_graphs import compare_graphs
from phi4mm_export.package.graph_text import graph_text, package_text
from phi4mm_export.spec.json_text import json_bytes, parse_json, read_bytes
from phi4mm_export.spec.on_disk import is_file, is_folder, real_path


@dataclass(frozen=True)
class DiffReport:
    """Every difference, in the order of levels within each file."""

    a: str
    b: str
    tolerance: float
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """True when nothing differs, values within the tolerance and the files that hold them left out."""
        return not self.counted

    @property
    def counted(self) -> tuple[Difference, ...]:
        """What counts: not values within the tolerance, nor that a file has other bytes if nothing else tells why."""
        other = [item for item in self.differences if item.level is not Level.FILE]
        if other and all(item.within for item in other):
            return tuple(d for d in self.differences if d.level is Level.FILE and d.what != "other bytes")
        return tuple(item for item in self.differences if not item.within)

    def count(self) -> dict[str, int]:
        """Differences by level."""
        found = Counter(item.level for item in self.differences)
        return {level.value: found[level] for level in Level if found[level]}

    def as_json(self) -> dict[str, Any]:
        """The report as plain data with a fixed key order."""
        return {
            "a": self.a,
            "b": self.b,
            "equal": self.equal,
            "tolerance": self.tolerance,
            "counts": self.count(),
            "differences": [item.as_json() for item in self.differences],
        }


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str], *, tolerance: float = 0.0) -> DiffReport:
    """Compare two package folders, two .onnx files or two JSON files.

    tolerance: relative L2 distance up to which values, and dequantized weights, count as equal.
    Raises UsageError for paths of different kinds or none of these, CheckpointError for a file that cannot be read.
    """
    first, second = Path(a), Path(b)
    kinds = (_kind(first), _kind(second))
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"expected two of one kind, found a {kinds[0]} and a {kinds[1]}",
            where=f"{first.name} and {second.name}",
            fix="compare packages with packages and graphs with graphs",
        )
    if tolerance < 0 or tolerance != tolerance:
        raise UsageError(f"expected a distance of 0 or more, found {tolerance}", where="--tolerance")
    found = tuple(_compare(kinds[0], first, second, tolerance))
    return DiffReport(real_path(first).name, real_path(second).name, tolerance, found)


def canonical_text(path: str | os.PathLike[str]) -> Iterator[str]:
    """A package, an .onnx or a JSON file as lines that `git diff` can show (git's textconv).

    Raises UsageError for anything else, CheckpointError for a file that cannot be read.
    """
    place = Path(path)
    kind = _kind(place)
    try:
        if kind == "package":
            yield from package_text(place)
        elif kind == "graph":
            yield from graph_text(place, "model")
        else:
            value = parse_json(read_bytes(place), place.name)
            yield from json_bytes(value, indent=2).decode("utf-8").splitlines()
    except PackageError as err:
        raise CheckpointError(err.what, where=err.where, fix=err.fix) from err


def _kind(path: Path) -> str:
    if is_folder(path):
        return "package"
    if is_file(path):
        if path.suffix == ".json":
            return "JSON file"
        with path.open("rb") as file:
            head = file.read(1)
        return "JSON file" if path.suffix != ".onnx" and head in (b"{", b"[") else "graph"
    raise UsageError("expected a package folder, an .onnx or a .json file, found nothing", where=str(path))


def _compare(kind: str, a: Path, b: Path, tolerance: float) -> Iterator[Difference]:
    if kind == "package":
        yield from compare_packages(a, b, tolerance=tolerance)
    elif kind == "JSON file":
        yield from compare_json(parse_json(read_bytes(a), a.name), parse_json(read_bytes(b), b.name), a.name)
    else:
        if not same_file_bytes(a, b):
            yield Difference(Level.FILE, a.name, "other bytes", f"{a.stat().st_size:,}", f"{b.stat().st_size:,}")
        yield from compare_graphs(a.parent, a.name, b.parent, b.name, tolerance=tolerance)
