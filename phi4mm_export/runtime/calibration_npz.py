"""Samples stored as .npz files: one file a sample, its keys the inputs of the graph."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import UsageError, some
from phi4mm_export.runtime.calibration_samples import Feeds, GraphInput, Samples, checked, graph_inputs
from phi4mm_export.runtime.calibration_sources import SampleKind, choose, find_files
from phi4mm_export.runtime.media import MAX_NBYTES

_SAFE_CASTS = {"b": "b", "i": "iu", "u": "iu", "f": "f", "V": "f"}
"""Kinds of stored elements by kind of input: floats for floats (V: bfloat16), integers for integers, bool for bool."""
_STORED_BFLOAT16 = np.dtype("V2")
"""What numpy writes for bfloat16, of which its format has no name."""


class NpzReader(Samples):
    """A folder, glob, list or archive of .npz files, in the order of the names; one file is one sample.

    With `graph` (an .onnx file) the keys must be its inputs: element types of the same kind are converted, and ranks
    and fixed dims are checked. Raises UsageError naming every file that does not fit, unless `skip_unreadable`.
    """

    def __init__(
        self,
        source: Path | str,
        graph: Path | str | None = None,
        *,
        num_samples: int | None = None,
        seed: int = 0,
        skip_unreadable: bool = False,
    ) -> None:
        found = find_files(source, SampleKind.ARRAYS)
        files = [found.files[i] for i in choose([file.name for file in found.files], num_samples, seed)]
        inputs = None if graph is None else graph_inputs(Path(graph))

        def make(index: int) -> Feeds:
            arrays = parse_npz(files[index].read(), files[index].name)
            return arrays if inputs is None else _fitted(arrays, inputs, files[index].name)

        passed = [f"{len(found.ignored):,} files passed over: {some(found.ignored)}"] if found.ignored else []
        super().__init__(checked([file.name for file in files], make, skip_unreadable=skip_unreadable, notes=passed))


def parse_npz(data: bytes, name: str) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file. Nothing is unpickled, and no more is allocated than the entries hold.

    Raises UsageError naming the file for bytes that are no .npz, object arrays, and headers that promise other sizes.
    """
    arrays: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                if entry.file_size > MAX_NBYTES:
                    raise UsageError(f"{entry.filename} has {entry.file_size:,} bytes", where=name)
                with archive.open(entry) as file:
                    body = file.read(MAX_NBYTES + 1)
                arrays[entry.filename.removesuffix(".npy")] = _parse_npy(body, entry.filename, name)
    except UsageError:
        raise
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError, NotImplementedError) as err:
        raise UsageError(f"not an .npz file ({err})", where=name, fix="save it with numpy.savez") from err
    if not arrays:
        raise UsageError("the .npz file holds no array", where=name, fix="save it with numpy.savez")
    return arrays


def _parse_npy(body: bytes, entry: str, name: str) -> NDArray[Any]:
    """One .npy entry. Its header is compared with the bytes there are before numpy allocates what it promises."""
    stream = io.BytesIO(body)
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    if dtype.hasobject:
        raise UsageError(f"{entry} holds Python objects, expected numbers", where=name)
    wanted, there = int(np.prod(shape, dtype=object)) * dtype.itemsize, len(body) - stream.tell()
    if wanted != there:
        raise UsageError(f"{entry} holds {there:,} bytes, expected {wanted:,} for {dtype} {list(shape)}", where=name)
    return np.asarray(np.lib.format.read_array(io.BytesIO(body), allow_pickle=False))


def _fitted(arrays: Mapping[str, NDArray[Any]], inputs: Mapping[str, GraphInput], name: str) -> Feeds:
    missing, extra = [key for key in inputs if key not in arrays], [key for key in arrays if key not in inputs]
    if missing or extra:
        parts = [f"{some(missing)} {'is' if len(missing) == 1 else 'are'} missing"] if missing else []
        parts += [f"{some(extra)} {'is' if len(extra) == 1 else 'are'} no input"] if extra else []
        raise UsageError(f"expected the graph's inputs {some(inputs)}: {', '.join(parts)}", where=name)
    return {key: _one(key, arrays[key], inputs[key], name) for key in inputs}


def _one(key: str, array: NDArray[Any], wanted: GraphInput, name: str) -> NDArray[Any]:
    if array.dtype == _STORED_BFLOAT16 and wanted.dtype.kind in "fV":
        array = array.view(ml_dtypes.bfloat16)
    given = array.shape if wanted.dims is None else wanted.dims
    dims = [-1 if dim is None else dim for dim in given]
    fits = array.ndim == len(dims) and all(dim in (-1, size) for dim, size in zip(dims, array.shape, strict=True))
    if not fits:
        shown = ", ".join("any" if dim == -1 else str(dim) for dim in dims)
        raise UsageError(f"{key} has shape {list(array.shape)}, expected [{shown}]", where=name)
    bfloat16 = array.dtype == ml_dtypes.bfloat16
    if array.dtype.kind not in _SAFE_CASTS.get(wanted.dtype.kind, wanted.dtype.kind) and not bfloat16:
        raise UsageError(f"{key} holds {array.dtype}, expected {wanted.dtype}", where=name)
    if (bfloat16 or array.dtype.kind == "f") and not np.isfinite(array).all():
        raise UsageError(f"{key} contains values that are NaN or infinite", where=name)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, wanted.dtype)
