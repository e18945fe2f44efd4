"""Second moments in files: with them, quantization runs no graph, and its bytes do not depend on the machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from phi4mm_export.errors import UsageError
from phi4mm_export.quant.hessian import Moments
from phi4mm_export.quant.stages import Stage
from phi4mm_export.spec.json_fields import shown
from phi4mm_export.spec.json_text import json_bytes, parse_object, read_bytes, refuse_byte_order_mark
from phi4mm_export.spec.on_disk import is_entry

INDEX = "statistics.json"
VERSION = 3
SAVE_AGAIN = "save them again with --save-statistics"


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
        """Write the index; files of an earlier, killed run that these stages do not have go."""
        kept = {self._path(number) for number in range(len(stages))}
        for path in self._folder.glob("*.safetensors"):
            if path not in kept:
                path.unlink()
        names = [[site.label for site in stage.sites] for stage in stages]
        body = {"version": VERSION, "samples": samples, "stages": names}
        (self._folder / INDEX).write_bytes(json_bytes(body))

    @property
    def finished(self) -> bool:
        """Whether a run has kept all of its statistics there: the index comes last."""
        return is_entry(self._folder / INDEX)

    def check(self, labels: Iterable[str] | None = None) -> None:
        """Raise UsageError unless there are statistics of this version, and of these layers if they are known."""
        stages = self._index()["stages"]
        if labels is not None and sorted(label for stage in stages for label in stage) != sorted(labels):
            raise self._of_another_graph()

    def open(self, stages: tuple[Stage, ...]) -> list[str]:
        """Digests of the samples; the statistics must be those of the same layers. Raises UsageError."""
        index = self._index()
        if index["stages"] != [[site.label for site in stage.sites] for stage in stages]:
            raise self._of_another_graph()
        return list(index["samples"])

    def _index(self) -> dict[str, Any]:
        """The index, its form checked."""
        place = str(self._folder / INDEX)
        data = read_bytes(self._folder / INDEX, error=UsageError, where=place)
        refuse_byte_order_mark(data, place, error=UsageError)
        index = parse_object(data, place, error=UsageError)
        if index.get("version") != VERSION:
            raise UsageError(
                f"expected statistics of version {VERSION}, found {shown(index.get('version'))}",
                where=place,
                fix=SAVE_AGAIN,
            )
        stages, samples = index.get("stages"), index.get("samples")
        if not _are_texts(samples) or not isinstance(stages, list) or not all(map(_are_texts, stages)):
            raise UsageError("expected lists of layers and of sample digests", where=place, fix=SAVE_AGAIN)
        return index

    def _of_another_graph(self) -> UsageError:
        return UsageError(
            "the statistics are those of another graph or another choice of layers",
            where=str(self._folder / INDEX),
            fix=SAVE_AGAIN,
        )

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
            raise UsageError(f"the statistics cannot be read: {err}", where=str(path), fix=SAVE_AGAIN) from err

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:05d}.safetensors"


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
