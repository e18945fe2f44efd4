"""Calibration samples: read once, named by digest, put into an order of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import UsageError, some
from phi4mm_export.quant.settings import CalibrationReader


def collect(
    reader: CalibrationReader, inputs: Sequence[str], store: Callable[[int, Mapping[str, NDArray[Any]]], None]
) -> list[str]:
    """Hand every sample to `store` with its number; -> their digests, in the reader's order.

    Raises UsageError for a reader without samples, or a sample that lacks an input of the graph.
    """
    rewind = getattr(reader, "rewind", None)
    if rewind is not None:
        rewind()
    digests: list[str] = []
    while (sample := reader.get_next()) is not None:
        missing = [name for name in inputs if name not in sample]
        if missing:
            raise UsageError(
                f"calibration sample {len(digests) + 1} has no array for the graph's input {some(missing)}",
                where=f"found {some(sorted(sample)) or 'nothing'}",
                fix="name the arrays after the graph's inputs",
            )
        arrays = {name: np.asarray(sample[name]) for name in inputs}
        digests.append(digest_of(arrays))
        store(len(digests) - 1, arrays)
    if not digests:
        raise UsageError("the calibration reader gave no sample", fix="check the folder or list; rewind a used reader")
    return digests


def digest_of(sample: Mapping[str, NDArray[Any]]) -> str:
    """sha256 over names, element types, shapes and bytes, whatever the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(sample):
        value = np.ascontiguousarray(sample[name])
        digest.update(f"{name}\0{value.dtype.str}\0{value.shape}\0".encode())
        digest.update(value.reshape(-1).view(np.uint8).data if value.size else b"")
    return digest.hexdigest()


def calibration_order(digests: Sequence[str]) -> list[int]:
    """Numbers of the samples by rising digest: the order of files changes nothing."""
    return sorted(range(len(digests)), key=lambda number: (digests[number], number))
