"""Components, processors and tokenizer taken unchanged from an existing package (`--from-package`)."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from phi4mm_export.errors import PackageError, UsageError
from phi4mm_export.package.graph_io import load_graph
from phi4mm_export.package.write import WrittenFile, hashed, write_file
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.genai import CONFIG_FILE
from phi4mm_export.spec.json_text import json_bytes, read_object

NOT_COPIED = frozenset({CONFIG_FILE, "phi4mm.json", "SHA256SUMS", "README.md"})
"""Files that describe the whole package: written anew."""


@dataclass(frozen=True)
class BorrowedPackage:
    """An opened package: its config, the files to copy (names relative to it) and their size in bytes."""

    path: Path
    config: dict[str, Any]
    names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return sum((self.path / name).stat().st_size for name in self.names)


def open_borrowed(path: Path, exported: tuple[Component, ...], written: frozenset[str]) -> BorrowedPackage:
    """Read which files of a package belong to the components that are not exported, and its side files.

    exported: components that the export writes; written: the names of the files it writes.
    Raises UsageError for a folder that is no package, PackageError for files that are missing or would collide.
    """
    if not (path / CONFIG_FILE).is_file():
        raise UsageError(
            f"expected a package, found no {CONFIG_FILE} in it", where=str(path), fix="name the folder of a package"
        )
    config = read_object(path / CONFIG_FILE, error=PackageError)
    graphs = {c: str(config.get("model", {}).get(c.value, {}).get("filename", "")) for c in Component}
    of_exported = {name for c, g in graphs.items() if c in exported and g for name in _files_of(path, g, needed=False)}
    names: set[str] = set()
    for component, graph in graphs.items():
        if component not in exported and graph:
            names |= _files_of(path, graph, needed=True)
    for file in sorted(path.iterdir()):
        plain = file.is_file() and not file.name.startswith(".")
        if plain and file.name not in NOT_COPIED | of_exported and not file.name.endswith(".onnx_adapter"):
            names.add(file.name)
    clash = sorted(names & written)
    if clash:
        raise PackageError(
            f"{clash[0]} of the other package is needed by a component that is not exported, and the export writes "
            "a file of that name",
            where=str(path),
            fix="choose the other --layout, or export that component too",
        )
    return BorrowedPackage(path, config, tuple(sorted(names)))


def copy_borrowed(
    borrowed: BorrowedPackage, folder: Path, exported: tuple[Component, ...], ours: dict[str, Any]
) -> list[WrittenFile]:
    """Copy the files and write a genai_config.json whose sections of the exported components are ours."""
    files = []
    for name in borrowed.names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(borrowed.path / name, folder / name)
        files.append(hashed(folder, name))
    config = json.loads(json.dumps(borrowed.config))
    for component in exported:
        config["model"][component.value] = ours["model"][component.value]
    files.append(write_file(folder, CONFIG_FILE, json_bytes(config)))
    return files


def _files_of(package: Path, graph: str, *, needed: bool) -> set[str]:
    """A graph file and the data files that its tensors name, relative to the package."""
    path = package / graph
    if not path.is_file():
        if needed:
            raise PackageError("the graph file is missing", where=f"{CONFIG_FILE}: {graph}")
        return set()
    folder = PurePosixPath(graph).parent
    names = {graph}
    for tensor in load_graph(path, where=graph).graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                names.add(str(folder / entry.value))
    missing = sorted(name for name in names if not (package / name).is_file() or ".." in PurePosixPath(name).parts)
    if missing and needed:
        raise PackageError(f"the data file {missing[0]} is missing", where=graph)
    return names
