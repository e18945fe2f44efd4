"""The work on one graph: stage by stage from samples to finished layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import UsageError
from phi4mm_export.quant.algebra import algebra_of
from phi4mm_export.quant.augment import COPIES, vocabularies, with_random_ids
from phi4mm_export.quant.bias import Bias
from phi4mm_export.quant.codes import Codes, Grid
from phi4mm_export.quant.finished import FinishedLayers, Outcome, Solved, content_key
from phi4mm_export.quant.graph import Graph
from phi4mm_export.quant.hessian import Moments, moments
from phi4mm_export.quant.layer import solve_stage
from phi4mm_export.quant.samples import calibration_order, collect
from phi4mm_export.quant.settings import CalibrationReader, Method, QuantSettings
from phi4mm_export.quant.sites import Site
from phi4mm_export.quant.spill import Spill
from phi4mm_export.quant.stages import FLOAT, Stage, Streams, plan_stages
from phi4mm_export.quant.statistics import SavedStatistics
from phi4mm_export.quant.torch_device import open_device
from phi4mm_export.quant.weight import Weight, side_by_side, tiles_of

Watch = Callable[[str], None]
"""Called with the label of each finished layer."""


@dataclass(frozen=True)
class Job:
    """A graph with the sites to quantize, the constants of their biases, and how each is to be stored."""

    graph: Graph
    sites: tuple[Site, ...]
    biases: Mapping[str, Bias]
    grids: Mapping[str, Grid]
    settings: QuantSettings


@dataclass(frozen=True)
class Calibrated:
    """Outcomes by label, the layers themselves on disk, and what was used. samples: digests in calibration order."""

    outcomes: Mapping[str, Outcome]
    finished: FinishedLayers
    samples: tuple[str, ...]
    reused: int

    def codes(self, label: str) -> Codes:
        """The codes of a layer, read from disk."""
        solved = self.finished.load(label)
        assert solved is not None, label
        return solved.codes


class Samples:
    """Calibration samples in the spill.

    order: their numbers, augmented copies last; given: how many are none; digests: of these.
    """

    def __init__(self, graph: Graph, spill: Spill, reader: CalibrationReader, settings: QuantSettings) -> None:
        def store(index: int, arrays: Mapping[str, NDArray[Any]]) -> None:
            for name, value in arrays.items():
                spill.put((FLOAT, index, name), value)

        digests = collect(reader, graph.inputs, store)
        self.spill = spill
        self.order = calibration_order(digests)
        self.digests = tuple(digests[number] for number in self.order)
        self.given = len(self.order)
        sizes = vocabularies(graph) if settings.augment else {}
        for rank, number in enumerate(self.order * COPIES if sizes else []):
            given = {name: spill.get((FLOAT, number, name)) for name in graph.inputs}
            store(len(digests) + rank, with_random_ids(given, sizes, seed=(settings.seed, rank)))
            self.order.append(len(digests) + rank)


def calibrate(
    job: Job, folder: Path, source: Mapping[str, Any], samples: Samples | None, watch: Watch, *, save: Path | None
) -> Calibrated:
    """Quantize every site; layers finished earlier under the same key are taken from `folder`.

    A run that goes on computes the same pieces as one that was not disturbed, since onnxruntime's rounding depends on
    how a graph is cut; it leaves out what is dear, moments and solving.

    source: digests of the graph's files. samples: None for methods that need none.
    """
    digests = samples.digests if samples else ()
    finished = FinishedLayers(folder, content_key(_facts(job, source, digests)))
    earlier = _earlier(job, finished) if save is None else {}
    stages = plan_stages(job.graph, job.sites)
    streams = _streams(job, stages, samples)
    keeper = SavedStatistics(save) if save else None
    summing = algebra_of(job.settings).summing
    outcomes: dict[str, Outcome] = {}
    for number, stage in enumerate(stages):
        known = {site.label: earlier[site.label] for site in stage.sites if site.label in earlier}
        ready = len(known) == len(stage.sites)
        if streams is not None and len(outcomes) + len(known) < len(job.sites):
            streams.advance(number)
        if ready:
            outcomes |= known
            for label in known:
                watch(label)
        else:
            seen = None
            if streams is not None:
                head = stage.sites[0]
                weights = side_by_side([Weight(job.graph, site) for site in stage.sites])
                pairs, jobs = streams.captured(number), job.settings.jobs
                seen = moments(pairs, head.K, flip=head.flip_input, weights=weights, jobs=jobs, summing=summing)
            if keeper:
                keeper.save(number, seen)
            outcomes |= _solve(job, stage, seen, finished, watch)
        if streams is not None:
            _decide(job, streams, stage.sites, outcomes, finished)
            streams.retire(number)
    if keeper:
        keeper.close(stages, list(digests))
    return Calibrated(outcomes, finished, digests, len(earlier))


def replay(job: Job, folder: Path, source: Mapping[str, Any], saved: SavedStatistics, watch: Watch) -> Calibrated:
    """Quantize from saved moments; no graph runs."""
    stages = plan_stages(job.graph, job.sites)
    digests = tuple(saved.open(stages))
    finished = FinishedLayers(folder, content_key(_facts(job, source, digests) | {"replayed": True}))
    outcomes: dict[str, Outcome] = {}
    for number, stage in enumerate(stages):
        seen = saved.load(number, stage.sites[0].K, sum(site.N for site in stage.sites))
        outcomes |= _solve(job, stage, seen, finished, watch)
    return Calibrated(outcomes, finished, digests, 0)


def corrected_biases(job: Job, outcomes: Mapping[str, Outcome]) -> dict[str, NDArray[Any]]:
    """New values of the bias constants."""
    return {bias.name: _corrected(job, bias, outcomes[label]) for label, bias in job.biases.items()}


def _corrected(job: Job, bias: Bias, outcome: Outcome) -> NDArray[Any]:
    old = job.graph.constant(bias.name)
    return (old.astype(np.float64) + outcome.bias).astype(old.dtype)


def _solve(job: Job, stage: Stage, seen: Moments | None, finished: FinishedLayers, watch: Watch) -> dict[str, Outcome]:
    weights = [Weight(job.graph, site) for site in stage.sites]
    grids = [job.grids[site.label] for site in stage.sites]
    results = solve_stage(weights, grids, seen, job.settings)
    for site, solved in zip(stage.sites, results, strict=True):
        finished.save(site.label, solved)
        watch(site.label)
    return {site.label: solved.outcome for site, solved in zip(stage.sites, results, strict=True)}


def _earlier(job: Job, finished: FinishedLayers) -> dict[str, Outcome]:
    """Layers of an interrupted run."""
    found: dict[str, Outcome] = {}
    for site in job.sites:
        solved = finished.load(site.label)
        if solved is not None:
            found[site.label] = solved.outcome
    return found


def _streams(job: Job, stages: Sequence[Stage], samples: Samples | None) -> Streams | None:
    if samples is None:
        return None
    settings = job.settings
    biases = frozenset(bias.name for bias in job.biases.values())
    return Streams(
        job.graph,
        stages,
        samples.spill,
        samples.order,
        jobs=settings.jobs,
        twofold=settings.sequential,
        paired=samples.given,
        biases=biases,
    )


def _decide(
    job: Job,
    streams: Streams,
    sites: Sequence[Site],
    outcomes: Mapping[str, Outcome],
    finished: FinishedLayers,
) -> None:
    """Let the quantized stream use what these layers became."""
    if not job.settings.sequential:
        return
    for site in sites:
        streams.weights[site.weight] = lambda site=site: _as_stored(  # type: ignore[misc]
            site, finished.load(site.label), job.settings.jobs
        )
        bias = job.biases.get(site.label)
        if bias is not None:
            corrected = _corrected(job, bias, outcomes[site.label])
            streams.weights[bias.name] = lambda corrected=corrected: corrected  # type: ignore[misc]


def _as_stored(site: Site, solved: Solved | None, jobs: int) -> NDArray[Any]:
    """The quantized weight in the form of the float one: alpha taken out, transposed back."""
    assert solved is not None, site.label
    stored = np.empty((site.N, site.K) if site.transposed else (site.K, site.N), site.float_type)
    acting = stored.T if site.transposed else stored

    def some(outputs: slice) -> None:
        values = solved.codes.some(outputs).values()
        acting[:, outputs] = values / site.alpha if site.alpha not in (0.0, 1.0) else values

    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(some, tiles_of(site.N)):
            pass
    return stored


def _facts(job: Job, source: Mapping[str, Any], digests: Sequence[str]) -> dict[str, Any]:
    """What decides the bytes of every layer."""
    settings = job.settings
    if settings.method is Method.GPTQ and not digests:
        raise UsageError("GPTQ was asked for without calibration samples", fix="pass --calibration")
    from phi4mm_export.runtime.ort import import_onnxruntime

    chosen = {name: str(getattr(settings, name)) for name in settings.__dataclass_fields__ if name != "jobs"}
    grids = {label: [grid.bits, grid.block_size, grid.rotation] for label, grid in job.grids.items()}
    versions = {"numpy": np.__version__}
    if digests:
        versions["onnxruntime"] = str(import_onnxruntime().__version__)
    if settings.torch_device is not None:
        versions["torch"] = open_device(settings.torch_device).identity
    return {"settings": chosen, "grids": grids, "source": source, "samples": list(digests), "versions": versions}
