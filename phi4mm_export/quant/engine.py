"""Quantize the constant weights of one ONNX graph."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phi4mm_export.errors import QualityError, UsageError, some
from phi4mm_export.quant.assign import choose_bits
from phi4mm_export.quant.bias import give_biases
from phi4mm_export.quant.calibrate import Calibrated, Job, Samples, calibrate, corrected_biases, replay
from phi4mm_export.quant.codes import Grid
from phi4mm_export.quant.finished import Outcome, file_digests
from phi4mm_export.quant.graph import read_graph
from phi4mm_export.quant.padding import plan_padding
from phi4mm_export.quant.rewrite import Replacement, write_quantized
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
from phi4mm_export.quant.statistics import SavedStatistics
from phi4mm_export.quant.torch_device import device_memory
from phi4mm_export.weights.rotation import rotation_size
from phi4mm_export.weights.threads import one_blas_thread

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
) -> QuantResult:
    """Write `target` (.onnx, data beside it) with MatMulNBits in place of the constant products of `source`.

    reader: calibration samples; required for GPTQ.
    work_dir: keeps finished layers, so that a killed run goes on where it stopped.
    statistics: moments saved by an earlier run's `save_statistics`, used instead of running the graph.
    Raises UsageError for GPTQ without samples, CheckpointError for an unusable graph, QualityError when nothing
    could be quantized.
    """
    if settings.method is Method.NONE:
        raise UsageError("the method `none` quantizes nothing", fix="copy the graph instead")
    calibrated = settings.method is Method.GPTQ
    if calibrated and reader is None and statistics is None:
        raise UsageError("GPTQ was asked for without calibration samples", fix="pass --calibration")
    graph = read_graph(source)
    sites, left = find_sites(graph, settings)
    if not sites:
        raise _nothing(source, left)
    grids = {site.label: _grid(site, settings) for site in sites}
    files_read = dict(file_digests(source))
    done: list[str] = []

    def watch(label: str) -> None:
        done.append(label)
        if progress is not None:
            progress(QuantProgress(len(done), len(sites), label))

    with _folder(work_dir, target.parent) as folder, one_blas_thread(), device_memory(settings.torch_device):
        spill = Spill(folder / "live")
        samples = None
        if calibrated and statistics is None:
            assert reader is not None
            samples = Samples(graph, spill, reader, settings)
        if settings.budget_nbytes is not None:
            grids = choose_bits(graph, sites, grids, samples, settings)
        correcting = settings.bias_correction and calibrated
        graph, biases = give_biases(graph, sites, all_sites=correcting)
        sites, left = find_sites(graph, settings)
        job = Job(graph, sites, biases, grids, settings)
        if statistics is not None and calibrated:
            result = replay(job, folder / "layers", files_read, SavedStatistics(statistics), watch)
        else:
            result = calibrate(job, folder / "layers", files_read, samples, watch, save=save_statistics)
        spill.close()
        files = write_quantized(
            graph,
            [_replacement(site, job, result) for site in sites],
            biases,
            corrected_biases(job, result.outcomes),
            target,
            accuracy_level=settings.accuracy_level,
            padding=plan_padding(graph, sites, grids, biases) if settings.pad_for_cuda else None,
        )
    reports = [(site.rank, _report(site, result.outcomes[site.label])) for site in sites]
    reports += [(item.rank, _kept(item)) for item in left]
    layers = [report for _, report in sorted(reports, key=lambda ranked: ranked[0])]
    before = sum(site.K * site.N * np.dtype(site.float_type).itemsize for site in sites)
    after = sum(grids[site.label].nbytes(site.K, site.N) for site in sites)
    return QuantResult(tuple(layers), files, before, after, len(result.samples), result.reused)


@contextmanager
def _folder(work_dir: Path | None, beside: Path) -> Iterator[Path]:
    """The work folder, or one of our own that goes away."""
    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
        yield work_dir
        return
    own = Path(tempfile.mkdtemp(prefix=".calibration-", dir=beside))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _replacement(site: Site, job: Job, result: Calibrated) -> Replacement:
    return Replacement(site, job.grids[site.label], lambda: result.codes(site.label))


def _grid(site: Site, settings: QuantSettings) -> Grid:
    rotation = 0 if site.flip_input or site.branch or not settings.rotate else rotation_size(site.K)
    return Grid(settings.bits, settings.block_size, settings.symmetric, np.dtype(site.float_type), rotation)


def _report(site: Site, outcome: Outcome) -> LayerReport:
    grid = outcome.grid
    return LayerReport(
        name=site.label,
        weight=site.weight,
        K=site.K,
        N=site.N,
        bits=grid.bits,
        block_size=grid.block_size,
        method_used=str(outcome.method),
        reason=outcome.reason,
        damp=outcome.damp,
        error_before=outcome.error_before,
        error_after=outcome.error_after,
        seconds=outcome.seconds,
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
        fix="check --include and --exclude; weights must be constants of MatMul or Gemm that are stored, not computed",
    )
