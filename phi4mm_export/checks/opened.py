"""A package as the checks see it: its config, and each graph parsed once, without external data.

Opening never fails on a broken package: what cannot be read becomes a finding, and the checks go on with the rest.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phi4mm_export.checks.report import Finding, error
from phi4mm_export.errors import PackageError
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.package.graph_io import GraphIo, model_io
from phi4mm_export.spec.contract import FILE_NAMES, Component, PackageLayout
from phi4mm_export.spec.json_text import BYTE_ORDER_MARK, parse_object, read_bytes
from phi4mm_export.spec.on_disk import is_file, is_inside_name, real_path

if TYPE_CHECKING:
    import onnx

CONFIG_FILE = "genai_config.json"
NO_CONFIG = "C300"
"""Code of the finding that the config is missing or broken."""
MAX_GRAPH_NBYTES = 2**31 - 1
"""Most bytes a serialized protobuf message can have."""


@dataclass(frozen=True)
class OpenedGraph:
    """One graph file. `file` is its path inside the package, with `/`; `folder` is where its external data lies."""

    file: str
    path: Path
    model: onnx.ModelProto
    io: GraphIo
    component: Component | None = None

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def label(self) -> str:
        """How findings name the graph."""
        return self.file


@dataclass(frozen=True)
class OpenedPackage:
    """A package folder. `config` is {} if genai_config.json is missing or unreadable."""

    folder: Path
    config: Mapping[str, Any]
    graphs: Mapping[Component, OpenedGraph]
    others: tuple[OpenedGraph, ...]
    findings: tuple[Finding, ...]
    neighbours: tuple[OpenedGraph, ...] = ()

    def section(self, name: str) -> Mapping[str, Any]:
        """`model.NAME` of the config; {} where it is absent or no object."""
        model = self.config.get("model")
        value = model.get(name) if isinstance(model, dict) else None
        return value if isinstance(value, dict) else {}

    def mapped(self, key: str, default: str) -> str:
        """The name that a key such as `model.vision.inputs.pixel_values` gives a tensor; `default` without the key."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value if isinstance(value, str) else default

    def all_graphs(self) -> Iterator[OpenedGraph]:
        """The graphs of the config, then the other .onnx files of the folder."""
        yield from self.graphs.values()
        yield from self.others


def open_package(folder: Path) -> OpenedPackage:
    """Parse the config and every graph of a package folder; the folder must exist."""
    findings: list[Finding] = []
    config = _read_config(folder, findings)
    named = _graph_files(folder, config)
    graphs: dict[Component, OpenedGraph] = {}
    for component, file in named.items():
        if not is_inside_name(file):
            continue  # reported by the config checks
        opened = _open_graph(folder, file, findings, component)
        if opened is not None:
            graphs[component] = opened
    known = {real_path(folder / file) for file in named.values() if is_inside_name(file)}
    others = []
    for path in sorted(folder.rglob("*.onnx")):
        if is_file(path) and real_path(path) not in known:
            opened = _open_graph(folder, path.relative_to(folder).as_posix(), findings, None)
            if opened is not None:
                others.append(opened)
    return OpenedPackage(folder, config, graphs, tuple(others), tuple(findings))


def open_file(path: Path) -> OpenedPackage:
    """A single .onnx file as a package without a config. Raises PackageError if it is no ONNX model.

    `neighbours` are the other graphs of its folder: they may share its data files.
    """
    opened = _load(path, path.name, None)
    neighbours = []
    for other in sorted(path.parent.glob("*.onnx")):
        if other.name != path.name and is_file(other):
            found = _open_graph(path.parent, other.name, [], None)
            if found is not None:
                neighbours.append(found)
    return OpenedPackage(path.parent, {}, {}, (opened,), (), tuple(neighbours))


def _read_config(folder: Path, findings: list[Finding]) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        data = read_bytes(path, error=PackageError)
        if data.startswith(BYTE_ORDER_MARK):
            findings.append(
                error(
                    "C301",
                    CONFIG_FILE,
                    "starts with a byte order mark, which the runtime refuses",
                    fix="save the file as UTF-8 without a mark",
                )
            )
        return parse_object(data, CONFIG_FILE, error=PackageError)
    except PackageError as err:
        findings.append(error(NO_CONFIG, CONFIG_FILE, err.what, fix=err.fix))
        return {}


def _graph_files(folder: Path, config: Mapping[str, Any]) -> dict[Component, str]:
    """The file of each component: as the config says, else the first usual name that exists."""
    model = config.get("model")
    files: dict[Component, str] = {}
    for component in Component:
        section = model.get(component.value) if isinstance(model, dict) else None
        if isinstance(section, dict):
            file = section.get("filename")
            if isinstance(file, str) and file:
                files[component] = file
            continue
        usual = [FILE_NAMES[layout][component] for layout in PackageLayout]
        present = next((file for file in usual if is_file(folder / file)), None)
        if present is not None and not isinstance(model, dict):
            files[component] = present
    return files


def _open_graph(folder: Path, file: str, findings: list[Finding], component: Component | None) -> OpenedGraph | None:
    try:
        return _load(folder / file, file, component)
    except FileNotFoundError:
        findings.append(error("C201", file, "the graph file is missing", fix="put the file back"))
    except PackageError as err:
        findings.append(error("C201", file, err.what, fix=err.fix))
    except OSError as err:
        findings.append(error("C201", file, f"the graph cannot be read: {err.strerror or err}"))
    return None


def _load(path: Path, file: str, component: Component | None) -> OpenedGraph:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise PackageError("the graph is no plain file", where=file, fix="put the ONNX file there")
    if status.st_size > MAX_GRAPH_NBYTES:
        raise PackageError(
            f"the graph file has {status.st_size:,} bytes, a protobuf at most {MAX_GRAPH_NBYTES:,}",
            where=file,
            fix="keep the weights in external data",
        )
    model = load_graph(path, where=file)
    return OpenedGraph(file, path, model, model_io(model), component)
