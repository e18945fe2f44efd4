"""What every calibration reader shares: samples that are checked and hashed once and made again whenever asked for.

One sample is alive at a time, so that eight pictures and eight thousand need the same memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import PackageError, UsageError, some
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.runtime.media import refuse

Array = NDArray[Any]
Feeds = Mapping[str, Array]
"""One sample: graph input name -> array."""


@dataclass(frozen=True)
class SamplePlan:
    """Numbered samples: their names, how to make one, and the sha256 of each, in reading order.

    `notes` say what was passed over; `unreadable` are the faults of files that were left out on request.
    """

    names: tuple[str, ...]
    make: Callable[[int], Feeds]
    digests: tuple[str, ...]
    notes: tuple[str, ...] = ()
    unreadable: tuple[UsageError, ...] = ()


class Samples:
    """onnxruntime's CalibrationDataReader protocol over the samples of a plan."""

    def __init__(self, plan: SamplePlan) -> None:
        if not plan.names:
            raise UsageError("there is no sample to calibrate on", where="--calibration", fix="give at least one")
        self._plan, self._next = plan, 0
        self.names, self.digests = plan.names, plan.digests
        self.notes, self.unreadable = plan.notes, plan.unreadable

    def __len__(self) -> int:
        return len(self.names)

    def sample(self, index: int) -> Feeds:
        """The sample of that number. Raises UsageError if its file changed since it was checked."""
        feeds = self._plan.make(index)
        if digest_of(feeds) != self.digests[index]:
            raise UsageError("the file changed while it was in use", where=self.names[index], fix="run again")
        return feeds

    def get_next(self) -> Feeds | None:
        """The next sample, None after the last."""
        if self._next >= len(self):
            return None
        self._next += 1
        return self.sample(self._next - 1)

    def rewind(self) -> None:
        """Begin again with the first sample."""
        self._next = 0


def subset(reader: Samples, indices: Sequence[int]) -> Samples:
    """Some samples of a reader, in the order of `indices`."""
    return Samples(
        SamplePlan(
            tuple(reader.names[index] for index in indices),
            lambda index: reader.sample(indices[index]),
            tuple(reader.digests[index] for index in indices),
        )
    )


@dataclass(frozen=True)
class GraphInput:
    """One input that a caller must feed: numpy element type, and dims (None where symbolic; None for any shape)."""

    dtype: np.dtype[Any]
    dims: tuple[int | None, ...] | None


def graph_inputs(path: Path, name: str | None = None) -> dict[str, GraphInput]:
    """The inputs of a graph file that have no default, in the graph's order."""
    import onnx

    graph = load_graph(path, where=name).graph
    defaults = {tensor.name for tensor in graph.initializer}
    defaults.update(tensor.values.name for tensor in graph.sparse_initializer)
    return {
        value.name: GraphInput(
            np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)),
            tuple(d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim)
            if value.type.tensor_type.HasField("shape")
            else None,
        )
        for value in graph.input
        if value.name not in defaults
    }


def fit(arrays: Mapping[str, Array], inputs: Mapping[str, GraphInput], graph: str) -> dict[str, Array]:
    """The arrays that the graph declares, in its element types and order. Raises PackageError if one is missing."""
    missing = [name for name in inputs if name not in arrays]
    if missing:
        raise PackageError(
            f"the graph has the inputs {', '.join(missing)}, which the processors do not produce", where=graph
        )
    return {name: np.ascontiguousarray(arrays[name], inputs[name].dtype) for name in inputs}


def digest_of(feeds: Feeds) -> str:
    """sha256 over names, element types, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(feeds):
        array = np.ascontiguousarray(feeds[name])
        digest.update(f"{name} {array.dtype.name} {list(array.shape)}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def checked(
    names: Sequence[str],
    make: Callable[[int], Feeds],
    *,
    skip_unreadable: bool,
    notes: Sequence[str] = (),
) -> SamplePlan:
    """Make every sample once: what cannot be used is known before the first forward pass, and the rest is hashed.

    Raises one UsageError that names all unusable files, unless they are to be skipped and something is left.
    """
    kept: list[int] = []
    digests: list[str] = []
    faults: list[UsageError] = []
    for index in range(len(names)):
        try:
            digests.append(digest_of(make(index)))
            kept.append(index)
        except UsageError as err:
            faults.append(err)
    if faults and not (skip_unreadable and kept):
        refuse(faults)
    left_out = [f"{len(faults):,} of {len(names):,} files left out: {some(map(str, faults))}"] if faults else []
    return SamplePlan(
        tuple(names[index] for index in kept),
        lambda index: make(kept[index]),
        tuple(digests),
        (*notes, *left_out),
        tuple(faults),
    )


def collected(reader: Any, folder: Path) -> Samples:
    """The samples of any object with `get_next()` (and perhaps `rewind()`), stored in `folder` once.

    Raises UsageError for an object without `get_next` and for one that gives no sample or no mapping of arrays.
    """
    if not callable(getattr(reader, "get_next", None)):
        raise UsageError(f"expected a reader with get_next(), found {type(reader).__name__}", where="reader")
    if callable(getattr(reader, "rewind", None)):
        reader.rewind()
    names: list[str] = []
    digests: list[str] = []
    while (feeds := reader.get_next()) is not None:
        name = f"sample {len(names)}"
        if not isinstance(feeds, Mapping) or not feeds:
            raise UsageError(f"expected a mapping of input names to arrays, found {type(feeds).__name__}", where=name)
        arrays = {str(key): np.asarray(value) for key, value in feeds.items()}
        with (folder / f"{len(names):06d}.npz").open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        names.append(name)
        digests.append(digest_of(arrays))

    def make(index: int) -> Feeds:
        with np.load(folder / f"{index:06d}.npz", allow_pickle=False) as stored:
            return {key: stored[key] for key in stored.files}

    return Samples(SamplePlan(tuple(names), make, tuple(digests)))
