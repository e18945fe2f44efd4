"""Where the rows of a parameter come from: stored, merged with an adapter, scaled, or computed.

Rows are float32, which holds every stored type exactly. Reading is bounded by the rows asked for, and safe from
any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from phi4mm_export.checkpoint.adapters import LoraPair
from phi4mm_export.checkpoint.source import TensorSource
from phi4mm_export.checkpoint.values import check_finite
from phi4mm_export.weights.exact import F32, RightFactor


@dataclass(frozen=True)
class Origin:
    """What decides values: the stored tensors they are made from, and what is done with them (JSON values)."""

    sources: tuple[TensorSource, ...]
    settings: Mapping[str, object]

    def and_then(self, **settings: object) -> Origin:
        """The same, with more settings."""
        return Origin(self.sources, {**self.settings, **settings})


class Rows(Protocol):
    """A matrix [height, width] that is read in bands of rows."""

    @property
    def where(self) -> str:
        """File and tensor, for messages."""

    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def nbytes_read(self) -> int:
        """Bytes of the checkpoint that reading everything takes."""

    @property
    def origin(self) -> Origin:
        """What decides every value."""

    def read(self, start: int, stop: int) -> F32:
        """Rows start .. stop-1, float32 [stop - start, width]. CheckpointError if a value is NaN or infinite."""


@dataclass(frozen=True)
class StoredRows:
    """A stored tensor, times `scale`; a tensor of more than two dimensions is read as [shape[0], the rest]."""

    source: TensorSource
    scale: float = 1.0

    @property
    def where(self) -> str:
        return self.source.where

    @property
    def height(self) -> int:
        return self.source.shape[0] if len(self.source.shape) > 1 else 1

    @property
    def width(self) -> int:
        return self.source.row_size if len(self.source.shape) > 1 else self.source.shape[0]

    @property
    def nbytes_read(self) -> int:
        return self.source.nbytes

    @property
    def origin(self) -> Origin:
        return Origin((self.source,), {"rows": "stored", "scale": self.scale})

    def read(self, start: int, stop: int) -> F32:
        is_matrix = len(self.source.shape) > 1
        stored = self.source.rows(start, stop) if is_matrix else self.source.whole()[None]
        check_finite(stored, self.source)
        wide = stored.astype(np.float32)
        return wide if self.scale == 1.0 else wide * np.float32(self.scale)


class FactorCache:
    """The A matrices read last, as integers, so that the bands of one weight share them; thread-safe and bounded."""

    KEPT = 2
    """The weight being written, and the next one, which another thread may have begun."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, RightFactor] = OrderedDict()
        self._lock = threading.Lock()

    def factor(self, source: TensorSource) -> RightFactor:
        """The A matrix `source`, read when it is not among those kept."""
        with self._lock:
            if source.where not in self._kept:
                self._kept[source.where] = RightFactor.of(StoredRows(source).read(0, source.shape[0]))
                while len(self._kept) > self.KEPT:
                    self._kept.popitem(last=False)
            return self._kept[source.where]


@dataclass(frozen=True)
class MergedRows:
    """W + scale * B A, the product exact and the sum rounded once to float32."""

    base: StoredRows
    pair: LoraPair
    factors: FactorCache = field(default_factory=FactorCache, repr=False, compare=False)

    @property
    def where(self) -> str:
        return self.base.where

    @property
    def height(self) -> int:
        return self.base.height

    @property
    def width(self) -> int:
        return self.base.width

    @property
    def nbytes_read(self) -> int:
        return self.base.nbytes_read + self.pair.a.nbytes + self.pair.b.nbytes

    @property
    def origin(self) -> Origin:
        sources = (self.base.source, self.pair.a, self.pair.b)
        return Origin(sources, {"rows": "merged", "scale": self.base.scale, "adapter_scale": self.pair.scale})

    def read(self, start: int, stop: int) -> F32:
        b = StoredRows(self.pair.b).read(start, stop)
        merged = self.factors.factor(self.pair.a).product(b)
        merged *= self.pair.scale
        merged += self.base.read(start, stop)
        return merged.astype(np.float32)
