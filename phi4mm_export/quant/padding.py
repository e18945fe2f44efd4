"""Widths that CUDA's fast kernel takes, for hidden layers of other widths.

The kernel wants outputs in multiples of 64 and inputs in whole blocks. Where a product's outputs reach other products
through elementwise operators alone, rows of zero codes more in the one and whole blocks in the others change nothing:
what an activation makes of the added zeros meets weights that are zero. 4304 becomes 4352, for 1.1 percent of bytes.
Source: onnxruntime, contrib_ops/cuda/quantization/matmul_nbits.h (fpA_intB_gemm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phi4mm_export.quant.bias import Bias, BiasPlace
from phi4mm_export.quant.codes import Grid
from phi4mm_export.quant.graph import Graph, subgraphs
from phi4mm_export.quant.sites import Site

if TYPE_CHECKING:
    import onnx

OUTPUTS = 64
"""The fast kernel's outputs come in groups of this many."""
ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Erf", "Tanh", "Sigmoid", "Relu", "Gelu", "FastGelu", "QuickGelu", "Identity"}
)


@dataclass(frozen=True)
class Padding:
    """outputs, inputs: widths after padding by site label; vectors: by name of constant; values: what gets wider."""

    outputs: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, int] = field(default_factory=dict)
    vectors: Mapping[str, int] = field(default_factory=dict)
    values: frozenset[str] = frozenset()


@dataclass
class _Region:
    """What the outputs of one product reach before the next products read it."""

    values: set[str]
    vectors: set[str]
    readers: list[Site]


def plan_padding(graph: Graph, sites: Sequence[Site], grids: Mapping[str, Grid], biases: Mapping[str, Bias]) -> Padding:
    """The products that can be made wider, and all that goes with them."""
    mains = {site.main: site for site in sites if not site.branch}
    outputs: dict[str, int] = {}
    inputs: dict[str, int] = {}
    vectors: dict[str, int] = {}
    values: set[str] = set()
    for site in mains.values():
        region = _region(graph, mains, site)
        if region is None:
            continue
        unit = max(OUTPUTS, *(grids[reader.label].block_size for reader in region.readers))
        width = -(-site.N // unit) * unit
        if width == site.N:
            continue
        bias = biases.get(site.label)
        own = {bias.name} if bias is not None and bias.place is BiasPlace.GEMM else set()
        outputs[site.label] = width
        inputs |= {reader.label: width for reader in region.readers}
        vectors |= dict.fromkeys(region.vectors | own, width)
        values |= region.values
    return Padding(outputs, inputs, vectors, frozenset(values))


def _region(graph: Graph, mains: Mapping[int, Site], site: Site) -> _Region | None:
    """None when anything but elementwise operators and quantized products reads the product."""
    if site.addend and graph.nodes[site.main].op_type == "Gemm" and len(graph.consumers[site.addend]) > 1:
        return None
    region = _Region(set(), set(), [])
    waiting, nodes = [site.output], set[int]()
    while waiting:
        value = waiting.pop()
        if value in region.values:
            continue
        region.values.add(value)
        if value in graph.outputs:
            return None
        for index in graph.consumers.get(value, ()):
            reader, node = mains.get(index), graph.nodes[index]
            if reader is not None and reader.input == value and not reader.flip_input:
                region.readers.append(reader)
                continue
            if node.op_type not in ELEMENTWISE or any(True for _ in subgraphs(node)):
                return None
            nodes.add(index)
            waiting += node.output
    whole = all(_fits(graph, graph.nodes[index], site.N, region) for index in nodes)
    return region if whole and region.readers else None


def _fits(graph: Graph, node: onnx.NodeProto, width: int, region: _Region) -> bool:
    """Whether a node's other inputs are single numbers, or vectors of this width that nothing else reads."""
    for name in node.input:
        if name in region.values or not name:
            continue
        tensor = graph.constants.get(name)
        if tensor is None or name in graph.overridable:
            return False
        if math.prod(tensor.dims) == 1:
            continue
        if list(tensor.dims) != [width] or len(graph.consumers[name]) > 1:
            return False
        region.vectors.add(name)
    return True
