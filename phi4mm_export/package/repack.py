"""A data file written anew with the bytes that tensors refer to and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from phi4mm_export.errors import PackageError
from phi4mm_export.package.replace_graph import external_tensors
from phi4mm_export.package.write import CHUNK, PAGE, SMALL_ALIGNMENT

if TYPE_CHECKING:
    import onnx


def repack(package: Path, models: Mapping[str, onnx.ModelProto], data_file: str, target: Path) -> None:
    """Copy what the graphs refer to in `data_file` to the file `target`, and move their references.

    models: graph file -> model, changed in place; identical ranges stay shared. data_file: relative to the package.
    Raises PackageError for ranges that overlap in part or reach past the end.
    """
    uses = list(_uses(models, data_file))
    ranges = sorted({(offset, length) for _, offset, length in uses})
    for (start, length), (following, _) in pairwise(ranges):
        if start + length > following:
            raise PackageError("tensors overlap in part", where=data_file, fix="export the graphs again")
    moved: dict[tuple[int, int], int] = {}
    with (package / data_file).open("rb") as source, target.open("xb") as out:
        for start, length in ranges:
            out.write(bytes(-out.tell() % (PAGE if length >= PAGE else SMALL_ALIGNMENT)))
            moved[start, length] = out.tell()
            source.seek(start)
            left = length
            while left and (piece := source.read(min(CHUNK, left))):
                out.write(piece)
                left -= len(piece)
            if left:
                raise PackageError(f"the file ends {left:,} bytes too early", where=data_file)
    for tensor, offset, length in uses:
        location = next(entry.value for entry in tensor.external_data if entry.key == "location")
        del tensor.external_data[:]
        for key, value in (("location", location), ("offset", moved[offset, length]), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))


def _uses(models: Mapping[str, onnx.ModelProto], data_file: str) -> Iterable[tuple[onnx.TensorProto, int, int]]:
    """(tensor, offset, length) of every tensor that lies in the data file."""
    import onnx

    for file, model in models.items():
        for tensor in external_tensors(model):
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if str(PurePosixPath(file).parent / entries.get("location", "")) == data_file:
                width = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
                try:
                    length = int(entries.get("length") or math.prod(tensor.dims) * width)
                    offset = int(entries.get("offset") or 0)
                except ValueError as err:
                    raise PackageError("offset or length is no number", where=f"{file}: {tensor.name}") from err
                if min(offset, length) < 0 or offset + length >= 2**63:
                    raise PackageError("offset or length is no place in a file", where=f"{file}: {tensor.name}")
                yield tensor, offset, length
