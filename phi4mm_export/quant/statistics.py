"""Second moments in files: with them, quantization runs no graph, and its bytes do not depend on the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from phi4mm_export.errors import UsageError
from phi4mm_export.quant.hessian import Moments
from phi4mm_export.quant.stages import Stage
from phi4mm_export.spec.json_text import json_bytes, read_object

INDEX = "statistics.json"
VERSION = 3


class SavedStatistics:
    """Moments of every stage in a folder: one safetensors file a stage, and an index that names the layers.

    The Hessian is stored as its upper triangle in float32; what a run computes is rounded the same way before use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, number: int, seen: Moments | None) -> None:
        """Keep one stage; None (no token) is kept as a file without a Hessian."""
        from safetensors.numpy import save_file

        arrays: dict[str, Any] = {"tokens": np.array([seen.tokens, seen.paired] if seen else [0, 0], np.int64)}
        if seen is not None:
            rows, columns = np.triu_indices(len(seen.mean))
            arrays |= {"mean": seen.mean, "mean_exact": seen.mean_exact}
            arrays["hessian"] = seen.hessian[rows, columns].astype(np.float32)
            if seen.drift is not None:
                arrays["drift"] = seen.drift.astype(np.float32)
        self._folder.mkdir(parents=True, exist_ok=True)
        save_file(arrays, self._path(number))

    def close(self, stages: tuple[Stage, ...], samples: list[str]) -> None:
        """Write the index."""
        names = [[site.label for site in stage.sites] for stage in stages]
        body = {"version": VERSION, "samples": samples, "stages": names}
        (self._folder / INDEX).write_bytes(json_bytes(body))

    def open(self, stages: tuple[Stage, ...]) -> list[str]:
        """Digests of the samples; the statistics must be those of the same layers. Raises UsageError."""
        index = read_object(self._folder / INDEX, error=UsageError)
        names = [[site.label for site in stage.sites] for stage in stages]
        if index.get("version") != VERSION or index.get("stages") != names:
            raise UsageError(
                "the statistics are those of another graph or another choice of layers",
                where=str(self._folder / INDEX),
                fix="save them again with --save-statistics",
            )
        samples = index.get("samples")
        if not isinstance(samples, list) or not all(isinstance(digest, str) for digest in samples):
            raise UsageError("the list of sample digests is missing", where=str(self._folder / INDEX))
        return samples

    def load(self, number: int, channels: int, outputs: int) -> Moments | None:
        """The moments of a stage with so many outputs in all. Raises UsageError for a missing file or other shapes."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self._path(number)
        try:
            arrays = load_file(path)
            tokens, paired = (int(count) for count in arrays["tokens"])
            if not tokens:
                return None
            hessian = np.zeros((channels, channels))
            rows, columns = np.triu_indices(channels)
            hessian[rows, columns] = arrays["hessian"]
            hessian[columns, rows] = arrays["hessian"]
            drift = arrays["drift"].astype(np.float64) if "drift" in arrays else None
            if drift is not None and drift.shape != (channels, min(channels, outputs)):
                raise ValueError(f"the drift has the shape {list(drift.shape)}")
            return Moments(tokens, paired, arrays["mean_exact"], arrays["mean"], hessian, drift)
        except (OSError, KeyError, ValueError, IndexError, SafetensorError) as err:
            raise UsageError(
                f"the statistics cannot be read: {err}", where=str(path), fix="save them again with --save-statistics"
            ) from err

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:05d}.safetensors"
