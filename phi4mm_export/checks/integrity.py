"""External data of a package's graphs: every reference stays inside, fits its file, and overlaps nothing by accident.

Judged from the protobuf's headers and the files' sizes alone: no weight is read, except gaps of less than 64 KiB that
are looked at for being zero. Hard links are plain files here; links are allowed where onnxruntime allows them (inside
the graph's folder, or beside the real file of a linked graph).
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.checks.opened import OpenedGraph, OpenedPackage
from phi4mm_export.checks.report import Finding, error, warning
from phi4mm_export.checks.tensors import DataRange, Fault, data_ranges
from phi4mm_export.errors import some
from phi4mm_export.spec.on_disk import is_file, is_inside_name, is_link, real_path

MAX_PADDING = 1 << 16
"""Largest alignment that writers use (the allocation granularity of Windows)."""
PAGE = 4096
"""Alignment that most writers use."""


@dataclass(frozen=True)
class DataFile:
    """One external data file as the graphs see it. `orphaned` counts bytes no tensor refers to, padding left out."""

    file: str
    nbytes: int
    referenced: int
    orphaned: int


def check_integrity(package: OpenedPackage) -> list[Finding]:
    """Findings about the external data of all graphs of the package."""
    return _examine(package)[0]


def data_files(package: OpenedPackage) -> list[DataFile]:
    """The external data files that the graphs refer to and that exist, and stray ones (nothing refers to them)."""
    return _examine(package)[1]


def _examine(package: OpenedPackage) -> tuple[list[Finding], list[DataFile]]:
    findings: list[Finding] = []
    by_file: dict[Path, list[tuple[OpenedGraph, DataRange]]] = {}
    for graph in package.all_graphs():
        good, faults = data_ranges(graph.model)
        findings += _tensor_faults(graph, faults)
        by_location: dict[str, list[DataRange]] = {}
        for item in good:
            by_location.setdefault(item.location, []).append(item)
        for location, ranges in by_location.items():
            path, found = _data_path(package, graph, location, ranges)
            findings += found
            if path is not None:
                by_file.setdefault(path, []).extend((graph, item) for item in ranges)
    files: list[DataFile] = []
    neighbours = _neighbour_spans(package)
    for path, uses in sorted(by_file.items()):
        name, nbytes = _name(package, path), path.stat().st_size
        findings += _overruns(name, nbytes, uses)
        findings += _overlaps(name, uses)
        spans = [(item.offset, item.end) for _, item in uses] + neighbours.get(real_path(path), [])
        used, holes = _coverage(path, nbytes, spans)
        orphaned = sum(stop - start for start, stop in holes)
        files.append(DataFile(name, nbytes, used, orphaned))
        if orphaned:
            findings.append(
                warning(
                    "C220",
                    name,
                    f"{orphaned:,} orphaned bytes: no tensor refers to them",
                    expected=f"{used:,} bytes",
                    found=f"{nbytes:,} bytes, free from {some(f'{start:,} to {stop:,}' for start, stop in holes)}",
                    fix="write the package again; saving external data twice appends instead of replacing",
                )
            )
    stray = _stray(package, by_file)
    for file in stray:
        findings.append(
            warning(
                "C221",
                file.file,
                f"{file.nbytes:,} orphaned bytes: no graph refers to this data file",
                fix="delete it, or put back the graph that it belongs to",
            )
        )
    return findings, files + stray


def _neighbour_spans(package: OpenedPackage) -> dict[Path, list[tuple[int, int]]]:
    """Bytes that graphs beside the one at hand refer to, by data file."""
    spans: dict[Path, list[tuple[int, int]]] = {}
    for graph in package.neighbours:
        for item in data_ranges(graph.model)[0]:
            spans.setdefault(real_path(graph.folder / item.location), []).append((item.offset, item.end))
    return spans


def _tensor_faults(graph: OpenedGraph, faults: Iterable[Fault]) -> Iterator[Finding]:
    grouped: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        grouped.setdefault((fault.code, fault.what), []).append(fault)
    for (code, what), items in grouped.items():
        count = f" ({len(items)} tensors: {some(item.tensor for item in items)})" if len(items) > 1 else ""
        where = f"{graph.file}: {items[0].tensor}"
        yield error(code, where, what + count, expected=items[0].expected, found=items[0].found, fix="export it again")


def _data_path(
    package: OpenedPackage, graph: OpenedGraph, location: str, ranges: list[DataRange]
) -> tuple[Path | None, list[Finding]]:
    """The data file of a location, or None and what is wrong with it."""
    where = f"{graph.file}: {ranges[0].tensor}"
    needed = max(item.end for item in ranges)
    if not is_inside_name(location) or "\\" in location:
        found = error(
            "C202",
            where,
            "the external data location leaves the folder of the graph",
            expected="a relative path without ..",
            found=repr(location),
            fix="do not open this file with other tools; export it again",
        )
        return None, [found]
    path = graph.folder / location
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        hint = _same_size(graph.folder, needed, package)
        found = error(
            "C203",
            f"{graph.file}: {location}",
            f"the data file is missing; {len(ranges):,} tensors lie in it ({some((r.tensor for r in ranges), 3)})",
            expected=f"{location} with at least {needed:,} bytes",
            found="a dangling link" if is_link(path) else "no file",
            fix=f"{hint} has that size: rename it to {location}" if hint else f"put {location} beside the graph",
        )
        return None, [found]
    except OSError as err:
        return None, [error("C204", where, f"the data file cannot be examined: {err.strerror}", found=location)]
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, device or socket"
        return None, [error("C204", where, "the data location is no plain file", expected="a file", found=kind)]
    if not _link_stays(graph, path):
        found = error(
            "C205",
            where,
            "the data file is a link that leaves the folder of the graph",
            expected="a file in the folder of the graph",
            found=f"{location}, a link out of it",
            fix="replace the link by a copy of the file",
        )
        return None, [found]
    return path, []


def _link_stays(graph: OpenedGraph, path: Path) -> bool:
    real = real_path(path)
    homes = {real_path(graph.folder)}
    if is_link(graph.path):
        homes.add(real_path(graph.path).parent)
    return any(real.is_relative_to(home) for home in homes)


def _same_size(folder: Path, needed: int, package: OpenedPackage) -> str:
    """A file of the size the missing one had (up to padding at its end), if just one exists."""
    candidates = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.iterdir())
        if is_file(path) and needed <= path.stat().st_size < needed + MAX_PADDING and path.suffix != ".json"
        if path not in {graph.path for graph in package.all_graphs()}
    ]
    return candidates[0] if len(candidates) == 1 else ""


def _overruns(name: str, nbytes: int, uses: list[tuple[OpenedGraph, DataRange]]) -> Iterator[Finding]:
    beyond = [(graph, item) for graph, item in uses if item.end > nbytes]
    if beyond:
        graph, item = beyond[0]
        yield error(
            "C206",
            f"{graph.file}: {item.tensor}",
            f"{len(beyond):,} tensors reach past the end of {name} ({some(i.tensor for _, i in beyond)})",
            expected=f"{max(i.end for _, i in beyond):,} bytes",
            found=f"{nbytes:,} bytes",
            fix="fetch the data file again, complete",
        )


def _overlaps(name: str, uses: list[tuple[OpenedGraph, DataRange]]) -> Iterator[Finding]:
    """Partial overlaps; identical ranges are shared bytes, as between an embedding table and its tied head."""
    distinct = {(item.offset, item.end): (graph, item) for graph, item in uses if item.end > item.offset}
    ordered = sorted(distinct)
    faults = []
    last: tuple[int, int] | None = None
    for span in ordered:
        if last is not None and span[0] < last[1]:
            faults.append((last, span))
        if last is None or span[1] > last[1]:
            last = span
    if faults:
        first, second = distinct[faults[0][0]], distinct[faults[0][1]]
        yield error(
            "C207",
            f"{second[0].file}: {second[1].tensor}",
            f"its bytes in {name} overlap those of {first[1].tensor} in part ({len(faults):,} such pairs)",
            expected="identical or separate ranges",
            found=f"{second[1].offset:,} to {second[1].end:,} and {first[1].offset:,} to {first[1].end:,}",
            fix="export the graphs again",
        )


def _coverage(path: Path, nbytes: int, spans: list[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """Bytes referred to, and the holes that are no alignment padding."""
    used, position = 0, 0
    holes: list[tuple[int, int]] = []
    for start, stop in [*sorted(spans), (nbytes, nbytes)]:
        start, stop = min(start, nbytes), min(stop, nbytes)
        if start > position and not _is_padding(path, position, start, at_end=start == nbytes):
            holes.append((position, start))
        used += max(0, stop - max(start, position))
        position = max(position, stop)
    return used, holes


def _is_padding(path: Path, start: int, stop: int, *, at_end: bool) -> bool:
    """True for zeros that bring the next tensor, or the end of the file, to a multiple of a power of two.

    Less than a page of zeros counts in any case: a file that was appended to keeps its padding at shifted offsets.
    """
    if stop - start >= MAX_PADDING:
        return False
    aligned = any(-(-start // step) * step == stop for step in _powers(MAX_PADDING))
    if not aligned and (at_end or stop - start >= PAGE):
        return False
    with path.open("rb") as file:
        file.seek(start)
        return not any(file.read(stop - start))


def _powers(limit: int) -> Iterator[int]:
    step = 2
    while step <= limit:
        yield step
        step *= 2


def _stray(package: OpenedPackage, by_file: Mapping[Path, object]) -> list[DataFile]:
    """Files that look like external data and belong to no graph."""
    used = {real_path(path) for path in by_file}
    found = []
    for path in sorted(package.folder.rglob("*.data")) if package.config else []:
        if is_file(path) and real_path(path) not in used:
            nbytes = path.stat().st_size
            found.append(DataFile(_name(package, path), nbytes, 0, nbytes))
    return found


def _name(package: OpenedPackage, path: Path) -> str:
    return path.relative_to(package.folder).as_posix()
