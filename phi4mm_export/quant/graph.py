"""An ONNX graph as the quantizer reads it: nodes, constants on demand, who uses what."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import CheckpointError, PackageError, some
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.package.graph_io import FIRST_OVERRIDABLE_IR
from phi4mm_export.package.tensor_bytes import TensorBytes, inlined, safe_bytes

if TYPE_CHECKING:
    import onnx

EXTERNAL_DATA_KEYS = frozenset({"location", "offset", "length", "checksum", "basepath"})
"""What an entry of external data may be called (onnx.proto, TensorProto.external_data; basepath: onnx's reader)."""


@dataclass(frozen=True)
class Graph:
    """The main graph of a model file; its subgraphs are read through their nodes.

    path: its folder is where external data lie. model: without the main graph's initializers. constants: these, by
    name in file order; values of big Constant nodes are among them. overridable: constants a caller may replace.
    consumers: value name -> indices of the main nodes that read it, subgraphs included. sparse: names of the sparse
    initializers, which stay in the model.
    """

    path: Path
    model: onnx.ModelProto
    constants: Mapping[str, onnx.TensorProto]
    overridable: frozenset[str]
    consumers: Mapping[str, tuple[int, ...]] = field(repr=False)
    sparse: frozenset[str] = frozenset()

    @property
    def nodes(self) -> list[onnx.NodeProto]:
        """Main nodes in the file's (topological) order."""
        return list(self.model.graph.node)

    @property
    def inputs(self) -> tuple[str, ...]:
        """What a caller must feed."""
        given = self.sparse.union(self.constants)
        return tuple(value.name for value in self.model.graph.input if value.name not in given)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What a caller gets."""
        return tuple(value.name for value in self.model.graph.output)

    def bytes_of(self, name: str) -> TensorBytes:
        """Where the bytes of a constant lie; of external data nothing is read yet. Raises CheckpointError, also for a
        data file that is missing or too short."""
        with self._readable(name) as tensor:
            found = safe_bytes(tensor, self.path, f"{self.path.name}: {name}")
            found.require_file()
            return found

    @contextlib.contextmanager
    def _readable(self, name: str) -> Iterator[onnx.TensorProto]:
        """The tensor of a constant; what goes wrong with its data file is a CheckpointError."""
        tensor = self.constants[name]
        unknown = sorted({entry.key for entry in tensor.external_data} - EXTERNAL_DATA_KEYS)
        if unknown:  # onnx would only print a warning
            raise CheckpointError(
                f"the external data have the unknown entries {some(map(repr, unknown))}",
                where=f"{self.path.name}: {name}",
                fix="fetch the graph again",
            )
        try:
            yield tensor
        except PackageError as err:
            raise CheckpointError(f"the external data cannot be read: {err.what}", where=err.where) from err
        except OSError as err:
            raise CheckpointError(
                f"the external data cannot be read: {err.strerror or err}", where=f"{self.path.name}: {name}"
            ) from err

    def constant(self, name: str) -> NDArray[Any]:
        """The array of a constant; external data is read now and not kept. Raises CheckpointError."""
        from onnx import numpy_helper

        with self._readable(name) as tensor:
            tensor = inlined(tensor, self.path, f"{self.path.name}: {name}")
        try:
            return np.asarray(numpy_helper.to_array(tensor))
        except KeyError as err:
            raise CheckpointError(
                f"the tensor's element type is number {tensor.data_type}, which ONNX does not know",
                where=f"{self.path.name}: {name}",
            ) from err
        except (ValueError, TypeError) as err:
            raise CheckpointError(
                f"the tensor's data do not fit its shape {list(tensor.dims)}", where=f"{self.path.name}: {name}"
            ) from err


def read_graph(path: Path) -> Graph:
    """The graph of an .onnx file, weights left where they are; big Constant nodes become initializers.

    Raises CheckpointError for a file that holds no ONNX graph, or two constants of one name.
    """
    model = load_graph(path, where=str(path), error=CheckpointError)
    names = Counter(tensor.name for tensor in model.graph.initializer)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise CheckpointError(
            f"{some(twice)} {'is' if len(twice) == 1 else 'are'} stored more than once, expected one tensor a name",
            where=path.name,
            fix="write the graph again",
        )
    _without_constant_inputs(model)
    constants = _take_constants(model.graph)
    return graph_of(path, model, constants)


def _without_constant_inputs(model: onnx.ModelProto) -> None:
    """Bring a graph of IR version 3 or below to version 4, under which a constant need not be an input as well.

    Below version 4 every initializer is listed among the inputs, and no caller may replace one.
    """
    if model.ir_version >= FIRST_OVERRIDABLE_IR:
        return
    constant = {tensor.name for tensor in model.graph.initializer}
    constant |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    fed = [
        type(value).FromString(value.SerializeToString()) for value in model.graph.input if value.name not in constant
    ]
    del model.graph.input[:]
    model.graph.input.extend(fed)
    model.ir_version = FIRST_OVERRIDABLE_IR


def graph_of(path: Path, model: onnx.ModelProto, constants: Mapping[str, onnx.TensorProto]) -> Graph:
    """A parsed model and its constants, with their lookups."""
    given = {value.name for value in model.graph.input}
    users: dict[str, list[int]] = {}
    for index, node in enumerate(model.graph.node):
        for name in sorted(names_read(node)):
            users.setdefault(name, []).append(index)
    consumers = {name: tuple(found) for name, found in users.items()}
    sparse = frozenset(tensor.values.name for tensor in model.graph.sparse_initializer)
    return Graph(path, model, constants, frozenset(given.intersection(constants)), consumers, sparse)


def _take_constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Move initializers and the tensors of Constant nodes out of a graph; no bytes are copied twice."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    del graph.initializer[:]
    kept = []
    for node in graph.node:
        tensor = next((a.t for a in node.attribute if a.name == "value"), None) if node.op_type == "Constant" else None
        if tensor is None or node.domain not in ("", "ai.onnx") or node.output[0] in {o.name for o in graph.output}:
            kept.append(node)
            continue
        tensor.name = node.output[0]
        constants[tensor.name] = tensor
    set_nodes(graph, kept)
    return constants


def set_nodes(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Make these the nodes of a graph."""
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
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


def value_names(graph: onnx.GraphProto) -> set[str]:
    """Names of all values of a graph, those of its bodies included."""
    names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    names.update(tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        names.update(node.output)
        for _, body in subgraphs(node):
            names |= value_names(body)
    return names


def free_ending(names: Iterable[str], taken: set[str]) -> str:
    """What to put behind new names so that none of them is taken: nothing where it can be helped."""
    wanted, ending, number = list(names), "", 1
    while any(name + ending in taken for name in wanted):
        number += 1
        ending = f".{number}"
    return ending
