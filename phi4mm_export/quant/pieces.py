"""Pieces of a graph as models of their own, run by onnxruntime with one thread.

Large constants are inputs of a piece, so that no weight is copied and the same session serves float and quantized
weights. Nothing is optimized: every node is computed as it stands, however the graph is cut.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import CheckpointError
from phi4mm_export.quant.graph import Graph, names_read, subgraphs
from phi4mm_export.runtime.ort import first_line, import_onnxruntime, native_faults

if TYPE_CHECKING:
    import onnx

Arrays = Mapping[str, NDArray[Any]]
INLINE_NBYTES = 1 << 10
"""Constants up to this size stay inside a piece (operators may want to know shapes, axes, scales); others are fed."""
CAPTURED = "phi4mm.captured"
"""Output of an If node through which a value of one of its bodies is read."""


class Piece:
    """Some nodes of a graph. `inputs`: what must be fed; `weights`: constants to be fed, large ones and `variable`."""

    def __init__(
        self, graph: Graph, nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], variable: frozenset[str]
    ) -> None:
        self.outputs = tuple(outputs)
        made = {name for node in nodes for name in node.output}
        read = set[str]().union(*(names_read(node) for node in nodes), outputs) - made
        fed = {name for name in read if name in variable or not is_small(graph, name)}
        self._small = [name for name in sorted(read - fed) if name in graph.constants]
        self.weights = tuple(name for name in sorted(fed) if name in graph.constants)
        self._sparse = [t for t in graph.model.graph.sparse_initializer if t.values.name in read]
        self.inputs = tuple(sorted(read.difference(graph.constants, graph.sparse)))
        self._graph, self._nodes = graph, list(nodes)
        self._session: Any = None
        self._lock = threading.Lock()

    def run(self, feeds: Arrays) -> list[NDArray[Any]]:
        """The outputs for one sample. The session is made from the first feeds' element types.

        Raises CheckpointError when onnxruntime refuses the nodes or the inputs.
        """
        onnxruntime = import_onnxruntime("calibrating")
        try:
            session = self._ready(onnxruntime, feeds)
            return [np.asarray(value) for value in session.run(list(self.outputs), dict(feeds))]
        except native_faults(onnxruntime) as err:
            raise CheckpointError(
                f"onnxruntime cannot run this graph on a calibration sample: {first_line(err)}",
                where=self._graph.path.name,
                fix="check the graph with `phi4mm validate`, and the sample's names, shapes and element types",
            ) from err

    def _ready(self, onnxruntime: Any, feeds: Arrays) -> Any:
        """The session; the first of the threads that ask makes it."""
        with self._lock:
            if self._session is None:
                options = onnxruntime.SessionOptions()
                options.intra_op_num_threads = options.inter_op_num_threads = 1
                options.log_severity_level = 4
                options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
                model = self._model(feeds)
                self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            return self._session

    def _model(self, feeds: Arrays) -> bytes:
        import onnx
        from onnx import helper

        source = self._graph.model
        given = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(feeds[name].dtype), [None] * feeds[name].ndim
            )
            for name in (*self.inputs, *self.weights)
        ]
        wanted = [onnx.ValueInfoProto(name=name) for name in self.outputs]
        small = [self._graph.constants[name] for name in self._small]
        body = helper.make_graph(self._nodes, "piece", given, wanted, small, sparse_initializer=self._sparse)
        model = helper.make_model(body, opset_imports=source.opset_import, ir_version=source.ir_version)
        model.functions.extend(source.functions)
        return bytes(model.SerializeToString())


def is_small(graph: Graph, name: str) -> bool:
    """Whether a constant may stand inside a piece."""
    from onnx import external_data_helper

    tensor = graph.constants.get(name)
    if tensor is None:
        return False
    return tensor.ByteSize() <= INLINE_NBYTES and not external_data_helper.uses_external_data(tensor)


def capturing(node: onnx.NodeProto, branch: str, value: str, element: int) -> onnx.NodeProto:
    """A copy of an If node whose only output is a value read in one of its bodies.

    The other body gives an array without rows. element: the ONNX element type of the value.
    """
    import onnx
    from onnx import helper

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.output[:]
    copy.output.append(CAPTURED)
    for attribute, body in subgraphs(copy):
        del body.output[:]
        inner = f"{CAPTURED}.{attribute}"
        body.output.append(onnx.ValueInfoProto(name=inner))
        if attribute == branch:
            body.node.append(helper.make_node("Identity", [value], [inner]))
            continue
        del body.node[:]
        empty = helper.make_tensor(inner, element, [0, 1], [])
        body.node.append(helper.make_node("Constant", [], [inner], value=empty))
    return copy
