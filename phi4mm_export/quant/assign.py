"""Which layers get 8 bits when a number of bytes is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from phi4mm_export.errors import UsageError
from phi4mm_export.quant.algebra import algebra_of
from phi4mm_export.quant.calibrate import Samples
from phi4mm_export.quant.codes import Grid
from phi4mm_export.quant.graph import Graph
from phi4mm_export.quant.hessian import Moments, moments
from phi4mm_export.quant.rtn import round_to_nearest
from phi4mm_export.quant.settings import QuantSettings
from phi4mm_export.quant.sites import Site
from phi4mm_export.quant.stages import Streams, plan_stages
from phi4mm_export.weights.exact import exact_product

LOW_BITS, HIGH_BITS = 4, 8


def choose_bits(
    graph: Graph, sites: Sequence[Site], grids: Mapping[str, Grid], samples: Samples | None, settings: QuantSettings
) -> dict[str, Grid]:
    """4 bits for all, then 8 bits for the layers whose relative squared error falls most for a byte more.

    The error is that of rounding to nearest: over the calibration inputs of the float graph, or without samples over
    the weights themselves. Raises UsageError when the budget does not hold 4 bits for all.
    """
    budget = settings.budget_nbytes
    assert budget is not None
    low = {site.label: replace(grids[site.label], bits=LOW_BITS) for site in sites}
    high = {label: replace(grid, bits=HIGH_BITS) for label, grid in low.items()}
    size = {site.label: low[site.label].nbytes(site.K, site.N) for site in sites}
    spent = sum(size.values())
    if spent > budget:
        raise UsageError(
            f"the budget is {budget:,} bytes, but {LOW_BITS} bits for all weights take {spent:,}",
            fix="raise --budget, or choose a larger --block-size",
        )
    gains = _gains(graph, sites, low, high, samples, settings)
    chosen = dict(low)
    more = {site.label: high[site.label].nbytes(site.K, site.N) - size[site.label] for site in sites}
    for label in sorted(gains, key=lambda name: (-gains[name] / more[name], name)):
        if gains[label] > 0 and spent + more[label] <= budget:
            chosen[label] = high[label]
            spent += more[label]
    return chosen


def _gains(
    graph: Graph,
    sites: Sequence[Site],
    low: Mapping[str, Grid],
    high: Mapping[str, Grid],
    samples: Samples | None,
    settings: QuantSettings,
) -> dict[str, float]:
    gains: dict[str, float] = {}
    stages, summing = plan_stages(graph, sites), algebra_of(settings).summing
    streams = None
    if samples is not None:
        streams = Streams(
            graph, stages, samples.spill, samples.order, jobs=settings.jobs, twofold=False, keep_inputs=True
        )
    for number, stage in enumerate(stages):
        seen = None
        if streams is not None:
            streams.advance(number)
            head = stage.sites[0]
            seen = moments(streams.captured(number), head.K, flip=head.flip_input, summing=summing)
            streams.retire(number)
        for site in stage.sites:
            grids = (low[site.label], high[site.label])
            worse, better = (_squared_error(site, graph, grid, seen) for grid in grids)
            gains[site.label] = worse - better
    return gains


def _squared_error(site: Site, graph: Graph, grid: Grid, seen: Moments | None) -> float:
    weight = site.matrix(graph)
    wide = weight.astype(np.float64)
    gap = round_to_nearest(weight, grid).values() - wide
    if seen is None:
        return float(np.add.reduce(gap * gap, axis=None) / np.add.reduce(wide * wide, axis=None))
    energy = np.add.reduce(wide * exact_product(seen.hessian, wide), axis=None)
    return float(np.add.reduce(gap * exact_product(seen.hessian, gap), axis=None) / energy) if energy > 0 else 0.0
