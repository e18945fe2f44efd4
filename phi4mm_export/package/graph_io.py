"""What crosses the border of an ONNX graph: the names, element types and dims of its inputs and outputs.

Reads the protobuf only; external data is neither opened nor required.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phi4mm_export.errors import PackageError, Phi4mmError
from phi4mm_export.spec.on_disk import exists, is_file, is_folder

if TYPE_CHECKING:
    import onnx

Dim = int | str | None
"""A static dim, the name of a symbolic one, or None for a dim of which nothing is said."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec"


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
    return graph_io(load_graph(path, where=where, error=error).graph)


def load_graph(path: Path, *, where: str | None = None, error: type[Phi4mmError] = PackageError) -> onnx.ModelProto:
    """The model in an .onnx file without its external data.

    Raises as `read_graph_io`, for text that is no UTF-8 too; a pipe or device is not opened.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # protobuf ships no stubs

    place = where or path.name
    try:
        if not is_file(path):  # a pipe would be waited for
            what = "the graph is no plain file" if exists(path) and not is_folder(path) else "the graph file is missing"
            raise error(what, where=place, fix="put the ONNX file there")
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise error("found a Git LFS pointer, expected an ONNX model", where=place, fix="run: git lfs pull")
            file.seek(0)
            model = onnx.load(file, load_external_data=False)
    except FileNotFoundError as err:
        raise error("the graph file is missing", where=place) from err
    except DecodeError as err:
        raise error(
            "not an ONNX model: the protobuf cannot be parsed", where=place, fix="fetch the file again"
        ) from err
    if not model.HasField("graph") or not model.graph.output:
        raise error("not an ONNX model: it has no graph with outputs", where=place, fix="fetch the file again")
    broken = next(_broken_strings(model), None)
    if broken is not None:
        raise error(
            f"not an ONNX model: a {broken} is no UTF-8 text", where=place, fix="fetch the file again, or export again"
        )
    return model


def _broken_strings(message: Any) -> Iterator[str]:
    """Names of the string fields that hold bytes which are no UTF-8; protobuf hands these out as bytes."""
    for field, value in message.ListFields():
        if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
            continue
        single = isinstance(value, str | bytes) or hasattr(value, "ListFields")
        for item in [value] if single else value:
            if field.type == field.TYPE_MESSAGE:
                yield from _broken_strings(item)
            elif isinstance(item, bytes):
                yield str(field.name)


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
