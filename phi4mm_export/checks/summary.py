"""What a graph or a package is: how its weights are stored, which form its adapters have, what it will take to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phi4mm_export.checks.contract import STATE_NAMES
from phi4mm_export.checks.integrity import DataFile, data_files
from phi4mm_export.checks.opened import OpenedGraph, OpenedPackage
from phi4mm_export.checks.tensors import all_tensors, dtype_name, tensor_nbytes
from phi4mm_export.package.scan import package_files
from phi4mm_export.spec.contract import Component

if TYPE_CHECKING:
    import onnx

_PACKED = {"MatMulNBits": (1, 2, 3), "GatherBlockQuantized": (0, 2, 3)}
"""Operator -> positions of its codes, scales and zero points among the inputs."""
LORA = ".lora_"


@dataclass(frozen=True)
class WeightGroup:
    """Constants stored the same way, e.g. "int8 in blocks of 128", "float16": how many, and their bytes."""

    format: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class GraphSummary:
    """One graph file. `nbytes` is the .onnx file's own size; `data_nbytes` what its tensors take outside it."""

    component: str
    file: str
    nbytes: int
    data_nbytes: int
    nodes: int
    opsets: dict[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    overridable: int
    weights: tuple[WeightGroup, ...]


@dataclass(frozen=True)
class PackageSummary:
    """A whole package. `lora` is gated, branch, adapters, or "merged or none" (a merge leaves no trace)."""

    contract: str
    lora: str
    providers: tuple[str, ...]
    graphs: tuple[GraphSummary, ...]
    data: tuple[DataFile, ...]
    orphaned: int
    files: int
    nbytes: int


def summarize_graph(graph: OpenedGraph) -> GraphSummary:
    """The summary of one graph, from its protobuf alone."""
    tensors = [(name, tensor) for name, tensor in all_tensors(graph.model)]
    outside = sum(tensor_nbytes(t) or 0 for _, t in tensors if t.data_location == t.EXTERNAL)
    return GraphSummary(
        component=graph.component.value if graph.component is not None else "",
        file=graph.file,
        nbytes=graph.path.stat().st_size,
        data_nbytes=outside,
        nodes=sum(1 for _ in all_nodes(graph.model.graph)),
        opsets={opset.domain or "ai.onnx": int(opset.version) for opset in graph.model.opset_import},
        inputs=tuple(str(tensor) for tensor in graph.io.inputs),
        outputs=tuple(str(tensor) for tensor in graph.io.outputs),
        overridable=len(graph.io.overridable),
        weights=_weight_groups(graph.model),
    )


def summarize_package(package: OpenedPackage, contract: str, providers: list[str]) -> PackageSummary:
    """The summary of a package; `contract` is the variant it comes nearest to."""
    data = tuple(data_files(package))
    files = package_files(package.folder)
    return PackageSummary(
        contract=contract,
        lora=lora_form(package),
        providers=tuple(providers) or ("CPU",),
        graphs=tuple(summarize_graph(graph) for graph in package.all_graphs()),
        data=data,
        orphaned=sum(file.orphaned for file in data),
        files=len(files),
        nbytes=sum(files.values()),
    )


def lora_form(package: OpenedPackage) -> str:
    """How the decoder carries its adapters."""
    decoder = package.graphs.get(Component.DECODER)
    if decoder is None:
        return "no decoder"
    if any(name.endswith(STATE_NAMES) for name in decoder.io.input_names):
        return "gated"
    if any(LORA in tensor.name for tensor in decoder.io.overridable):
        return "adapters"
    if any(LORA in name for name, _ in all_tensors(decoder.model)):
        return "branch"
    return "merged or none"


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_nodes(attribute.g)
            for child in attribute.graphs:
                yield from all_nodes(child)


def _weight_groups(model: onnx.ModelProto) -> tuple[WeightGroup, ...]:
    """Constants by storage format, largest group first; the parts of a quantized weight count as one."""
    formats: dict[str, str] = {}
    owners: dict[str, str] = {}
    for node in all_nodes(model.graph):
        positions = _PACKED.get(node.op_type)
        if positions is None:
            continue
        numbers = {attribute.name: int(attribute.i) for attribute in node.attribute}
        label = f"int{numbers.get('bits', 4)} in blocks of {numbers.get('block_size', 128)}"
        for position in positions:
            if position < len(node.input) and node.input[position]:
                formats[node.input[position]] = label
                owners[node.input[position]] = node.input[positions[0]]
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for _, tensor in all_tensors(model):
        label = formats.get(tensor.name) or dtype_name(tensor).lower()
        sizes[label] += tensor_nbytes(tensor) or 0
        if owners.get(tensor.name, tensor.name) == tensor.name:
            counts[label] += 1
    groups = [WeightGroup(label, counts[label], nbytes) for label, nbytes in sizes.items()]
    return tuple(sorted(groups, key=lambda group: (-group.nbytes, group.format)))
