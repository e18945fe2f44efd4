"""The finished graph: products become MatMulNBits, everything else is copied as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from phi4mm_export.graphs.fused import DOMAIN, DOMAIN_VERSION
from phi4mm_export.package.write import DataFile, WrittenFile, write_file
from phi4mm_export.quant.bias import Bias, BiasPlace
from phi4mm_export.quant.codes import Codes, Grid
from phi4mm_export.quant.graph import Graph, free_ending, set_nodes, subgraphs, value_names
from phi4mm_export.quant.padding import Padding
from phi4mm_export.quant.sites import Site
from phi4mm_export.spec.contract import data_file_name
from phi4mm_export.weights.packing import pack
from phi4mm_export.weights.rotation import QUANTIZED_NAME, rotation_matrix
from phi4mm_export.weights.streams import TensorSpec

if TYPE_CHECKING:
    import onnx

INLINE_NBYTES = 1 << 10
"""Tensors up to this size stay inside the graph file."""
_SHAPE, _GROUPS, _MIXED = ".shape", ".groups", ".mixed"


@dataclass(frozen=True)
class Replacement:
    """What takes the place of one site's weight. `load` reads the codes when they are written."""

    site: Site
    grid: Grid
    load: Callable[[], Codes]
    inputs: int = 0
    outputs: int = 0
    """Padded widths; 0 for those of the site."""
    ending: str = ""
    """Behind all new names, where one without it is taken already."""

    @property
    def in_features(self) -> int:
        """Input channels of the node."""
        return self.inputs or self.site.K

    @property
    def out_features(self) -> int:
        """Outputs of the node."""
        return self.outputs or self.site.N

    @property
    def codes_name(self) -> str:
        """MatMulNBits' input B."""
        return f"{self.site.weight}.codes{self.ending}"

    @property
    def scales_name(self) -> str:
        """Its input scales."""
        return f"{self.site.weight}.scales{self.ending}"

    @property
    def zeros_name(self) -> str:
        """Its input zero_points."""
        return f"{self.site.weight}.zeros{self.ending}"

    @property
    def flipped_name(self) -> str:
        """The transposed input."""
        return f"{self.site.weight}.input{self.ending}"

    @property
    def rotated_name(self) -> str:
        """The rotated input, and the beginning of the names of the steps to it."""
        return f"{self.site.input}.rotated{self.grid.rotation}{self.ending}"

    @property
    def matrix_name(self) -> str:
        """The rotation matrix."""
        return f"{QUANTIZED_NAME}{self.grid.rotation}.{self.site.float_type}{self.ending}"

    @property
    def groups_name(self) -> str:
        """The shape of rotated rows."""
        return f"{QUANTIZED_NAME}{self.grid.rotation}.groups{self.ending}"

    @property
    def new_names(self) -> tuple[str, ...]:
        """All of them."""
        steps = [self.rotated_name + step for step in ("", _SHAPE, _GROUPS, _MIXED)]
        names = (self.codes_name, self.scales_name, self.zeros_name, self.flipped_name)
        return (*names, self.matrix_name, self.groups_name, *steps)


def write_quantized(
    graph: Graph,
    replacements: Sequence[Replacement],
    biases: Mapping[str, Bias],
    constants: Mapping[str, NDArray[Any]],
    target: Path,
    *,
    accuracy_level: int,
    padding: Padding | None = None,
) -> tuple[WrittenFile, ...]:
    """Write `target` and its data file. biases: by site label; constants: new values of other float constants.

    Peak memory is one tensor beyond the graph file.
    """
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    padding = padding or Padding()
    _forget_shapes(model.graph, padding.values)
    taken = value_names(model.graph).union(graph.constants)
    ending = free_ending([name for replacement in replacements for name in replacement.new_names], taken)
    wider = [(padding.inputs.get(r.site.label, 0), padding.outputs.get(r.site.label, 0)) for r in replacements]
    replacements = [
        replace(r, inputs=inputs, outputs=outputs, ending=ending)
        for r, (inputs, outputs) in zip(replacements, wider, strict=True)
    ]
    gone = {replacement.site.weight for replacement in replacements}
    for replacement in replacements:
        bias = biases.get(replacement.site.label)
        _replace(model.graph, replacement, bias, accuracy_level)
    _settle(model.graph, replacements, biases)
    model.graph.initializer.extend(_rotation_constants(replacements))
    tensors = [tensor for tensor in graph.constants.values() if tensor.name not in gone]
    data_name = data_file_name(target.name)
    entries: list[onnx.TensorProto] = []
    with (target.parent / data_name).open("xb", buffering=0) as raw:
        out = DataFile(raw, data_name, lambda _count: None)
        for tensor in tensors:
            changed = constants.get(tensor.name)
            if tensor.name in padding.vectors:
                vector = graph.constant(tensor.name) if changed is None else changed
                changed = np.pad(vector, (0, padding.vectors[tensor.name] - len(vector)))
            if changed is not None:
                tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(changed), tensor.name)
            entries.append(_placed(out, graph, tensor, changed))
        for replacement in replacements:
            entries += _write_codes(out, replacement)
        files = [out.finished(data_name)]
    model.graph.initializer.extend(entries)
    if all(entry.domain != DOMAIN for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, DOMAIN_VERSION))
    files.append(write_file(target.parent, target.name, model.SerializeToString(deterministic=True)))
    return tuple(files)


def _placed(out: DataFile, graph: Graph, tensor: onnx.TensorProto, values: NDArray[Any] | None) -> onnx.TensorProto:
    """The tensor, its bytes in the data file unless they are few or of a kind that must stay inside."""
    import onnx
    from onnx import external_data_helper

    inside = not external_data_helper.uses_external_data(tensor)
    strings = tensor.data_type == onnx.TensorProto.STRING
    if strings or (inside and tensor.ByteSize() <= INLINE_NBYTES):
        return onnx.TensorProto.FromString(tensor.SerializeToString())
    spec = TensorSpec(tensor.name, ir.DataType(tensor.data_type), tuple(tensor.dims))
    if values is None and not inside:
        chunks = graph.bytes_of(tensor.name).chunks()
        return _external(out, spec, (np.frombuffer(data, np.uint8) for _, data in chunks))
    return _external(out, spec, [graph.constant(tensor.name) if values is None else values])


def _external(out: DataFile, spec: TensorSpec, pieces: Iterable[NDArray[Any]]) -> onnx.TensorProto:
    import onnx

    out.begin(spec)
    for piece in pieces:
        out.write(piece)
    place = out.placed[spec.name]
    tensor = onnx.TensorProto(name=spec.name, data_type=int(spec.dtype), dims=spec.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    facts = {"location": place.location, "offset": str(place.offset), "length": str(spec.nbytes)}
    for key, value in facts.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def _write_codes(out: DataFile, replacement: Replacement) -> list[onnx.TensorProto]:
    """Codes [N, blocks, block * bits / 8], scales [N, blocks] and packed zero points [N, ceil(blocks * bits / 8)]."""
    codes = _padded(replacement.load(), replacement.in_features, replacement.out_features)
    arrays = {
        replacement.codes_name: packed_codes(codes),
        replacement.scales_name: np.ascontiguousarray(codes.scales.T),
    }
    if codes.zeros is not None:
        arrays[replacement.zeros_name] = packed_zeros(codes)
    return [
        _external(out, TensorSpec(name, ir.DataType.from_numpy(values.dtype), values.shape), [values])
        for name, values in arrays.items()
    ]


def _padded(codes: Codes, size: int, width: int) -> Codes:
    """Codes of more inputs and outputs, all of them zero."""
    grid, (old_size, old_width) = codes.grid, codes.codes.shape
    if (old_size, old_width) == (size, width):
        return codes
    more, blocks = width - old_width, grid.blocks(size) - grid.blocks(old_size)
    zeros = codes.zeros
    if zeros is not None:
        zeros = np.pad(zeros, ((0, blocks), (0, more)), constant_values=grid.half)
        filled = zeros[np.arange(old_size, size) // grid.block_size]
    else:
        filled = np.full((size - old_size, width), grid.half, np.uint8)
    inner = np.pad(codes.codes, ((0, 0), (0, more)), constant_values=grid.half)
    return Codes(grid, np.concatenate([inner, filled]), np.pad(codes.scales, ((0, blocks), (0, more))), zeros)


def _forget_shapes(graph: onnx.GraphProto, values: frozenset[str]) -> None:
    """Values that get wider lose their stated shapes."""
    kept = [value for value in graph.value_info if value.name not in values]
    if len(kept) < len(graph.value_info):
        copies = [type(value).FromString(value.SerializeToString()) for value in kept]
        del graph.value_info[:]
        graph.value_info.extend(copies)


def packed_codes(codes: Codes) -> NDArray[np.uint8]:
    """MatMulNBits' input B: uint8 [N, ceil(K / block), block * bits / 8], padded with the zero point."""
    grid, (size, width) = codes.grid, codes.codes.shape
    padded = np.full((width, grid.blocks(size) * grid.block_size), grid.half, np.uint8)
    padded[:, :size] = codes.codes.T
    return pack(padded.reshape(width, -1, grid.block_size), grid.bits)


def packed_zeros(codes: Codes) -> NDArray[np.uint8]:
    """MatMulNBits' input zero_points: uint8 [N, ceil(blocks * bits / 8)], each row padded to whole bytes."""
    assert codes.zeros is not None
    zeros = np.ascontiguousarray(codes.zeros.T)
    if codes.grid.bits == 8:
        return zeros
    if zeros.shape[1] % 2:
        zeros = np.concatenate([zeros, np.zeros((len(zeros), 1), np.uint8)], axis=1)
    return pack(zeros, codes.grid.bits)


def _replace(graph: onnx.GraphProto, replacement: Replacement, bias: Bias | None, accuracy_level: int) -> None:
    """Turn the site's node into MatMulNBits (with a Transpose before it where the node transposed its input)."""
    import onnx

    site, grid = replacement.site, replacement.grid
    holder = graph if not site.branch else dict(subgraphs(graph.node[site.main]))[site.branch]
    node = holder.node[site.position]
    inside = bias is not None and bias.place is not BiasPlace.ADD
    zeros = "" if grid.symmetric else replacement.zeros_name
    turned = replacement.rotated_name if grid.rotation else site.input
    source = replacement.flipped_name if site.flip_input else turned
    weight = [replacement.codes_name, replacement.scales_name, zeros]
    inputs = [source, *weight, "", bias.name if bias and inside else ""]
    while not inputs[-1]:
        inputs.pop()
    level = {"accuracy_level": accuracy_level} if accuracy_level else {}
    output = bias.result if bias is not None and bias.place is BiasPlace.OWN else site.output
    node.CopyFrom(
        onnx.helper.make_node(
            "MatMulNBits",
            inputs,
            [output],
            name=node.name,
            domain=DOMAIN,
            K=replacement.in_features,
            N=replacement.out_features,
            bits=grid.bits,
            block_size=grid.block_size,
            **level,
        )
    )


def _settle(graph: onnx.GraphProto, replacements: Sequence[Replacement], biases: Mapping[str, Bias]) -> None:
    """Remove the Adds that stood in for a bias input; add a Transpose before nodes that transposed their input."""
    import onnx

    used = [biases[r.site.label] for r in replacements if r.site.label in biases]
    own = {bias.name for bias in used if bias.place is BiasPlace.OWN}
    flipped = {r.site.main: r for r in replacements if r.site.flip_input}
    turned = {r.site.main: r for r in replacements if r.grid.rotation}
    done: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for index, node in enumerate(graph.node):
        if node.op_type == "Add" and own.intersection(node.input):
            continue
        if index in flipped:
            turning = flipped[index]
            output = turning.flipped_name
            nodes.append(onnx.helper.make_node("Transpose", [turning.site.input], [output], perm=[1, 0]))
        if index in turned and turned[index].site.input not in done:
            done.add(turned[index].site.input)
            nodes += _rotation_nodes(turned[index])
        nodes.append(node)
    set_nodes(graph, nodes)


def _rotation_nodes(replacement: Replacement) -> list[onnx.NodeProto]:
    """Rows of `rotation` channels times the rotation, whatever the rank of the input."""
    import onnx

    source, result = replacement.site.input, replacement.rotated_name
    steps = [
        ("Shape", [source], result + _SHAPE),
        ("Reshape", [source, replacement.groups_name], result + _GROUPS),
        ("MatMul", [result + _GROUPS, replacement.matrix_name], result + _MIXED),
        ("Reshape", [result + _MIXED, result + _SHAPE], result),
    ]
    return [onnx.helper.make_node(kind, inputs, [output], name=output) for kind, inputs, output in steps]


def _rotation_constants(replacements: Sequence[Replacement]) -> list[onnx.TensorProto]:
    import onnx

    arrays: dict[str, NDArray[Any]] = {}
    for replacement in replacements:
        size = replacement.grid.rotation
        if size:
            arrays[replacement.matrix_name] = rotation_matrix(size).astype(replacement.site.float_type)
            arrays[replacement.groups_name] = np.array([-1, size], np.int64)
    return [onnx.numpy_helper.from_array(array, name) for name, array in sorted(arrays.items())]
