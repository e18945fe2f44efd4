"""The place where a product's bias correction goes.

A MatMul is often followed by the Add of a constant: its constant takes the correction. A Gemm has C. All others get
an Add of zeros while the graph is being calibrated; in the result it becomes the bias input of MatMulNBits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.quant.graph import Graph, graph_of
from phi4mm_export.quant.sites import ONNX_DOMAINS, Site

if TYPE_CHECKING:
    import onnx

SUFFIX = ".bias_corrected"


class BiasPlace(StrEnum):
    """Where a site's bias stands."""

    ADD = "add"
    GEMM = "gemm"
    OWN = "own"


@dataclass(frozen=True)
class Bias:
    """The constant of a site's bias: its name in the graph, where it is added, and the value that has it in."""

    name: str
    place: BiasPlace
    result: str


def give_biases(graph: Graph, sites: Sequence[Site]) -> tuple[Graph, Mapping[str, Bias]]:
    """A copy of the graph in which every site has a bias constant of its own, and those constants by site label.

    Sites in bodies of If nodes get none: what runs only sometimes must not shift the mean of what runs always. Nor do
    Gemms whose C is computed or is a matrix. Indices of nodes may differ in the copy.
    """
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    nodes: list[onnx.NodeProto] = list(model.graph.node)
    biases: dict[str, Bias] = {}
    inserted: dict[int, onnx.NodeProto] = {}
    for site in sites:
        if site.branch:
            continue
        node, name = nodes[site.main], site.label + SUFFIX
        adding = _following_add(graph, site)
        if adding is not None:
            index, operand = adding
            values = graph.constant(graph.nodes[index].input[operand])
            nodes[index].input[operand] = name
            biases[site.label] = Bias(name, BiasPlace.ADD, nodes[index].output[0])
        elif node.op_type == "Gemm":
            own = _gemm_addend(graph, site)
            if own is None:
                continue
            values = own
            _set_addend(node, name)
            biases[site.label] = Bias(name, BiasPlace.GEMM, site.output)
        else:
            values = np.zeros(site.N, site.float_type)
            node.output[0] = f"{name}.product"
            inserted[site.main] = onnx.helper.make_node("Add", [node.output[0], name], [site.output])
            biases[site.label] = Bias(name, BiasPlace.OWN, site.output)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(values), name))
    ordered = [n for i, node in enumerate(nodes) for n in ((node, inserted[i]) if i in inserted else (node,))]
    copies = [type(node).FromString(node.SerializeToString()) for node in ordered]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    return graph_of(graph.path, model), biases


def _following_add(graph: Graph, site: Site) -> tuple[int, int] | None:
    """(node, operand) of the Add of a constant [N] that alone reads the site's output."""
    users = graph.consumers.get(site.output, ())
    if len(users) != 1 or site.output in graph.outputs:
        return None
    node = graph.nodes[users[0]]
    if node.op_type != "Add" or node.domain not in ONNX_DOMAINS or list(node.input).count(site.output) != 1:
        return None
    operand = 1 - list(node.input).index(site.output)
    tensor = graph.constants.get(node.input[operand])
    if tensor is None or math.prod(tensor.dims) != site.N or not tensor.dims or tensor.dims[-1] != site.N:
        return None
    return (users[0], operand) if len(tensor.dims) == 1 else None


def _gemm_addend(graph: Graph, site: Site) -> NDArray[Any] | None:
    """beta * C as a vector [N]; None where C is computed or is no vector."""
    if not site.addend or site.beta == 0:
        return np.zeros(site.N, site.float_type)
    tensor = graph.constants.get(site.addend)
    if tensor is None or math.prod(tensor.dims) not in (1, site.N):
        return None
    if len(tensor.dims) > 1 and tensor.dims[-1] != site.N:
        return None
    values = graph.constant(site.addend).reshape(-1).astype(np.float32) * np.float32(site.beta)
    return np.broadcast_to(values, site.N).astype(site.float_type)


def _set_addend(node: onnx.NodeProto, name: str) -> None:
    """Make C the constant `name`, with beta 1."""
    inputs = list(node.input)[:2]
    del node.input[:]
    node.input.extend([*inputs, name])
    kept = [attribute for attribute in node.attribute if attribute.name != "beta"]
    copies = [type(attribute).FromString(attribute.SerializeToString()) for attribute in kept]
    del node.attribute[:]
    node.attribute.extend(copies)
