"""Parameters of a graph to tensors of a checkpoint: nothing missing, nothing of another shape.

A parameter's name is its canonical tensor name, so binding is a look-up; what is not a plain copy (integer codes,
an adapter merged or scaled, the tied head, the rotary tables) is decided here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from phi4mm_export.checkpoint.adapters import LoraPair
from phi4mm_export.checkpoint.open import Checkpoint
from phi4mm_export.errors import CheckpointError
from phi4mm_export.graphs.layers import Placement, WeightParameter
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.names import EMBEDDING_TABLE, OUTPUT_HEAD
from phi4mm_export.weights.rows import FactorCache, MergedRows, Rows, StoredRows
from phi4mm_export.weights.streams import Stream, TensorSpec, dense_stream, packed_stream, rope_stream

_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.(?P<role>vision|speech)\.weight")


@dataclass(frozen=True)
class Binder:
    """Gives the rows of a parameter. `merged`: the adapter whose product is added to its base weights, if any."""

    checkpoint: Checkpoint
    merged: Role | None = None
    factors: FactorCache = field(default_factory=FactorCache, repr=False, compare=False)

    def streams(self, model: ir.Model) -> list[Stream]:
        """One Stream per weight of the graph, in the graph's order.

        Raises CheckpointError for a parameter without a tensor or of another size, naming both.
        """
        empty = {v.name: v for v in model.graph.initializers.values() if v.const_value is None}
        made: list[Stream] = []
        for name, value in empty.items():
            if name is None or name.endswith((".scales", "rope.sin_short", "rope.sin_long")):
                continue  # written together with its codes or its cosine
            made.append(self._stream(name, value, empty))
        return made

    def _stream(self, name: str, value: ir.Value, empty: Mapping[str | None, ir.Value]) -> Stream:
        if name.startswith("rope."):
            kind = name.rpartition("_")[2]
            rope = self.checkpoint.config.rope
            factors = rope.long_factor if kind == "long" else rope.short_factor
            return rope_stream(_spec(value), _spec(empty[f"rope.sin_{kind}"]), rope, factors)
        placement = value.placement if isinstance(value, WeightParameter) else None
        if isinstance(value, WeightParameter) and placement is Placement.CODES:
            module = name.removesuffix(".qweight")
            rows = self.rows(f"{module}.weight")
            scales = empty[f"{module}.scales"]
            _check_size(name, (scales.shape or [0])[0], rows.height, rows)
            return packed_stream(
                _spec(value),
                _spec(scales),
                rows,
                bits=value.bits,
                block_size=value.block_size,
                rotation=value.rotation,
            )
        rows, spec = self.rows(name), _spec(value)
        _check_size(name, spec.num_values, rows.height * rows.width, rows)
        return dense_stream(spec, rows, transposed=placement is Placement.TRANSPOSED)

    def rows(self, name: str) -> Rows:
        """The rows of one canonical tensor name, adapters and the tied head resolved."""
        tensors = self.checkpoint.tensors
        lora = _LORA.fullmatch(name)
        if lora:
            pair = self.pair(Role(lora["role"]), lora["module"])
            return StoredRows(pair.a) if lora["side"] == "A" else StoredRows(pair.b, scale=pair.scale)
        if name == OUTPUT_HEAD and self.checkpoint.config.tied_head:
            name = EMBEDDING_TABLE
        if name not in tensors:
            raise CheckpointError(f"the graph needs the tensor {name}, which the checkpoint lacks", where=name)
        base = StoredRows(tensors[name])
        adapter = self.checkpoint.adapters.get(self.merged) if self.merged else None
        merged = adapter.pairs.get(name.removesuffix(".weight")) if adapter else None
        return MergedRows(base, merged, self.factors) if merged else base

    def pair(self, role: Role, module: str) -> LoraPair:
        """One adapter's factors on one module."""
        return self.checkpoint.adapters[role].pairs[module]


def ranks_of(checkpoint: Checkpoint, roles: tuple[Role, ...]) -> dict[str, dict[Role, int]]:
    """Rank of every adapter of `roles` by module."""
    ranks: dict[str, dict[Role, int]] = {}
    for role in roles:
        if role in checkpoint.adapters:
            for module, pair in checkpoint.adapters[role].pairs.items():
                ranks.setdefault(module, {})[role] = pair.a.shape[0]
    return ranks


def _spec(value: ir.Value) -> TensorSpec:
    if value.name is None or value.dtype is None or value.shape is None:
        raise TypeError(f"parameter {value} is not fully declared")
    return TensorSpec(value.name, value.dtype, tuple(int(d) for d in value.shape if isinstance(d, int)))


def _check_size(name: str, wanted: object, found: int, rows: Rows) -> None:
    if wanted != found:
        raise CheckpointError(f"{name} takes {wanted} values here, the checkpoint has {found}", where=rows.where)
