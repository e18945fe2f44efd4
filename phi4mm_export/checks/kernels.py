"""Every node of a package's graphs has a kernel for its element types on the execution provider it is meant for.

On the CPU a float16 node without a kernel still runs: onnxruntime inserts casts and uses the float kernel; bfloat16
without a kernel fails when the session is made. On CUDA a node without a kernel falls back to the CPU, with copies
around it at every step; that counts as an error here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phi4mm_export.checks.element_types import TypedNode, find_operator, typed_nodes
from phi4mm_export.checks.kernel_limits import constants, limit_faults
from phi4mm_export.checks.opened import OpenedGraph, OpenedPackage
from phi4mm_export.checks.report import Finding, error, note
from phi4mm_export.errors import some
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.kernel_table import HETEROGENEOUS, Binding, Kernel, kernel_table, table_version

if TYPE_CHECKING:
    import onnx

_NO_KERNEL_NEEDED = frozenset({"ai.onnx::Constant"})
"""Folded into initializers when the model is loaded."""


@dataclass
class _Tally:
    """Nodes of one graph by what was found, gathered so that one finding speaks for many nodes."""

    missing: dict[tuple[str, str], list[TypedNode]] = field(default_factory=dict)
    mixed: dict[tuple[str, str], list[TypedNode]] = field(default_factory=dict)
    unknown: dict[str, list[TypedNode]] = field(default_factory=dict)
    cast: dict[str, int] = field(default_factory=dict)


def check_kernels(package: OpenedPackage, provider: Provider) -> Iterator[Finding]:
    """Findings about the nodes of the package's own graphs on one provider."""
    graphs = list(package.graphs.values()) or list(package.others)
    for graph in graphs:
        yield from check_graph_kernels(graph, provider)


def check_graph_kernels(graph: OpenedGraph, provider: Provider) -> Iterator[Finding]:
    """Findings about the nodes of one graph."""
    tally = _Tally()
    known = constants(graph.model)
    limits: dict[str, list[str]] = {}
    for node in typed_nodes(graph.model):
        _judge(node, provider, tally)
        for fault in limit_faults(node, known):
            limits.setdefault(fault, []).append(node.label)
    yield from _tally_findings(graph, provider, tally)
    for fault, labels in limits.items():
        count = f" ({len(labels)} nodes)" if len(labels) > 1 else ""
        yield error("C604", f"{graph.file}: {labels[0]}", fault + count, fix="export the graph again")
    yield from _slow_int8(graph, provider)


def has_kernel(node: TypedNode, provider: Provider, *, float16_as: str = "float16") -> bool:
    """Whether some kernel takes the node's element types; `float16_as` replaces float16 (the inserted casts)."""
    operator = kernel_table(provider).get(node.operator)
    if operator is None or node.schema is None or node.opset is None:
        return False
    schema = operator.schema(node.opset)
    if schema is None:
        return False
    bound: list[Binding] = [(p, float16_as if dtype == "float16" else dtype) for p, dtype in node.bound]
    kernels: list[Kernel] = operator.matching(schema, node.opset)
    return any(kernel.accepts(bound) for kernel in kernels)


def _judge(node: TypedNode, provider: Provider, tally: _Tally) -> None:
    if node.operator in _NO_KERNEL_NEEDED:
        return
    if node.schema is None:
        tally.unknown.setdefault(node.operator, []).append(node)
        return
    clash = _clash(node)
    if clash:
        tally.mixed.setdefault((node.operator, clash), []).append(node)
        return
    if has_kernel(node, provider):
        return
    types = ", ".join(f"{name} {dtype}" for name, dtype in sorted({(p.type, d) for p, d in node.bound}))
    if provider is Provider.CPU and "float16" in {dtype for _, dtype in node.bound}:
        if has_kernel(node, provider, float16_as="float"):
            tally.cast[node.operator] = tally.cast.get(node.operator, 0) + 1
            return
    elif _is_function(node):
        return
    tally.missing.setdefault((node.operator, types), []).append(node)


def _clash(node: TypedNode) -> str:
    """Edges that share a type parameter and differ, which onnxruntime refuses at load: "T: float and float16"."""
    for edge, given, stated in zip(node.node.output, node.outputs, node.declared, strict=True):
        if given and stated and given != stated:
            return f"{edge}: {given} where the graph declares {stated}"
    if node.operator in HETEROGENEOUS:
        return ""
    seen: dict[str, str] = {}
    for parameter, dtype in node.bound:
        if parameter.fixed is not None:
            if parameter.fixed != dtype:
                return f"{parameter.name}: {dtype} where the operator takes {parameter.fixed}"
        elif seen.setdefault(parameter.type, dtype) != dtype:
            return f"{parameter.type}: {seen[parameter.type]} and {dtype}"
    return ""


def _is_function(node: TypedNode) -> bool:
    """An operator of the standard that is written in others: onnxruntime expands it where it has no kernel."""
    import onnx

    if find_operator(node.operator) is not None:
        return False
    try:
        schema = onnx.defs.get_schema(node.node.op_type, node.opset or 0, node.node.domain)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _tally_findings(graph: OpenedGraph, provider: Provider, tally: _Tally) -> Iterator[Finding]:
    version = table_version(provider)
    newer = f"judged by the kernels of onnxruntime {version}; a newer one may have more"
    for (operator, types), nodes in tally.missing.items():
        fall = "it would fall back to the CPU with copies around it" if provider is Provider.CUDA else "the load fails"
        yield error(
            "C601",
            f"{graph.file}: {nodes[0].label}",
            f"{operator} has no {provider} kernel for its element types ({len(nodes)} nodes: "
            f"{some((node.label for node in nodes), 3)}); {fall}; {newer}",
            expected=_offered(operator, provider),
            found=types,
            fix=_kernel_advice(operator, types, provider),
        )
    for (operator, clash), nodes in tally.mixed.items():
        yield error(
            "C602",
            f"{graph.file}: {nodes[0].label}",
            f"{operator} gets edges of different element types ({len(nodes)} nodes); onnxruntime refuses the graph",
            expected="one type",
            found=clash,
            fix="cast one of them, or export again",
        )
    for operator, nodes in tally.unknown.items():
        yield error(
            "C603",
            f"{graph.file}: {nodes[0].label}",
            f"{operator} is no operator of onnxruntime {version} at opset {nodes[0].opset} ({len(nodes)} nodes); "
            "a newer one may have it",
            fix="a custom operator library would be needed; export again",
        )
    if tally.cast:
        total = sum(tally.cast.values())
        names = (f"{name.partition('::')[2]} x {count}" for name, count in sorted(tally.cast.items()))
        yield note(
            "C610", graph.file, f"{total:,} float16 nodes run in float32 on the CPU, between casts: {some(names)}"
        )


def _offered(operator: str, provider: Provider) -> str:
    """The element types that kernels of the operator take, by parameter: at most the first parameter's."""
    entry = kernel_table(provider).get(operator)
    if entry is None:
        return "another operator: this one has no kernel at all"
    offered: dict[str, set[str]] = {}
    for kernel in entry.kernels:
        for name, types in kernel.types.items():
            offered.setdefault(name, set()).update(types)
    return "; ".join(f"{name} {'|'.join(sorted(types)[:8])}" for name, types in sorted(offered.items()))[:200]


def _kernel_advice(operator: str, types: str, provider: Provider) -> str:
    if provider is Provider.CUDA and operator.endswith("GroupQueryAttention"):
        return "export the decoder with --ep cuda (float16): there is no float32 kernel"
    if "bfloat16" in types:
        return "export in float16 or float32"
    return f"cast to a type that has a kernel, or export for this provider (--ep {provider})"


def _slow_int8(graph: OpenedGraph, provider: Provider) -> Iterator[Finding]:
    if provider is not Provider.CPU:
        return
    slow = [
        node for node in _quantized(graph.model.graph) if node.get("bits") == 8 and node.get("accuracy_level", 0) != 4
    ]
    if slow:
        yield note(
            "C611",
            graph.file,
            f"{len(slow)} INT8 weights without accuracy_level 4: 13 to 20 times slower decoding on the CPU",
            expected="accuracy_level 4",
        )


def _quantized(graph: onnx.GraphProto) -> Iterator[Mapping[str, int]]:
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            yield {attribute.name: int(attribute.i) for attribute in node.attribute}
