"""What a decoder graph shows about its cache and its rotary tables, read from the nodes without running them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

ATTENTION = "GroupQueryAttention"
_COS_CACHE = 7
"""Position of cos_cache among the inputs of GroupQueryAttention."""
_COMPARISONS = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_MOST_STEPS = 8
"""How far back a table or a condition is followed; exporters need two to four steps."""


@dataclass(frozen=True)
class DecoderFacts:
    """None where the graph does not show it.

    cache_operator: the operator that writes present.0.key; num_heads: query heads of the attention nodes;
    switch: total length beyond which another rotary table applies; longest: rows of the longest rotary table.
    """

    cache_operator: str | None = None
    num_heads: int | None = None
    switch: int | None = None
    longest: int | None = None


def decoder_facts(model: onnx.ModelProto, present_key: str) -> DecoderFacts:
    """The facts of a decoder whose first present key has this name."""
    producers = {output: node for node in model.graph.node for output in node.output if output}
    writer = producers.get(present_key)
    attention = next((node for node in model.graph.node if node.op_type == ATTENTION), None)
    heads = switch = longest = None
    if attention is not None:
        heads = next((int(attribute.i) for attribute in attention.attribute if attribute.name == "num_heads"), None)
        table = attention.input[_COS_CACHE] if len(attention.input) > _COS_CACHE else ""
        chooser = producers.get(table)
        if chooser is not None and chooser.op_type == "If":
            switch = _compared_number(chooser.input[0], producers, _scalars(model.graph))
        longest = max(_table_rows(table, producers, _rows(model.graph)), default=None)
    return DecoderFacts(writer.op_type if writer is not None else None, heads, switch, longest)


def _compared_number(condition: str, producers: Mapping[str, onnx.NodeProto], scalars: Mapping[str, int]) -> int | None:
    """The constant that the condition of the table switch compares the total length with."""
    for _ in range(_MOST_STEPS):
        node = producers.get(condition)
        if node is None or not node.input:
            return None
        if node.op_type in _COMPARISONS:
            return next((scalars[name] for name in node.input if name in scalars), None)
        condition = node.input[0]
    return None


def _table_rows(
    table: str, producers: Mapping[str, onnx.NodeProto], rows: Mapping[str, int], steps: int = _MOST_STEPS
) -> Iterator[int]:
    """Rows of the 2-D constants that a table is cut from or chosen from."""
    if table in rows:
        yield rows[table]
        return
    node = producers.get(table)
    if node is None or steps == 0:
        return
    if node.op_type != "If":
        if node.input:
            yield from _table_rows(node.input[0], producers, rows, steps - 1)
        return
    position = list(node.output).index(table)
    for attribute in node.attribute:
        if attribute.HasField("g") and position < len(attribute.g.output):
            inner = {output: child for child in attribute.g.node for output in child.output if output}
            known = {**rows, **_rows(attribute.g)}
            yield from _table_rows(attribute.g.output[position].name, {**producers, **inner}, known, steps - 1)


def _rows(graph: onnx.GraphProto) -> dict[str, int]:
    found = {tensor.name: int(tensor.dims[0]) for tensor in graph.initializer if len(tensor.dims) == 2}
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value" and len(attribute.t.dims) == 2:
                found[node.output[0]] = int(attribute.t.dims[0])
    return found


def _scalars(graph: onnx.GraphProto) -> dict[str, int]:
    """Whole-number constants of one element."""
    found: dict[str, int] = {}
    for tensor in graph.initializer:
        value = _scalar(tensor)
        if value is not None:
            found[tensor.name] = value
    for node in graph.node:
        if node.op_type == "Constant" and node.output:
            for attribute in node.attribute:
                value = _scalar(attribute.t) if attribute.name == "value" else None
                if attribute.name in ("value_int",):
                    value = int(attribute.i)
                if value is not None:
                    found[node.output[0]] = value
    return found


def _scalar(tensor: onnx.TensorProto) -> int | None:
    if tensor.data_type not in (tensor.INT64, tensor.INT32) or list(tensor.dims) not in ([], [1]):
        return None
    if tensor.raw_data:
        return int.from_bytes(tensor.raw_data, "little", signed=True)
    values = tensor.int64_data or tensor.int32_data
    return int(values[0]) if values else None
