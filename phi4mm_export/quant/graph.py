"""An ONNX graph as the quantizer reads it: nodes, constants on demand, who uses what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import CheckpointError
from phi4mm_export.package.graph_io import load_graph

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Graph:
    """The main graph of a model file; its subgraphs are read through their nodes.

    constants: initializers and the values of Constant nodes of the main graph that no caller can override.
    """

    path: Path
    """Its folder is where external data lie."""
    model: onnx.ModelProto
    constants: Mapping[str, onnx.TensorProto]
    consumers: Mapping[str, tuple[int, ...]] = field(repr=False)
    """Value name -> indices of the main nodes that read it, subgraphs included."""

    @property
    def nodes(self) -> list[onnx.NodeProto]:
        """Main nodes in the file's (topological) order."""
        return list(self.model.graph.node)

    @property
    def inputs(self) -> tuple[str, ...]:
        """What a caller must feed."""
        given = {tensor.name for tensor in self.model.graph.initializer}
        return tuple(value.name for value in self.model.graph.input if value.name not in given)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What a caller gets."""
        return tuple(value.name for value in self.model.graph.output)

    def constant(self, name: str) -> NDArray[Any]:
        """The array of a constant; external data is read now and not kept. Raises CheckpointError."""
        import onnx
        from onnx import external_data_helper, numpy_helper

        tensor = self.constants[name]
        if external_data_helper.uses_external_data(tensor):
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            tensor = copy
            try:
                external_data_helper.load_external_data_for_tensor(tensor, str(self.path.parent))
            except (OSError, ValueError, onnx.checker.ValidationError) as err:
                raise CheckpointError(
                    f"the external data cannot be read: {str(err).splitlines()[0]}", where=f"{self.path.name}: {name}"
                ) from err
        try:
            return np.asarray(numpy_helper.to_array(tensor))
        except (ValueError, TypeError) as err:
            raise CheckpointError(
                f"the tensor's data do not fit its shape {list(tensor.dims)}", where=f"{self.path.name}: {name}"
            ) from err


def read_graph(path: Path) -> Graph:
    """The graph of an .onnx file, weights left where they are; big Constant nodes become initializers.

    Raises CheckpointError for a file that holds no ONNX graph.
    """
    model = load_graph(path, where=str(path), error=CheckpointError)
    _hoist_constants(model.graph)
    return graph_of(path, model)


def graph_of(path: Path, model: onnx.ModelProto) -> Graph:
    """A parsed model with its lookups; `path` is where its external data lie."""
    overridable = {value.name for value in model.graph.input}
    constants = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name not in overridable}
    users: dict[str, list[int]] = {}
    for index, node in enumerate(model.graph.node):
        for name in sorted(names_read(node)):
            users.setdefault(name, []).append(index)
    return Graph(path, model, constants, {name: tuple(found) for name, found in users.items()})


def _hoist_constants(graph: onnx.GraphProto) -> None:
    """Constant nodes with a tensor become initializers: the same value in the place where weights are looked for."""
    kept = []
    for node in graph.node:
        tensor = next((a.t for a in node.attribute if a.name == "value"), None) if node.op_type == "Constant" else None
        if tensor is None or node.domain not in ("", "ai.onnx"):
            kept.append(node)
            continue
        added = graph.initializer.add()
        added.CopyFrom(tensor)
        added.name = node.output[0]
    if len(kept) < len(graph.node):
        copies = [type(node).FromString(node.SerializeToString()) for node in kept]
        del graph.node[:]
        graph.node.extend(copies)


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """(attribute name, graph) of a node's bodies."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.name, attribute.g
        for graph in attribute.graphs:
            yield attribute.name, graph


def names_read(node: onnx.NodeProto) -> set[str]:
    """Values a node reads from the graph it stands in: its inputs, and what its bodies take from outside."""
    names = {name for name in node.input if name}
    for _, graph in subgraphs(node):
        names |= outer_names(graph)
    return names


def outer_names(graph: onnx.GraphProto) -> set[str]:
    """Values a body reads from the graphs around it."""
    own = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    read = {value.name for value in graph.output}
    for node in graph.node:
        read |= names_read(node)
        own.update(node.output)
    return read - own
