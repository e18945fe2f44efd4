"""Two graphs of one component, layer by layer: where error is made, where it has piled up, what it does to the output.

Layers are found by the names of nodes: everything under `model/layers.0/mlp/down_proj/` is that layer, whatever
operators compute it, so a float graph and a quantized one of the same maker meet. Graphs of different makers share no
names; they are compared at their borders only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.checks.fidelity import fidelity
from phi4mm_export.runtime.probes import ProbedGraph, names_read
from phi4mm_export.weights.rotation import is_rotation

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]
_Values = Mapping[str, Array]

LEAST_ELEMENTS = 16
"""Smaller constants are shapes, axes and epsilons, not weights."""
MAX_NBYTES = 256 << 20
"""Most bytes of inner values that are held of one graph at a time."""
LEAST_SHARED = 2
"""With fewer layers of the same names the graphs come from different makers."""
FLOAT_BITS = {1: 32, 10: 16, 16: 16, 11: 64}
"""Bits by ONNX element type: FLOAT, FLOAT16, BFLOAT16, DOUBLE."""


@dataclass(frozen=True)
class Layer:
    """A layer of one graph: its outputs, the first one its result; bytes of its weights; their fewest bits."""

    name: str
    outputs: tuple[str, ...]
    operator: str
    bits: int
    nbytes: int


@dataclass(frozen=True)
class LayerError:
    """One layer of the package against the float model, relative L2 of its result.

    made: with the float model's own inputs, so what this layer adds; accumulated: with everything before it as the
    package computes it. None where the shapes differ or values are not finite.
    """

    layer: str
    operator: str
    bits: int
    nbytes: int
    nbytes_float: int
    made: float | None
    accumulated: float | None


@dataclass(frozen=True)
class LayerImpact:
    """What one layer alone does: relative L2 of the graph's output when only this layer is the package's."""

    layer: str
    made: float
    impact: float


def find_layers(model: onnx.ModelProto) -> dict[str, Layer]:
    """The layers of a graph with weights of their own, in the order they are computed.

    The matrix by which a graph rotates the inputs of many layers is no weight of theirs.
    """
    weights = {
        tensor.name: tensor
        for tensor in model.graph.initializer
        if _elements(tensor) >= LEAST_ELEMENTS and not is_rotation(tensor.name)
    }
    members: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        folder = _folder(node)
        if folder:
            members[folder] = [*members.pop(folder, []), node]  # a layer stands where its last node stands
    found: dict[str, Layer] = {}
    for folder, nodes in members.items():
        used = [weights[name] for node in nodes for name in names_read(node) if name in weights]
        if used:
            last = nodes[-1]
            main = next(node for node in nodes if any(name in weights for name in names_read(node)))
            bits = min([_bits(node) for node in nodes if _bits(node)] or [_float_bits(used)])
            nbytes = sum(_nbytes(tensor) for tensor in {tensor.name: tensor for tensor in used}.values())
            outputs = tuple(name for name in last.output if name)
            found[folder] = Layer(folder, outputs, main.op_type, bits, nbytes)
    return found


class LayerComparison:
    """A component of the package beside the float model's, fed alike."""

    def __init__(
        self, found: ProbedGraph, expected: ProbedGraph, feeds: Mapping[str, Array], feeds_float: Mapping[str, Array]
    ) -> None:
        """feeds: the inputs of the package's graph; feeds_float: the same of the float graph."""
        self._found, self._expected, self._feeds, self._feeds_float = found, expected, feeds, feeds_float
        there = find_layers(expected.model)
        mine = find_layers(found.model)
        pairs = [(layer, there[name]) for name, layer in mine.items() if name in there]
        self._pairs = [(a, b) for a, b in pairs if len(a.outputs) == len(b.outputs)]

    @property
    def comparable(self) -> bool:
        """Whether the graphs share layers by name."""
        return len(self._pairs) >= LEAST_SHARED

    def errors(self) -> tuple[LayerError, ...]:
        """Every shared layer, in the order it is computed."""
        rows: list[LayerError] = []
        for group in self._groups():
            names = _results(a for a, _ in group)
            border = self._border(names)
            expected = self._expected.read(self._feeds_float, [*_results(b for _, b in group), *border.values()])
            reached = self._found.read(self._feeds, [*names, *border])
            made = self._made(names, border, expected, reached)
            for mine, theirs in group:
                want, got = expected[theirs.outputs[0]], reached[mine.outputs[0]]
                errors = fidelity(made[mine.outputs[0]], want).relative_l2, fidelity(got, want).relative_l2
                rows.append(LayerError(mine.name, mine.operator, mine.bits, mine.nbytes, theirs.nbytes, *errors))
        return tuple(rows)

    def impacts(self, rows: Iterable[LayerError], output_float: str, count: int) -> tuple[LayerImpact, ...]:
        """Of the `count` layers that make the largest errors: what each alone does to that output of the float graph,
        largest first."""
        worst = sorted((row for row in rows if row.made), key=lambda row: -(row.made or 0.0))[:count]
        pairs = {mine.name: (mine, theirs) for mine, theirs in self._pairs}
        want = self._expected.read(self._feeds_float, [output_float])[output_float]
        found: list[LayerImpact] = []
        for row in worst:
            mine, theirs = pairs[row.layer]
            border = self._border(mine.outputs)
            expected = self._expected.read(self._feeds_float, [*theirs.outputs, *border.values()])
            reached = self._found.read(self._feeds, [*mine.outputs, *border])
            made = self._made(mine.outputs, border, expected, reached)
            own = {name: made[a].astype(expected[name].dtype) for a, name in zip(*_both(mine, theirs), strict=True)}
            result = own.get(output_float)
            if result is None:
                result = self._expected.read(self._feeds_float, [output_float], own)[output_float]
            found.append(LayerImpact(row.layer, row.made or 0.0, fidelity(result, want).relative_l2 or 0.0))
        return tuple(sorted(found, key=lambda each: -each.impact))

    def _made(
        self, names: Sequence[str], border: Mapping[str, str], expected: _Values, reached: _Values
    ) -> dict[str, Array]:
        """What the package's layers make of the float model's values at their border."""
        usable = {
            name: expected[theirs].astype(reached[name].dtype)
            for name, theirs in border.items()
            if expected[theirs].shape == reached[name].shape
        }
        return self._found.read(self._feeds, list(names), usable)

    def _border(self, names: Sequence[str]) -> dict[str, str]:
        """The shared values that the package's graph reads to compute `names`: its name -> the float graph's."""
        shared = {a: b for mine, theirs in self._pairs for a, b in zip(*_both(mine, theirs), strict=True)}
        needed = self._found.values_read(names, shared)
        return {name: theirs for name, theirs in shared.items() if name in needed}

    def _groups(self) -> Iterator[list[tuple[Layer, Layer]]]:
        """Layers in order, as many at a time as MAX_NBYTES of results hold, at least one."""
        shapes = self._expected.shapes(self._feeds_float, _results(theirs for _, theirs in self._pairs))
        group: list[tuple[Layer, Layer]] = []
        held = 0
        for mine, theirs in self._pairs:
            nbytes = 4 * int(np.prod(shapes[theirs.outputs[0]], dtype=np.int64))
            if group and held + nbytes > MAX_NBYTES:
                yield group
                group, held = [], 0
            group.append((mine, theirs))
            held += nbytes
        if group:
            yield group


def _both(mine: Layer, theirs: Layer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return mine.outputs, theirs.outputs


def _results(layers: Iterable[Layer]) -> list[str]:
    return [layer.outputs[0] for layer in layers]


def _folder(node: onnx.NodeProto) -> str:
    """The layer a node belongs to: its name without the last part; without such a name, what it makes."""
    return node.name.rpartition("/")[0].lstrip("/") or (node.output[0] if node.output else "")


def _bits(node: onnx.NodeProto) -> int:
    """The bits of a product with codes, the fewest of those in a node's bodies; 0 without any."""
    own = [int(a.i) for a in node.attribute if a.name == "bits"]
    inner = [_bits(each) for a in node.attribute if a.HasField("g") for each in a.g.node]
    return min((bits for bits in (*own, *inner) if bits), default=0)


def _float_bits(tensors: Iterable[onnx.TensorProto]) -> int:
    return min(FLOAT_BITS.get(tensor.data_type, 32) for tensor in tensors)


def _elements(tensor: onnx.TensorProto) -> int:
    return int(np.prod(tensor.dims, dtype=np.int64))


def _nbytes(tensor: onnx.TensorProto) -> int:
    import onnx

    return _elements(tensor) * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
