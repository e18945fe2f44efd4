"""A package of a few kilobytes with a manifest, and the sealing of any folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from support.packages import write_json

from phi4mm_export.package.manifest import SUMS_FILE, FileEntry, Manifest, make_manifest, manifest_documents
from phi4mm_export.package.write import hashed

GRAPH, DATA, TWIN = "graph.onnx", "graph.onnx.data", "sub/twin.onnx"
DATA_NBYTES = 4096


def sealed_package(folder: Path) -> Path:
    """Two graphs, one data file with four weights of 1 KiB, a config and a text, all listed in a manifest."""
    (folder / "sub").mkdir(parents=True)
    rng = np.random.default_rng(0)
    (folder / DATA).write_bytes(rng.integers(0, 256, DATA_NBYTES, np.uint8).tobytes())
    weights = [external(f"w{i}", i * 1024, 1024) for i in range(4)]
    onnx.save(_graph(weights), folder / GRAPH)
    onnx.save(_graph([onnx.numpy_helper.from_array(np.zeros(4, np.float32), "w0")]), folder / TWIN)
    write_json(folder / "settings.json", {"a": 1, "b": [1, 2, 3]})
    (folder / "template.jinja").write_text("{{ m }}", encoding="utf-8")
    seal(folder)
    return folder


def external(name: str, offset: int, length: int, location: str = DATA) -> TensorProto:
    """A float32 weight in the data file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[length // 4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def seal(folder: Path, **parts: Any) -> Manifest:
    """Write the manifest and the checksums of whatever lies in the folder."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    listed = [hashed(folder, name) for name in names if name not in ("phi4mm.json", SUMS_FILE)]
    entries = [FileEntry(name=file.name, size=file.nbytes, sha256=file.sha256) for file in listed]
    manifest = make_manifest(entries, **parts)
    for name, data in manifest_documents(manifest).items():
        (folder / name).write_bytes(data)
    return manifest


def _graph(weights: list[TensorProto]) -> onnx.ModelProto:
    names = [weight.name for weight in weights]
    nodes = [helper.make_node("Sum", names, ["y"])]
    border = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None])
    graph = helper.make_graph(nodes, "g", [], [border], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
