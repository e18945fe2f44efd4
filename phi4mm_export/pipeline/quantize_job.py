"""One graph quantized and judged: calibrate on part of the samples, judge on the rest, then calibrate on all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from phi4mm_export.errors import QualityError
from phi4mm_export.pipeline.quantize_engines import Engine, EngineCall, call_engine
from phi4mm_export.pipeline.quantize_gate import GateReport, Reference, judge, split
from phi4mm_export.quant.engine import QuantProgress, quantize_graph
from phi4mm_export.quant.graph import read_graph
from phi4mm_export.quant.rewrite import write_quantized
from phi4mm_export.quant.samples import calibration_order
from phi4mm_export.quant.settings import LayerReport, Method, QuantResult, QuantSettings
from phi4mm_export.quant.sites import find_sites
from phi4mm_export.runtime.calibration_samples import Samples, subset


@dataclass(frozen=True)
class QuantizeProgress:
    """`done` of `total` layers in a phase: "judging" (on part of the samples), "rounding" or "quantizing"."""

    phase: str
    done: int
    total: int
    layer: str


@dataclass(frozen=True)
class Job:
    """Everything that turns `source` into `target` (an .onnx path in a folder of the caller's).

    samples: what to calibrate on, if anything; validation: what to judge by, in place of samples left out. With
    `statistics` nothing is calibrated, and all samples judge.
    work: a folder for finished layers and for the models that are only judged.
    """

    source: Path
    target: Path
    settings: QuantSettings
    engine: Engine
    algorithm: str
    samples: Samples | None
    validation: Samples | None
    quality_gate: bool
    max_rel_l2: float
    work: Path
    statistics: Path | None = None
    save_statistics: Path | None = None
    progress: Callable[[QuantizeProgress], None] | None = None


@dataclass(frozen=True)
class JobResult:
    """The engine's account of the final graph, and what the gate measured."""

    result: QuantResult
    gate: GateReport | None
    warnings: tuple[str, ...]


def run_job(job: Job) -> JobResult:
    """Quantize and judge. Raises QualityError when the gate says no or nothing was quantized, else what engines do."""
    judged_by = job.validation or job.samples
    if not job.quality_gate or judged_by is None or job.settings.method is Method.NONE:
        result, notes = _final(job)
        return JobResult(result, None, (*notes, *_unjudged(job)))
    calibrated, held = split(judged_by.digests)
    if job.validation is not None or job.statistics is not None:
        calibrated, held, kind = [], calibration_order(judged_by.digests), "validation samples"
    else:
        kind = "held-out samples" if set(calibrated).isdisjoint(held) else "calibration samples"
    reference = Reference(job.source, subset(judged_by, held), _fresh(job.work / "reference"))
    rounds = job.algorithm == Method.RTN.value
    rounded = None if rounds else reference.fidelity(_rounded(job))
    twice = kind == "held-out samples" and job.settings.method is Method.GPTQ
    if twice:
        judged = _fresh(job.work / "judged") / job.target.name
        result, notes = _engine(job, judged, subset(judged_by, calibrated), "judging")
    else:
        judged, (result, notes) = job.target, _final(job)
    gate = GateReport(reference.output, kind, len(held), reference.fidelity(judged), rounded, job.max_rel_l2)
    fallbacks = sum(layer.method_used == "rtn" for layer in result.layers)
    judge(gate, fallbacks=fallbacks, layers=len(result.layers))
    for name in ("judged", "rounded", "reference"):
        shutil.rmtree(job.work / name, ignore_errors=True)
    if twice:
        result, notes = _final(job)
    return JobResult(result, gate, (*notes, *_one_sample(kind)))


def _final(job: Job) -> tuple[QuantResult, tuple[str, ...]]:
    """The graph that is published, calibrated on all samples in the order of their content."""
    if job.settings.method is Method.NONE:
        return _unchanged(job), ()
    ordered = None if job.samples is None else subset(job.samples, calibration_order(job.samples.digests))
    result, notes = _engine(job, job.target, ordered, "quantizing", keep_statistics=True)
    if all(layer.method_used == "kept" for layer in result.layers):
        raise QualityError(
            "nothing was quantized: no MatMul or Gemm with a constant float weight was left to work on",
            where=job.source.name,
            fix="check --include and --exclude; a graph that holds integers already has to be exported in float first",
        )
    return result, notes


def _unchanged(job: Job) -> QuantResult:
    """The graph with its data beside it and every weight as it was."""
    graph = read_graph(job.source)
    sites, left = find_sites(graph, job.settings)
    files = write_quantized(graph, [], {}, {}, job.target, accuracy_level=0)
    weights = [(s.rank, s.label, s.weight, s.K, s.N, s.K * s.N * np.dtype(s.float_type).itemsize) for s in sites]
    weights += [(item.rank, item.label, item.weight, item.K, item.N, item.nbytes) for item in left]
    layers = tuple(
        LayerReport(label, weight, k, n, 0, 0, "kept", "", 0.0, None, None, 0.0, nbytes)
        for _, label, weight, k, n, nbytes in sorted(weights)
    )
    nbytes = sum(layer.nbytes for layer in layers)
    return QuantResult(layers, files, nbytes, nbytes, 0)


def _rounded(job: Job) -> Path:
    """The same graph rounded to nearest in the same format, for comparison."""
    target = _fresh(job.work / "rounded") / job.target.name
    settings = replace(job.settings, method=Method.RTN, rotate=False, torch_device=None)
    quantize_graph(job.source, target, reader=None, settings=settings, progress=_named(job, "rounding"))
    return target


def _engine(
    job: Job, target: Path, samples: Samples | None, phase: str, *, keep_statistics: bool = False
) -> tuple[QuantResult, tuple[str, ...]]:
    target.parent.mkdir(parents=True, exist_ok=True)
    layers = job.work / "layers"
    layers.mkdir(exist_ok=True)
    return call_engine(
        EngineCall(
            engine=job.engine,
            algorithm=job.algorithm,
            source=job.source,
            target=target,
            settings=job.settings,
            samples=samples,
            work=layers,
            statistics=job.statistics,
            save_statistics=job.save_statistics if keep_statistics else None,
            progress=_named(job, phase),
        )
    )


def _named(job: Job, phase: str) -> Callable[[QuantProgress], None] | None:
    report = job.progress
    if report is None:
        return None
    return lambda step: report(QuantizeProgress(phase, step.done, step.total, step.layer))


def _unjudged(job: Job) -> tuple[str, ...]:
    if job.settings.method is Method.NONE:
        return ()
    if not job.quality_gate:
        return ("the result was not judged (--no-quality-gate)",)
    return ("the result was not judged, because no samples were given; phi4mm evaluate measures it",)


def _one_sample(kind: str) -> tuple[str, ...]:
    if kind != "calibration samples":
        return ()
    return ("with a single sample the result was judged on what it was calibrated on; give eight or more",)


def _fresh(folder: Path) -> Path:
    """An empty folder in place of what a killed run may have left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
