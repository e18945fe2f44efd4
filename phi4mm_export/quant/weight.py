"""The weight of one product, read some outputs at a time: a head of two gigabytes is never whole in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import CheckpointError
from phi4mm_export.quant.graph import Graph
from phi4mm_export.quant.sites import Site
from phi4mm_export.weights.exact import F32

TILE_OUTPUTS = 640
"""Outputs worked on together, at most; decided by the weight alone, so that bytes do not depend on how many workers."""
WHOLE_NBYTES = 64 << 20
"""Weights up to this size are read at once."""


class Weight:
    """The weight as it acts, alpha included. size: K; width: N."""

    def __init__(self, graph: Graph, site: Site) -> None:
        self.size, self.width = site.K, site.N
        self._site = site
        self._place = f"{graph.path.name}: {site.weight}"
        source = graph.bytes_of(site.weight)
        streamed = source.path is not None and source.nbytes > WHOLE_NBYTES
        self._source = source if streamed else None
        self._stored = None if streamed else graph.constant(site.weight)

    def tiles(self, most: int = TILE_OUTPUTS) -> Iterator[slice]:
        """Ranges of outputs that make up the whole."""
        return tiles_of(self.width, most)

    def columns(self, outputs: slice) -> F32:
        """float32 [K, n] of a range of outputs. Raises CheckpointError for values that are not finite."""
        stored = self._read(outputs).astype(np.float32)
        finite = np.isfinite(stored)
        if not finite.all():
            raise CheckpointError(
                f"found values that are NaN or infinite ({int(np.count_nonzero(~finite)):,}), expected finite weights",
                where=self._place,
                fix=f"fetch the graph again, or leave the weight as it is with --exclude {self._site.label!r}",
            )
        acting = stored.T if self._site.transposed else stored
        alpha = self._site.alpha
        return np.ascontiguousarray(acting if alpha == 1.0 else acting * np.float32(alpha))

    def refuse_scales_of_zero(self, scales: NDArray[Any]) -> None:
        """Raise CheckpointError when nothing of the weight is left because its scales became 0 in their type."""
        if scales.any():
            return
        peak = max((float(np.abs(self.columns(outputs)).max()) for outputs in self.tiles()), default=0.0)
        if peak:
            raise CheckpointError(
                f"the largest value is {peak:.3g}, too small for scales in {scales.dtype}",
                where=self._place,
                fix=f"leave the weight as it is with --exclude {self._site.label!r}, or use a graph in float32",
            )

    def _read(self, outputs: slice) -> NDArray[Any]:
        transposed = self._site.transposed
        if self._stored is not None:
            return self._stored[outputs] if transposed else self._stored[:, outputs]
        assert self._source is not None
        if transposed:
            return self._source.rows(outputs.start, outputs.stop, self.size)
        return self._source.columns(outputs.start, outputs.stop, self.width)


def tiles_of(width: int, most: int = TILE_OUTPUTS) -> Iterator[slice]:
    """Ranges that make up the whole: one, or an even number of the same width, so that two workers end together."""
    pairs = -(-width // (2 * most))
    size = width if width <= most else -(-width // (2 * pairs))
    return (slice(start, min(start + size, width)) for start in range(0, width, size))


def side_by_side(weights: Sequence[Weight]) -> F32 | None:
    """All weights of a stage side by side, where they have fewer outputs than inputs: what `moments` is told."""
    if sum(weight.width for weight in weights) >= weights[0].size:
        return None
    return np.concatenate([weight.columns(slice(0, weight.width)) for weight in weights], axis=1)
