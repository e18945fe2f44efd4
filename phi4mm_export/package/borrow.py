"""Components, processors and tokenizer taken unchanged from an existing package (`--from-package`)."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from phi4mm_export.errors import PackageError, UsageError
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.package.detach import detach_data
from phi4mm_export.package.file_names import is_left_over
from phi4mm_export.package.manifest import check_names
from phi4mm_export.package.write import WrittenFile, hashed, write_file
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.genai import CONFIG_FILE
from phi4mm_export.spec.json_text import json_bytes, read_object
from phi4mm_export.spec.on_disk import is_file

NOT_COPIED = frozenset({CONFIG_FILE, "phi4mm.json", "SHA256SUMS", "README.md"})
"""Files that describe the whole package: written anew."""


@dataclass(frozen=True)
class BorrowedPackage:
    """An opened package: its config, the files to copy and the graphs to detach (names relative to it).

    A graph is detached when its tensors lie in a data file whose name the export takes for itself.
    """

    path: Path
    config: dict[str, Any]
    names: tuple[str, ...]
    detached: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that copying takes, at most."""
        shared = {name for graph in self.detached for name in files_of(self.path, graph)}
        return sum((self.path / name).stat().st_size for name in {*self.names, *shared})


def open_borrowed(path: Path, exported: tuple[Component, ...], written: frozenset[str]) -> BorrowedPackage:
    """Read which files of a package belong to the components that are not exported, and its side files.

    exported: components that the export writes; written: the names of the files it writes.
    Raises UsageError for a folder that is no package, PackageError for files that are missing.
    """
    if not is_file(path / CONFIG_FILE):
        raise UsageError(
            f"expected a package, found no {CONFIG_FILE} in it", where=str(path), fix="name the folder of a package"
        )
    config = read_object(path / CONFIG_FILE, error=PackageError)
    graphs = {c: str(config.get("model", {}).get(c.value, {}).get("filename", "")) for c in Component}
    kept = [graph for component, graph in graphs.items() if component not in exported and graph]
    names: set[str] = set()
    detached: list[str] = []
    for graph in kept:
        own = files_of(path, graph)
        if own & written:
            detached.append(graph)
        else:
            names |= own
    left = {name for graph in graphs.values() if graph and is_file(path / graph) for name in files_of(path, graph)}
    for file in sorted(path.iterdir()):
        plain = (
            is_file(file)
            and not file.name.startswith(".")
            and not is_left_over(file.name)
            and not file.name.endswith(".onnx_adapter")
        )
        if plain and file.name not in NOT_COPIED | left:
            names.add(file.name)
    check_names(names)
    return BorrowedPackage(path, config, tuple(sorted(names)), tuple(detached))


def copy_borrowed(
    borrowed: BorrowedPackage, folder: Path, exported: tuple[Component, ...], ours: dict[str, Any]
) -> list[WrittenFile]:
    """Copy the files and write a genai_config.json whose sections of the exported components are ours."""
    files = []
    for name in borrowed.names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(borrowed.path / name, folder / name)
        files.append(hashed(folder, name))
    for graph in borrowed.detached:
        files += detach_data(borrowed.path, graph, folder)
    files.append(write_file(folder, CONFIG_FILE, merged_config(borrowed, exported, ours)))
    return files


def merged_config(borrowed: BorrowedPackage, exported: tuple[Component, ...], ours: dict[str, Any]) -> bytes:
    """The borrowed genai_config.json with our sections of the exported components."""
    config = copy.deepcopy(borrowed.config)
    for component in exported:
        config["model"][component.value] = ours["model"][component.value]
    return json_bytes(config)


def files_of(package: Path, graph: str) -> set[str]:
    """A graph file and the data files that its tensors name, relative to the package.

    Raises PackageError for one that is missing or lies outside the package.
    """
    folder = PurePosixPath(graph).parent
    names = {graph}
    for tensor in load_graph(package / graph, where=f"{CONFIG_FILE}: {graph}").graph.initializer:
        names |= {str(folder / entry.value) for entry in tensor.external_data if entry.key == "location"}
    for name in sorted(names):
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            raise PackageError(f"the data file {name} lies outside the package", where=graph)
        if not is_file(package / name):
            raise PackageError(f"the data file {name} is missing", where=graph)
    return names
