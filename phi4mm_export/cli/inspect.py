"""Say what a checkpoint, a package or an ONNX file is: layout, adapters, precisions, sizes, contract, orphaned bytes.

Example: phi4mm inspect ./package --json
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phi4mm_export.cli import export_options as options
from phi4mm_export.cli import render
from phi4mm_export.cli.options import JsonFlag
from phi4mm_export.spec.sizes import format_bytes

if TYPE_CHECKING:
    from phi4mm_export.checks.summary import GraphSummary, PackageSummary
    from phi4mm_export.pipeline.inspect import CheckpointSummary


def command(
    path: Annotated[Path, typer.Argument(metavar="CHECKPOINT|PACKAGE|FILE", help="Folder, or an ONNX file.")],
    head: options.HeadChoice = None,
    json_output: JsonFlag = False,
) -> None:
    from phi4mm_export.pipeline.inspect import inspect

    found = inspect(path, head=head.value if head else None)
    if json_output:
        render.document(found.as_json())
        return
    render.text(f"{'part of a package' if found.kind == 'part' else found.kind} {found.name}")
    lines = []
    if found.checkpoint is not None:
        lines += list(_checkpoint(found.checkpoint))
    if found.package is not None:
        lines += list(_package(found.package, found.kind))
    for line in lines:
        render.text(line)
    for finding in found.findings:
        render.text(f"{finding.severity} {finding.code} {finding}")


def _checkpoint(summary: CheckpointSummary) -> Iterator[str]:
    yield f"layout: {summary.layout}"
    yield "model: " + ", ".join(f"{key} {value}" for key, value in summary.model.items())
    kinds = ", ".join(f"{name} {count:,} tensors {format_bytes(nbytes)}" for name, count, nbytes in summary.dtypes)
    yield f"weights: {kinds} in {len(summary.shards)} shards"
    for adapter in summary.adapters:
        ranks = ", ".join(f"{rank} ({count})" for rank, count in adapter.ranks)
        scales = ", ".join(f"{scale:g} ({count})" for scale, count in adapter.scales)
        yield f"adapter {adapter.role}: from {adapter.source}, {adapter.modules} modules, rank {ranks}, scale {scales}"
    if not summary.adapters:
        yield "adapters: none"
    for warning in summary.warnings:
        yield f"warning: {warning}"


def _package(summary: PackageSummary, kind: str) -> Iterator[str]:
    if kind == "part":
        held = ", ".join(graph.component for graph in summary.graphs if graph.component)
        yield f"holds {held} alone: the runtime needs the other graphs and genai_config.json beside it"
    if kind == "package":
        yield f"contract: {summary.contract}, adapters: {summary.lora}, providers: {', '.join(summary.providers)}"
    if kind != "graph":
        yield f"size: {format_bytes(summary.nbytes)} in {summary.files} files"
    for graph in summary.graphs:
        yield from _graph(graph)
    for file in summary.data:
        free = f", {file.orphaned:,} bytes orphaned" if file.orphaned else ""
        yield f"data {file.file}: {file.nbytes:,} bytes{free}"
    yield f"orphaned bytes: {summary.orphaned:,}"


def _graph(graph: GraphSummary) -> Iterator[str]:
    name = f"{graph.component}: {graph.file}" if graph.component else graph.file
    opsets = ", ".join(f"{domain} {version}" for domain, version in graph.opsets.items())
    yield f"graph {name}: {graph.nodes:,} nodes, {opsets}, weights outside {format_bytes(graph.data_nbytes)}"
    for group in graph.weights:
        yield f"    {group.format}: {group.count:,} constants, {format_bytes(group.nbytes)}"
    yield f"    {len(graph.inputs)} inputs, {len(graph.outputs)} outputs, {graph.overridable} overridable"
