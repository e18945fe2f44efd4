"""What crosses the border of an ONNX graph: the names, element types and dims of its inputs and outputs.

Reads the protobuf only; external data is neither opened nor required.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from phi4mm_export.errors import PackageError, Phi4mmError
from phi4mm_export.graphs.onnx_file import load_graph

if TYPE_CHECKING:
    import onnx

FIRST_OVERRIDABLE_IR = 4
"""Version of ONNX's format from which on an initializer that is an input as well is a default to be replaced."""

Dim = int | str | None
"""A static dim, the name of a symbolic one, or None for a dim of which nothing is said."""


@dataclass(frozen=True)
class TensorIo:
    """One input or output. `dtype` is ONNX's name in lower case ("float", "float16", "int64", "bool", ...); a value
    that is no tensor (sequence, map, optional) has the kind's name there. `dims` is None if the graph tells no shape.
    """

    name: str
    dtype: str
    dims: tuple[Dim, ...] | None

    @property
    def rank(self) -> int | None:
        """Number of dims; None if the graph tells no shape."""
        return None if self.dims is None else len(self.dims)

    def dim(self, axis: int) -> Dim:
        """The dim at `axis`; None also when there is no such axis."""
        if self.dims is None or not -len(self.dims) <= axis < len(self.dims):
            return None
        return self.dims[axis]

    def __str__(self) -> str:
        dims = "..." if self.dims is None else ", ".join("?" if dim is None else str(dim) for dim in self.dims)
        return f"{self.name}: {self.dtype} [{dims}]"


@dataclass(frozen=True)
class GraphIo:
    """The border of one graph, in the graph's own order.

    `inputs` are those a caller must feed; `overridable` are inputs that also have an initializer as their default.
    """

    inputs: tuple[TensorIo, ...]
    outputs: tuple[TensorIo, ...]
    overridable: tuple[TensorIo, ...] = ()

    def input(self, name: str) -> TensorIo | None:
        """The input of this name, if any."""
        return _named(self.inputs, name)

    def output(self, name: str) -> TensorIo | None:
        """The output of this name, if any."""
        return _named(self.outputs, name)

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.outputs)


def read_graph_io(path: Path, *, where: str | None = None, error: type[Phi4mmError] = PackageError) -> GraphIo:
    """The border of the graph in an .onnx file. Weights inside the file are read and dropped, others left alone.

    Raises `error` for a missing file, a Git LFS pointer, or bytes that are no ONNX model.
    """
    return model_io(load_graph(path, where=where, error=error))


def model_io(model: onnx.ModelProto) -> GraphIo:
    """The border of a parsed model. Where every initializer has to be an input as well, a caller can replace none."""
    border = graph_io(model.graph)
    return border if model.ir_version >= FIRST_OVERRIDABLE_IR else replace(border, overridable=())


def graph_io(graph: onnx.GraphProto) -> GraphIo:
    """The border of a parsed graph."""
    defaults = {tensor.name for tensor in graph.initializer}
    defaults |= {tensor.values.name for tensor in graph.sparse_initializer}
    given = [_tensor(value) for value in graph.input]
    return GraphIo(
        inputs=tuple(tensor for tensor in given if tensor.name not in defaults),
        outputs=tuple(_tensor(value) for value in graph.output),
        overridable=tuple(tensor for tensor in given if tensor.name in defaults),
    )


def _named(tensors: Iterable[TensorIo], name: str) -> TensorIo | None:
    return next((tensor for tensor in tensors if tensor.name == name), None)


def _tensor(value: onnx.ValueInfoProto) -> TensorIo:
    import onnx

    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return TensorIo(value.name, (kind or "unknown").removesuffix("_type"), None)
    tensor = value.type.tensor_type
    code = tensor.elem_type
    known = code in onnx.TensorProto.DataType.values()
    dtype = onnx.TensorProto.DataType.Name(code).lower() if known else f"element type {code}"
    if not tensor.HasField("shape"):
        return TensorIo(value.name, dtype, None)
    return TensorIo(value.name, dtype, tuple(_dim(dim) for dim in tensor.shape.dim))


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return str(dim.dim_param) or None
