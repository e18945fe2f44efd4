"""Element types of every edge of a graph, subgraphs and local functions included, without running or loading it.

Type parameters are bound from the schemas of ONNX Runtime's own tables (which hold com.microsoft), else from the onnx
package; a few operators whose result type is in an attribute are written out.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phi4mm_export.checks.tensors import dtype_name
from phi4mm_export.package.graph_io import graph_io
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.kernel_table import HETEROGENEOUS, Binding, Operator, Parameter, Schema, kernel_table

if TYPE_CHECKING:
    import onnx

DEFAULT_DOMAIN = "ai.onnx"
_MOST_CALLS = 16
"""Deepest nesting of local functions that is followed."""
_MOST_EXPANSIONS = 10_000
"""Most calls of local functions that are followed in one model: functions that call each other grow exponentially."""
Types = MutableMapping[str, str]
"""Edge name -> element type in lower case ("float16"); edges of unknown type are absent."""


@dataclass(frozen=True)
class TypedNode:
    """One node with what is known of its edges; "" stands for an unknown type and for an absent input or output."""

    place: str
    node: onnx.NodeProto
    operator: str
    opset: int | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    schema: Schema | None
    declared: tuple[str, ...] = ()
    """What the graph itself says of the outputs."""

    @property
    def bound(self) -> list[Binding]:
        """Type parameters of the schema and the types the node has there."""
        return bindings(self.schema, self.inputs, self.outputs) if self.schema is not None else []

    @property
    def label(self) -> str:
        """Node name, or operator and first output where it has none."""
        name = self.node.name or f"{self.node.op_type} -> {self.node.output[0] if self.node.output else ''}"
        return f"{self.place}{name}"


def bindings(schema: Schema, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> list[Binding]:
    """(parameter, element type) for every edge whose type is known."""
    sides = ((schema.inputs, inputs), (schema.outputs, outputs))
    return [
        (parameter, dtype)
        for parameters, types in sides
        for index, dtype in enumerate(types)
        if dtype and (parameter := Schema.at(parameters, index)) is not None
    ]


def typed_nodes(model: onnx.ModelProto) -> Iterator[TypedNode]:
    """Every node of the model in its order, a subgraph's nodes before the node that holds them."""
    opsets = {opset.domain or DEFAULT_DOMAIN: int(opset.version) for opset in model.opset_import}
    walker = _Walker(opsets, {(f.domain, f.name): f for f in model.functions})
    yield from walker.nodes(model.graph.node, dict(_declared(model.graph)), "")


def find_operator(name: str) -> Operator | None:
    """The operator in either table: schemas are the same, and one may lack an operator the other has."""
    for provider in Provider:
        operator = kernel_table(provider).get(name)
        if operator is not None:
            return operator
    return None


class _Walker:
    def __init__(self, opsets: Mapping[str, int], functions: Mapping[tuple[str, str], onnx.FunctionProto]) -> None:
        self.opsets, self.functions, self.expansions = opsets, functions, 0

    def nodes(self, nodes: Iterable[onnx.NodeProto], types: Types, place: str, depth: int = 0) -> Iterator[TypedNode]:
        """Nodes in order; their outputs' types are added to `types`."""
        for node in nodes:
            results: list[str] = []
            for name, graph in _subgraphs(node):
                inner = ChainMap({**_declared(graph), **_body_inputs(node, graph, types)}, types)
                yield from self.nodes(graph.node, inner, f"{place}{node.name or node.op_type}/{name}/", depth)
                results = results or _results(node, graph, inner)
            function = self.functions.get((node.domain, node.op_type))
            if function is not None and depth < _MOST_CALLS and self.expansions < _MOST_EXPANSIONS:
                self.expansions += 1
                called: Types = {f: types[a] for f, a in zip(function.input, node.input, strict=False) if a in types}
                yield from self.nodes(function.node, called, f"{place}{node.name or node.op_type}/", depth + 1)
                results = [called.get(output, "") for output in function.output]
            typed = self.node(node, types, results, place)
            for output, dtype in zip(node.output, typed.outputs, strict=True):
                if output and dtype:
                    types[output] = dtype
            if function is None:
                yield typed

    def node(self, node: onnx.NodeProto, types: Types, results: list[str], place: str) -> TypedNode:
        domain = node.domain or DEFAULT_DOMAIN
        name = f"{domain}::{node.op_type}"
        opset = self.opsets.get(domain)
        operator = find_operator(name)
        schema = operator.schema(opset) if operator is not None and opset is not None else None
        if schema is None and opset is not None:
            schema = _onnx_schema(node.op_type, opset, node.domain)
        inputs = tuple(types.get(edge, "") for edge in node.input)
        known = _written_out(node, inputs) or results
        outputs = []
        for index, edge in enumerate(node.output):
            dtype = known[index] if index < len(known) and known[index] else ""
            if edge and not dtype and schema is not None:
                dtype = _output_type(name, operator, schema, inputs, index, opset or 0)
            outputs.append((dtype or types.get(edge, "")) if edge else "")
        declared = tuple(types.get(edge, "") if edge else "" for edge in node.output)
        return TypedNode(place, node, name, opset, inputs, tuple(outputs), schema, declared)


def _results(node: onnx.NodeProto, graph: onnx.GraphProto, inner: Types) -> list[str]:
    """Types of the outputs of a node with a body: those of the body, without Loop's condition."""
    found = [inner.get(output.name, "") for output in graph.output]
    return found[1:] if node.op_type == "Loop" else found


def _declared(graph: onnx.GraphProto) -> Types:
    """Types that the graph states: inputs, outputs, value_info and constants."""
    types: dict[str, str] = {}
    border = graph_io(graph)
    for tensor in (*border.inputs, *border.overridable, *border.outputs):
        types[tensor.name] = tensor.dtype
    for info in graph.value_info:
        if info.type.HasField("tensor_type"):
            types[info.name] = _element(info.type.tensor_type.elem_type)
    for constant in graph.initializer:
        types[constant.name] = dtype_name(constant).lower()
    for sparse in graph.sparse_initializer:
        types[sparse.values.name] = dtype_name(sparse.values).lower()
    return {name: dtype for name, dtype in types.items() if dtype and dtype != "undefined"}


def _element(code: int) -> str:
    import onnx

    known = code in onnx.TensorProto.DataType.values()
    return str(onnx.TensorProto.DataType.Name(code)).lower() if known else ""


def _subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.name, attribute.g
        for index, graph in enumerate(attribute.graphs):
            yield f"{attribute.name}[{index}]", graph


def _body_inputs(node: onnx.NodeProto, graph: onnx.GraphProto, types: Types) -> Types:
    """Types of the formal inputs of a Loop or Scan body, from the node's own inputs."""
    given = [types.get(edge, "") for edge in node.input]
    if node.op_type == "Loop":
        given = ["int64", "bool", *given[2:]]
    found = {value.name: dtype for value, dtype in zip(graph.input, given, strict=False)}
    return {name: dtype for name, dtype in found.items() if dtype}


def _written_out(node: onnx.NodeProto, inputs: tuple[str, ...]) -> list[str]:
    """Result types that no type parameter tells."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    kind = node.op_type
    if kind == "Cast" and "to" in attributes:
        return [_element(attributes["to"].i)]
    if kind == "CastLike" and len(inputs) > 1:
        return [inputs[1]]
    if kind == "Constant":
        return [_constant_type(attributes)]
    if kind == "ConstantOfShape":
        return [dtype_name(attributes["value"].t).lower() if "value" in attributes else "float"]
    if kind in ("EyeLike", "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli"):
        if "dtype" in attributes:
            return [_element(attributes["dtype"].i)]
        return [inputs[0] if inputs else "float"]
    if kind == "QuantizeLinear":
        if "output_dtype" in attributes and attributes["output_dtype"].i:
            return [_element(attributes["output_dtype"].i)]
        return [inputs[2] if len(inputs) > 2 and inputs[2] else "uint8"]
    return []


def _constant_type(attributes: Mapping[str, onnx.AttributeProto]) -> str:
    if "value" in attributes:
        return dtype_name(attributes["value"].t).lower()
    for stem, dtype in (("float", "float"), ("int", "int64"), ("string", "string")):
        if f"value_{stem}" in attributes or f"value_{stem}s" in attributes:
            return dtype
    return ""


def _output_type(
    name: str, operator: Operator | None, schema: Schema, inputs: tuple[str, ...], index: int, opset: int
) -> str:
    """The type of one output: fixed by the schema, bound by the inputs, or the only one any kernel gives."""
    parameter = Schema.at(schema.outputs, index)
    if parameter is None or name in HETEROGENEOUS:
        return ""
    if parameter.fixed is not None:
        return parameter.fixed
    bound = bindings(schema, inputs, ())
    for other, dtype in bound:
        if other.type == parameter.type:
            return dtype
    if operator is None:
        return ""
    choices: set[str] = set()
    for kernel in operator.matching(schema, opset):
        choices |= kernel.types.get(parameter.type, frozenset({"?"}))
    return next(iter(choices)) if len(choices) == 1 and "?" not in choices else ""


def _onnx_schema(op_type: str, opset: int, domain: str) -> Schema | None:
    """A schema of the onnx package in our form; a type parameter with one choice counts as fixed."""
    import onnx

    try:
        schema = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None
    choices = {c.type_param_str: list(c.allowed_type_strs) for c in schema.type_constraints}

    def parameters(formals: list[onnx.defs.OpSchema.FormalParameter]) -> tuple[Parameter, ...]:
        made = []
        for formal in formals:
            allowed = choices.get(formal.type_str, [])
            kind = allowed[0] if len(allowed) == 1 else formal.type_str
            variadic = formal.option == onnx.defs.OpSchema.FormalParameterOption.Variadic
            made.append(Parameter(formal.name, kind, variadic))
        return tuple(made)

    return Schema(schema.since_version, parameters(list(schema.inputs)), parameters(list(schema.outputs)))
