"""Quantize the constant weights of one ONNX graph."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import QualityError, UsageError, some
from phi4mm_export.quant.bias import Bias, give_biases
from phi4mm_export.quant.codes import Codes, Grid
from phi4mm_export.quant.graph import Graph, read_graph
from phi4mm_export.quant.hessian import moments
from phi4mm_export.quant.layer import Solved, solve_stage
from phi4mm_export.quant.rewrite import Replacement, write_quantized
from phi4mm_export.quant.samples import calibration_order, collect
from phi4mm_export.quant.settings import (
    CalibrationReader,
    LayerReport,
    Method,
    Order,
    QuantResult,
    QuantSettings,
)
from phi4mm_export.quant.sites import LeftAlone, Site, find_sites
from phi4mm_export.quant.spill import Spill
from phi4mm_export.quant.stages import Streams, plan_stages

__all__ = [
    "CalibrationReader",
    "LayerReport",
    "Method",
    "Order",
    "QuantProgress",
    "QuantResult",
    "QuantSettings",
    "quantize_graph",
]


@dataclass(frozen=True)
class QuantProgress:
    """One step of the work: `done` of `total` layers, the layer finished last."""

    done: int
    total: int
    layer: str


def quantize_graph(
    source: Path,
    target: Path,
    *,
    reader: CalibrationReader | None,
    settings: QuantSettings,
    work_dir: Path | None = None,
    statistics: Path | None = None,
    save_statistics: Path | None = None,
    progress: Callable[[QuantProgress], None] | None = None,
    holdout: bool = False,
) -> QuantResult:
    """Write `target` (.onnx, data beside it) with MatMulNBits in place of the constant MatMuls of `source`.

    reader: calibration samples; required for GPTQ. holdout: leave every 8th sample out of the calibration.
    work_dir: keeps finished layers, so that a killed run goes on where it stopped.
    statistics: Hessians saved by an earlier run's `save_statistics`, used instead of running the graph.
    Raises UsageError for GPTQ without samples, CheckpointError for an unusable graph, QualityError when nothing
    could be quantized.
    """
    graph = read_graph(source)
    sites, left = find_sites(graph, settings)
    if not sites:
        raise _nothing(source, left)
    biases: Mapping[str, Bias] = {}
    if settings.bias_correction and settings.method is Method.GPTQ:
        graph, biases = give_biases(graph, sites)
        sites, left = find_sites(graph, settings)
    folder = work_dir or Path(tempfile.mkdtemp(prefix=".calibration-", dir=target.parent))
    folder.mkdir(parents=True, exist_ok=True)
    spill = Spill(folder / "live")
    try:
        solved, corrected, samples = _calibrate(graph, sites, biases, spill, reader, settings, progress, holdout)
    finally:
        spill.close()
        if work_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    replacements = [Replacement(site, solved[site.label].codes.grid, _loader(solved[site.label])) for site in sites]
    files = write_quantized(graph, replacements, biases, corrected, target, accuracy_level=settings.accuracy_level)
    layers = [_report(site, solved[site.label]) for site in sites] + [_kept(item) for item in left]
    before = sum(site.K * site.N * np.dtype(site.float_type).itemsize for site in sites)
    after = sum(solved[site.label].codes.grid.nbytes(site.K, site.N) for site in sites)
    return QuantResult(tuple(layers), files, before, after, samples)


def _calibrate(
    graph: Graph,
    sites: Sequence[Site],
    biases: Mapping[str, Bias],
    spill: Spill,
    reader: CalibrationReader | None,
    settings: QuantSettings,
    progress: Callable[[QuantProgress], None] | None,
    holdout: bool,
) -> tuple[dict[str, Solved], dict[str, NDArray[Any]], int]:
    stages = plan_stages(graph, sites)
    order: list[int] = []
    if settings.method is Method.GPTQ:
        if reader is None:
            raise UsageError("GPTQ was asked for without calibration samples", fix="pass --calibration")
        digests = collect(reader, graph.inputs, lambda index, sample: _store(spill, index, sample))
        order = calibration_order(digests, holdout=holdout)
    streams = Streams(graph, stages, spill, order, jobs=settings.jobs, twofold=settings.sequential)
    solved: dict[str, Solved] = {}
    corrected: dict[str, NDArray[Any]] = {}
    for number, stage in enumerate(stages):
        seen = None
        if order:
            streams.advance(number)
            head = stage.sites[0]
            seen = moments(streams.captured(number), head.K, flip=head.flip_input)
        weights = [site.matrix(graph) for site in stage.sites]
        grids = [_grid(site, settings) for site in stage.sites]
        for site, weight, result in zip(stage.sites, weights, solve_stage(weights, grids, seen, settings), strict=True):
            solved[site.label] = result
            if order and settings.sequential:
                streams.weights[site.weight] = _as_stored(site, result.codes)
            bias = biases.get(site.label)
            if bias is not None:
                old = graph.constant(bias.name)
                corrected[bias.name] = (old.astype(np.float64) + result.bias).astype(old.dtype)
                streams.weights[bias.name] = corrected[bias.name]
            if progress is not None:
                progress(QuantProgress(len(solved), len(sites), site.label))
        streams.retire(number)
    return solved, corrected, len(order)


def _store(spill: Spill, index: int, sample: Mapping[str, NDArray[Any]]) -> None:
    for name, value in sample.items():
        spill.put(("float", index, name), value)


def _grid(site: Site, settings: QuantSettings) -> Grid:
    return Grid(settings.bits, settings.block_size, settings.symmetric, np.dtype(site.float_type))


def _as_stored(site: Site, codes: Codes) -> NDArray[Any]:
    """The quantized weight in the place of the float one, alpha taken out again."""
    values = codes.values()
    if site.alpha != 1.0:
        values = values / site.alpha
    return np.ascontiguousarray(values.T if site.transposed else values).astype(site.float_type)


def _loader(result: Solved) -> Callable[[], Codes]:
    return lambda: result.codes


def _report(site: Site, result: Solved) -> LayerReport:
    grid = result.codes.grid
    return LayerReport(
        name=site.label,
        weight=site.weight,
        K=site.K,
        N=site.N,
        bits=grid.bits,
        block_size=grid.block_size,
        method_used=str(result.method),
        reason=result.reason,
        damp=result.damp,
        error_before=result.error_before,
        error_after=result.error_after,
        seconds=result.seconds,
        nbytes=grid.nbytes(site.K, site.N),
    )


def _kept(item: LeftAlone) -> LayerReport:
    return LayerReport(
        item.label, item.weight, item.K, item.N, 0, 0, "kept", item.reason, 0.0, None, None, 0.0, item.nbytes
    )


def _nothing(source: Path, left: Sequence[LeftAlone]) -> QualityError:
    reasons = some(f"{item.label} {item.reason}" for item in left)
    return QualityError(
        f"no weight of the graph can be quantized{': ' + reasons if reasons else ''}",
        where=source.name,
        fix="check --include and --exclude; weights must be constants of MatMul or Gemm",
    )
