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

from phi4mm_export.quant.graph import Graph, free_ending, graph_of, names_read, set_nodes, value_names
from phi4mm_export.quant.sites import ONNX_DOMAINS, Site

if TYPE_CHECKING:
    import onnx

SUFFIX, PRODUCT = ".bias_corrected", ".product"


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


def give_biases(graph: Graph, sites: Sequence[Site], *, all_sites: bool = True) -> tuple[Graph, Mapping[str, Bias]]:
    """A copy of the graph in which every site has a bias constant of its own, and those constants by site label.

    Sites in bodies of If nodes get none: what runs only sometimes must not shift the mean of what runs always.
    all_sites: without it only Gemms that have a C get one. Indices of nodes may differ in the copy.
    """
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    nodes: list[onnx.NodeProto] = list(model.graph.node)
    constants = dict(graph.constants)
    biases: dict[str, Bias] = {}
    inserted: dict[int, onnx.NodeProto] = {}
    names = [site.label + SUFFIX for site in sites]
    ending = free_ending([*names, *(name + PRODUCT for name in names)], value_names(model.graph).union(constants))
    for site in sites:
        if site.branch or not (all_sites or site.addend):
            continue
        node, name = nodes[site.main], site.label + SUFFIX + ending
        adding = _following_add(graph, site)
        if adding is not None:
            index, operand = adding
            values = graph.constant(graph.nodes[index].input[operand])
            nodes[index].input[operand] = name
            biases[site.label] = Bias(name, BiasPlace.ADD, nodes[index].output[0])
        elif node.op_type == "Gemm":
            values = _gemm_addend(graph, site)
            _set_addend(node, name)
            biases[site.label] = Bias(name, BiasPlace.GEMM, site.output)
        else:
            values = np.zeros(site.N, site.float_type)
            node.output[0] = site.label + SUFFIX + PRODUCT + ending
            inserted[site.main] = onnx.helper.make_node("Add", [node.output[0], name], [site.output])
            biases[site.label] = Bias(name, BiasPlace.OWN, site.output)
        constants[name] = onnx.numpy_helper.from_array(np.ascontiguousarray(values), name)
    set_nodes(
        model.graph, [n for i, node in enumerate(nodes) for n in ((node, inserted[i]) if i in inserted else (node,))]
    )
    return graph_of(graph.path, model, _used(constants, model.graph)), biases


def _used(constants: Mapping[str, onnx.TensorProto], graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Without the vectors that nothing reads any more."""
    read = {value.name for value in graph.output}.union(*(names_read(node) for node in graph.node))
    overridable = {value.name for value in graph.input}
    return {name: tensor for name, tensor in constants.items() if name in read or name in overridable}


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


def _gemm_addend(graph: Graph, site: Site) -> NDArray[Any]:
    """beta * C as a vector [N]."""
    if not site.addend or site.beta == 0:
        return np.zeros(site.N, site.float_type)
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
