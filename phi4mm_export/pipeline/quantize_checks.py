"""What must hold of a quantized graph, and of the package around it, before either is published."""

from __future__ import annotations

from pathlib import Path

from phi4mm_export.errors import CheckpointError, PackageError, Phi4mmError, some
from phi4mm_export.package.graph_io import read_graph_io
from phi4mm_export.pipeline.validate import validate


def check_graph(source: Path, target: Path) -> None:
    """The checker of onnx accepts the file with its external data, and its inputs and outputs are the source's.

    Raises Phi4mmError: a graph that fails here is our fault.
    """
    import onnx

    try:
        onnx.checker.check_model(str(target))
    except onnx.checker.ValidationError as err:
        raise Phi4mmError(
            f"the quantized graph is not valid: {str(err).strip().splitlines()[0]}",
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
