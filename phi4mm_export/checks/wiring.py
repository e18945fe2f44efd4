"""Edges of a graph: whatever a node reads exists, and no name is made twice (ONNX IR specification, "Graphs").

onnxruntime refuses such a graph when it loads. The order of nodes is not judged: onnxruntime sorts them itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from phi4mm_export.checks.opened import OpenedGraph, OpenedPackage
from phi4mm_export.checks.report import Finding, error
from phi4mm_export.errors import some

if TYPE_CHECKING:
    import onnx

DEEPEST = 64
"""Subgraphs nested deeper than this are not followed; no exporter nests more than a few."""


def check_wiring(package: OpenedPackage) -> Iterator[Finding]:
    """Findings about edges without a source, outputs that nothing makes, and names made twice."""
    for graph in package.all_graphs():
        yield from _graph_findings(graph)


def _graph_findings(graph: OpenedGraph) -> Iterator[Finding]:
    loose: list[str] = []
    twice: list[str] = []
    for kind, name, where in _faults(graph.model.graph, frozenset(), 0):
        (loose if kind == "loose" else twice).append(f"{name} ({where})")
    if loose:
        yield error(
            "C230",
            graph.label,
            f"{len(loose)} edges come from nowhere: {some(loose)}",
            expected="the name of an input, an initializer or another node's output",
            fix="fetch the graph again, or export it again",
        )
    if twice:
        yield error(
            "C231",
            graph.label,
            f"{len(twice)} names are made twice: {some(twice)}",
            expected="one source for every name",
            fix="fetch the graph again, or export it again",
        )


def _faults(graph: onnx.GraphProto, outside: frozenset[str], depth: int) -> Iterator[tuple[str, str, str]]:
    """("loose" or "twice", edge, the node or graph it concerns)."""
    initializers = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    inputs = {value.name for value in graph.input}
    made = Counter(name for node in graph.node for name in node.output if name)
    for name, count in sorted(made.items()):
        if count + (name in initializers or name in inputs) > 1:
            yield "twice", name, graph.name
    known = outside | initializers | inputs | frozenset(made)
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                yield "loose", name, f"read by {node.name or node.op_type}"
        if depth < DEEPEST:
            for attribute in node.attribute:
                for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                    yield from _faults(inner, known, depth + 1)
    for value in graph.output:
        if value.name not in known:
            yield "loose", value.name, f"output of {graph.name or 'the graph'}"
