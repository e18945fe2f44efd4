"""Finished layers on disk, so that memory does not grow with layers and a killed run goes on where it stopped."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phi4mm_export.quant.codes import Codes, Grid
from phi4mm_export.quant.settings import Method
from phi4mm_export.weights.exact import F64

_DIGEST_NBYTES = 32
CODE_FOLDERS = ("quant", "weights")
"""The packages whose source decides the bytes of a layer; their digest is the code version."""


@dataclass(frozen=True)
class Outcome:
    """How a layer was quantized, without its codes. bias: what to add to the product, float64 [N]."""

    grid: Grid
    bias: F64
    method: Method
    reason: str
    damp: float
    error_before: float | None
    error_after: float | None
    seconds: float


@dataclass(frozen=True)
class Solved:
    """A quantized weight."""

    codes: Codes
    outcome: Outcome


class FinishedLayers:
    """Layers by label in `folder`; each file begins with the sha256 of the rest and appears by rename.

    A file of another key lies in another folder; a damaged one counts as missing.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder / key[:32]
        self._folder.mkdir(parents=True, exist_ok=True)

    def save(self, label: str, solved: Solved) -> None:
        """Keep one layer."""
        outcome = solved.outcome
        grid = outcome.grid
        facts = {
            "label": label,
            "grid": [grid.bits, grid.block_size, grid.symmetric, grid.scale_type.str, grid.rotation],
            "method": str(outcome.method),
            "reason": outcome.reason,
            "damp": outcome.damp,
            "errors": [outcome.error_before, outcome.error_after],
            "seconds": outcome.seconds,
        }
        arrays: dict[str, Any] = {"codes": solved.codes.codes, "scales": solved.codes.scales, "bias": outcome.bias}
        if solved.codes.zeros is not None:
            arrays["zeros"] = solved.codes.zeros
        arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        stream = io.BytesIO()
        np.savez(stream, **arrays)
        data = stream.getvalue()
        path = self._path(label)
        partial = path.with_suffix(".tmp")
        with partial.open("wb") as handle:
            handle.write(hashlib.sha256(data).digest())
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)

    def load(self, label: str) -> Solved | None:
        """A layer kept earlier, None if there is none or its bytes have changed."""
        try:
            data = self._path(label).read_bytes()
        except FileNotFoundError:
            return None
        head, body = data[:_DIGEST_NBYTES], data[_DIGEST_NBYTES:]
        if hashlib.sha256(body).digest() != head:
            return None
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            facts = json.loads(arrays["facts"].tobytes())
            bits, block_size, symmetric, kind, rotation = facts["grid"]
            grid = Grid(bits, block_size, symmetric, np.dtype(kind), rotation)
            zeros = arrays["zeros"] if "zeros" in arrays.files else None
            codes = Codes(grid, arrays["codes"], arrays["scales"], zeros)
            outcome = Outcome(
                grid,
                arrays["bias"],
                Method(facts["method"]),
                facts["reason"],
                facts["damp"],
                facts["errors"][0],
                facts["errors"][1],
                facts["seconds"],
            )
        return Solved(codes, outcome)

    def _path(self, label: str) -> Path:
        return self._folder / f"{hashlib.sha256(label.encode()).hexdigest()[:32]}.layer"


def content_key(facts: dict[str, Any]) -> str:
    """sha256 over facts and the source of the code that turns them into bytes."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    root = Path(__file__).parent.parent
    for name in CODE_FOLDERS:
        for path in sorted((root / name).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def file_digests(graph_file: Path) -> Iterator[tuple[str, str]]:
    """(name, sha256) of a graph file and of the files its tensors lie in."""
    import onnx
    from onnx import external_data_helper

    model = onnx.load(graph_file, load_external_data=False)
    tensors = [t for t in model.graph.initializer if external_data_helper.uses_external_data(t)]
    names = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    for name in (graph_file.name, *sorted(names)):
        with contextlib.suppress(OSError), (graph_file.parent / name).open("rb") as handle:
            yield name, hashlib.file_digest(handle, "sha256").hexdigest()
