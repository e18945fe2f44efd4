"""Inner values of a graph, read and replaced: the graph is cut in memory and run, nothing is written.

A cut graph keeps its external data where it lies, and only the nodes that the wanted values need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import PackageError
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.runtime.ort import first_line, import_onnxruntime, native_faults
from phi4mm_export.runtime.stepping import PROVIDERS
from phi4mm_export.spec.contract import Provider

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]

DATA_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
"""onnxruntime's session option: where external data of a model in memory lie."""
MADE, SHAPE = "made: ", "shape: "
"""Prefixes of values in a cut graph: what a node makes of a value that its readers get replaced, and its shape."""


class ProbedGraph:
    """One graph file whose inner values can be read."""

    def __init__(self, path: Path, name: str, *, provider: Provider = Provider.CPU, threads: int | None = None) -> None:
        """Raises PackageError, naming `name`, if the file holds no ONNX graph."""
        self.model, self.name = load_graph(path, where=name), name
        self._folder, self._provider, self._threads = path.parent, provider, threads

    def read(
        self, feeds: Mapping[str, Array], names: Sequence[str], replaced: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """The values of those names. Readers of a value in `replaced` get that array instead; its own name then gives
        what the graph makes of it (out of the other replaced values).

        feeds: the graph's inputs. Raises PackageError if onnxruntime refuses the cut graph.
        """
        given = dict(replaced or {})
        wanted = [MADE + name if name in given else name for name in names]
        cut = cut_graph(self.model, wanted, {name: value.dtype for name, value in given.items()})
        values = {**feeds, **given}
        inputs = {value.name for value in cut.graph.input} - {tensor.name for tensor in cut.graph.initializer}
        results = self._run(cut, wanted, {name: values[name] for name in values if name in inputs})
        return dict(zip(names, results, strict=True))

    def shapes(self, feeds: Mapping[str, Array], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """The shapes that those values have for these feeds; the values themselves are not kept."""
        wanted = [SHAPE + name for name in names]
        cut = cut_graph(self.model, wanted, {}, shapes_of=names)
        inputs = {value.name for value in cut.graph.input} - {tensor.name for tensor in cut.graph.initializer}
        results = self._run(cut, wanted, {name: feeds[name] for name in feeds if name in inputs})
        return {name: tuple(int(dim) for dim in shape) for name, shape in zip(names, results, strict=True)}

    def values_read(self, names: Sequence[str], replaceable: Iterable[str]) -> set[str]:
        """The values among `replaceable` that computing `names` reads when all of them are replaced."""
        given = dict.fromkeys(replaceable, np.dtype(np.float32))
        cut = cut_graph(self.model, [MADE + name if name in given else name for name in names], given)
        return {value.name for value in cut.graph.input}.intersection(given)

    def _run(self, cut: onnx.ModelProto, wanted: list[str], feeds: Mapping[str, Array]) -> list[Array]:
        ort = import_onnxruntime("comparing layers", cuda=self._provider is Provider.CUDA)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry(DATA_FOLDER_KEY, str(self._folder))
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        try:
            session = ort.InferenceSession(cut.SerializeToString(), options, providers=[PROVIDERS[self._provider]])
            return [np.asarray(value) for value in session.run(wanted, dict(feeds))]
        except native_faults(ort) as err:
            raise PackageError(f"onnxruntime refuses the cut graph: {first_line(err)}", where=self.name) from err


def cut_graph(
    model: onnx.ModelProto,
    wanted: Sequence[str],
    replaced: Mapping[str, np.dtype[Any]],
    *,
    shapes_of: Sequence[str] = (),
) -> onnx.ModelProto:
    """The part of a model that computes `wanted`; values in `replaced` (with their element types) become inputs, what
    the graph makes of them is called MADE + name. With `shapes_of`, SHAPE + name are those values' shapes."""
    import onnx

    cut = onnx.ModelProto()
    cut.CopyFrom(model)
    graph = cut.graph
    for node in graph.node:
        for index, output in enumerate(node.output):
            if output in replaced:
                node.output[index] = MADE + output
    graph.node.extend(onnx.helper.make_node("Shape", [name], [SHAPE + name]) for name in shapes_of)
    kept, read = _needed(graph, wanted)
    given = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name in read and value.name not in replaced]
    for name, dtype in replaced.items():
        if name in read:
            element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            inputs.append(onnx.helper.make_tensor_value_info(name, element, None))
    weights = [tensor for tensor in graph.initializer if tensor.name in read | set(wanted)]
    result = onnx.ModelProto(
        ir_version=cut.ir_version, opset_import=cut.opset_import, functions=cut.functions, producer_name="phi4mm"
    )
    result.graph.name = "cut"
    result.graph.node.extend(kept)
    result.graph.input.extend([v for v in inputs if v.name not in given or v.name in {t.name for t in weights}])
    result.graph.initializer.extend(weights)
    result.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    return result


def names_read(node: onnx.NodeProto) -> Iterator[str]:
    """The values a node reads, those that its bodies take from outside included (and some that they make)."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            for inner in attribute.g.node:
                yield from names_read(inner)
            yield from (value.name for value in attribute.g.output)


def _needed(graph: onnx.GraphProto, wanted: Iterable[str]) -> tuple[list[onnx.NodeProto], set[str]]:
    """The nodes that `wanted` needs, in the graph's order, and every name they read."""
    needed, read, kept = set(wanted), set[str](), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            names = set(names_read(node))
            needed |= names
            read |= names
    return kept[::-1], read
