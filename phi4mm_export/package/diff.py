"""What differs between two packages or two graphs, from the files down to single values.

A `Difference` names its level: file, config (a key of a JSON file), contract (what crosses a graph's border), graph,
node, attribute, initializer, value. Memory stays at a few megabytes beside the graphs themselves.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from phi4mm_export.errors import PackageError
from phi4mm_export.package.manifest import MANIFEST_FILE, SUMS_FILE
from phi4mm_export.package.scan import EntryKind, scan
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.genai import CONFIG_FILE
from phi4mm_export.spec.json_text import parse_json, read_object
from phi4mm_export.spec.on_disk import is_file

CHUNK = 4 << 20
MOST_TEXT_NBYTES = 1 << 20
"""Larger text files are only said to differ."""


class Level(StrEnum):
    """How deep a difference lies."""

    FILE = "file"
    CONFIG = "config"
    CONTRACT = "contract"
    GRAPH = "graph"
    NODE = "node"
    ATTRIBUTE = "attribute"
    INITIALIZER = "initializer"
    VALUE = "value"


@dataclass(frozen=True)
class Difference:
    """One difference. `a` and `b` are short texts, empty where the sentence says it all; `figures` are numbers;
    `within` is True for values that are no further apart than the tolerance asked for."""

    level: Level
    where: str
    what: str
    a: str = ""
    b: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    within: bool = False

    def as_json(self) -> dict[str, Any]:
        """Plain data with a fixed key order."""
        return {
            "level": self.level.value,
            "where": self.where,
            "what": self.what,
            "a": self.a,
            "b": self.b,
            "figures": dict(self.figures),
            "within_tolerance": self.within,
        }


def compare_packages(a: Path, b: Path, *, tolerance: float = 0.0) -> Iterator[Difference]:
    """Everything that differs between two package folders, level by level.

    Graphs are paired by the component that each config names them for, else by file name.
    """
    from phi4mm_export.package.diff_graphs import compare_graphs

    graphs = _paired_graphs(a, b)
    yield from _files(a, b)
    for name in sorted({*_names(a), *_names(b)}):
        if is_file(a / name) and is_file(b / name) and name not in (SUMS_FILE,):
            yield from _documents(a / name, b / name, name)
    for first, second in graphs:
        yield from compare_graphs(a, first, b, second, tolerance=tolerance)


def same_file_bytes(a: Path, b: Path) -> bool:
    """Whether two files hold the same bytes, read in pieces; two names of one file are not read."""
    if a.stat().st_size != b.stat().st_size:
        return False
    if a.samefile(b):
        return True
    with a.open("rb", buffering=0) as first, b.open("rb", buffering=0) as second:
        while piece := first.read(CHUNK):
            other = second.read(len(piece))
            while len(other) < len(piece) and (more := second.read(len(piece) - len(other))):
                other += more
            if piece != other:
                return False
    return True


def _names(folder: Path) -> list[str]:
    return [name for name, entry in scan(folder).items() if entry.kind is not EntryKind.EMPTY_FOLDER]


def _files(a: Path, b: Path) -> Iterator[Difference]:
    first, second = scan(a), scan(b)
    for name in sorted({*first, *second}):
        if name not in second:
            yield Difference(Level.FILE, name, "only in A", f"{first[name].nbytes:,} bytes")
        elif name not in first:
            yield Difference(Level.FILE, name, "only in B", "", f"{second[name].nbytes:,} bytes")
        elif first[name].kind is not second[name].kind:
            yield Difference(Level.FILE, name, "another kind of entry", first[name].kind, second[name].kind)
        elif is_file(a / name) and is_file(b / name) and not same_file_bytes(a / name, b / name):
            sizes = ((a / name).stat().st_size, (b / name).stat().st_size)
            yield Difference(Level.FILE, name, "other bytes", f"{sizes[0]:,} bytes", f"{sizes[1]:,} bytes")


def _paired_graphs(a: Path, b: Path) -> list[tuple[str, str]]:
    """Graph files of A and B that stand for one another."""
    pairs: list[tuple[str, str]] = []
    first, second = _graphs_by_component(a), _graphs_by_component(b)
    for component in Component:
        if component in first and component in second:
            pairs.append((first[component], second[component]))
    taken = ({name for name, _ in pairs}, {name for _, name in pairs})
    rest = [
        {name for name in _names(folder) if name.endswith(".onnx")} - used
        for folder, used in zip((a, b), taken, strict=True)
    ]
    return pairs + [(name, name) for name in sorted(rest[0] & rest[1])]


def _graphs_by_component(folder: Path) -> dict[Component, str]:
    try:
        model = read_object(folder / CONFIG_FILE, error=PackageError).get("model")
    except PackageError:
        return {}
    found = {}
    for component in Component:
        section = model.get(component.value) if isinstance(model, dict) else None
        name = section.get("filename") if isinstance(section, dict) else None
        if isinstance(name, str) and name and ".." not in name.split("/") and is_file(folder / name):
            found[component] = name
    return found


def _documents(a: Path, b: Path, name: str) -> Iterator[Difference]:
    """Keys of JSON files, lines of other text files."""
    if a.suffix not in (".json", ".jinja", ".txt", ".md") or same_file_bytes(a, b):
        return
    if a.suffix == ".json":
        try:
            first, second = (parse_json(path.read_bytes(), name, error=PackageError) for path in (a, b))
        except PackageError as err:
            yield Difference(Level.CONFIG, name, f"cannot be compared: {err.what}")
            return
        found = list(compare_json(first, second, name, skipped=("files",) if name == MANIFEST_FILE else ()))
        yield from found or [Difference(Level.CONFIG, name, "the same values, written differently")]
    elif max(a.stat().st_size, b.stat().st_size) <= MOST_TEXT_NBYTES:
        lines = [path.read_text("utf-8", errors="replace").splitlines() for path in (a, b)]
        marks = [line[:1] for line in difflib.unified_diff(lines[0], lines[1], n=0)][2:]
        yield Difference(Level.CONFIG, name, f"{marks.count('-')} lines removed, {marks.count('+')} added")


def compare_json(a: Any, b: Any, place: str, *, skipped: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Values of two JSON documents that differ, by key path; lists of equal length by position.

    skipped: top-level keys that are left out.
    """
    pending = [(a, b, place, True)]
    while pending:
        x, y, where, top = pending.pop(0)
        if isinstance(x, dict) and isinstance(y, dict):
            joint = ": " if top else "."
            for key in [*x, *(key for key in y if key not in x)]:
                here = f"{where}{joint}{key}"
                if top and key in skipped:
                    continue
                if key not in y:
                    yield Difference(Level.CONFIG, here, "only in A", _short(x[key]))
                elif key not in x:
                    yield Difference(Level.CONFIG, here, "only in B", "", _short(y[key]))
                else:
                    pending.append((x[key], y[key], here, False))
        elif isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
            pending += [(left, right, f"{where}[{i}]", False) for i, (left, right) in enumerate(zip(x, y, strict=True))]
        elif x != y or type(x) is not type(y):
            yield Difference(Level.CONFIG, where, "other value", _short(x), _short(y))


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
