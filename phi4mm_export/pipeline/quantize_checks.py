"""What must hold of a quantized graph, and of the package around it, before either is published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phi4mm_export.errors import CheckpointError, PackageError, Phi4mmError, some
from phi4mm_export.package.graph_io import read_graph_io
from phi4mm_export.pipeline.validate import validate
from phi4mm_export.quant.graph import read_graph, subgraphs

if TYPE_CHECKING:
    import onnx

MESSAGE_CHARACTERS = 300
"""What is shown of a message of the checker, which may hold whole nodes."""


def check_source(source: Path) -> None:
    """The source is ONNX by its own rules and its data files are there, so that a fault of the result would be ours.

    The checker of onnx does not see the data files: it refuses links, which caches of models are full of.
    Raises CheckpointError.
    """
    import onnx
    from onnx import external_data_helper

    graph = read_graph(source)
    for name, tensor in graph.constants.items():
        if external_data_helper.uses_external_data(tensor):
            graph.bytes_of(name)
    model = graph.model
    if any(_has_external_data(body) for node in model.graph.node for _, body in subgraphs(node)):
        return
    given = {value.name for value in model.graph.input}
    model.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
        for name, tensor in graph.constants.items()
        if name not in given
    )
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as err:
        raise CheckpointError(
            f"the graph is not valid ONNX: {_in_a_line(err)}",
            where=source.name,
            fix="write the graph again; onnx.checker.check_model must accept it",
        ) from err


def _has_external_data(body: onnx.GraphProto) -> bool:
    from onnx import external_data_helper

    return any(external_data_helper.uses_external_data(tensor) for tensor in body.initializer) or any(
        _has_external_data(inner) for node in body.node for _, inner in subgraphs(node)
    )


def check_graph(source: Path, target: Path) -> None:
    """The checker of onnx accepts the file with its external data, and its inputs and outputs are the source's.

    Raises Phi4mmError: a graph that fails here is our fault.
    """
    import onnx

    try:
        onnx.checker.check_model(str(target))
    except onnx.checker.ValidationError as err:
        raise Phi4mmError(
            f"the quantized graph is not valid: {_in_a_line(err)}",
            where=target.name,
            fix="this is a bug of phi4mm: please report it",
        ) from err
    before, after = read_graph_io(source, error=CheckpointError), read_graph_io(target, error=CheckpointError)
    if before != after:
        changed = [str(io) for io in (*after.inputs, *after.outputs) if io not in (*before.inputs, *before.outputs)]
        raise Phi4mmError(
            f"the quantized graph has other inputs or outputs: {some(changed)}",
            where=target.name,
            fix="this is a bug of phi4mm: please report it",
        )


def check_package(source: Path, result: Path) -> None:
    """The new package has no fault that the old one did not have. Raises PackageError with the first ones."""
    report = validate(result)
    if report.ok:
        return
    known = {(finding.code, finding.where) for finding in validate(source).errors}
    new = [
        f"{finding.where}: {finding.what}" for finding in report.errors if (finding.code, finding.where) not in known
    ]
    if new:
        raise PackageError(
            f"the quantized package breaks the contract in {len(new)} places: {some(new, 3)}",
            where=result.name,
            fix="run phi4mm validate on the source; if it is fine, please report this",
        )


def _in_a_line(err: Exception) -> str:
    """What the checker says, which it spreads over lines."""
    return " ".join(str(err).split()).rstrip(".")[:MESSAGE_CHARACTERS]
