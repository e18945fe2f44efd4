"""Packages with an error planted in one weight: what blame and gates must find."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx

from phi4mm_export.spec.contract import FILE_NAMES, Component, PackageLayout


def copy_package(source: Path, target: Path) -> Path:
    """A copy to spoil. No hard links: the source is shared with other tests, and onnx refuses linked data files."""
    shutil.copytree(source, target)
    return target


def spoil(package: Path, component: Component, weight: str, share: float, *, seed: int = 0) -> None:
    """Add noise of `share` times its rms to a float weight of a copied package: every weight whose name contains
    `weight`."""
    graph = package / FILE_NAMES[PackageLayout.FLAT][component]
    model = onnx.load(graph, load_external_data=False)
    rng = np.random.default_rng(seed)
    contents: dict[Path, bytearray] = {}
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if weight not in tensor.name or not entries or tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        file = package / entries["location"]
        data = contents.setdefault(file, bytearray(file.read_bytes()))
        values = np.frombuffer(data, np.float32, int(entries["length"]) // 4, int(entries.get("offset", 0)))
        noise = rng.standard_normal(values.size) * share * float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))
        values += noise.astype(np.float32)
    if not contents:
        raise AssertionError(f"no float weight of the {component} is called {weight}")
    for file, data in contents.items():
        file.unlink()
        file.write_bytes(data)
