"""More calibration samples from those given, where the graph itself says how: token ids drawn from the vocabulary.

A few dozen texts show a small part of a vocabulary, and a quantizer fits what it is shown. Copies of every sample with
half of the ids replaced by random ones narrow that gap (figures in docs/quantization.md). Inputs that are no ids are
left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.quant.graph import Graph
from phi4mm_export.quant.hidden_weights import MATRIX_RANK
from phi4mm_export.quant.sites import ONNX_DOMAINS

COPIES = 2
"""Copies of each sample."""
REPLACED_SHARE = 0.5
"""Share of the ids of a copy that are drawn anew: the other half keeps the places of what stands for structure."""


def vocabularies(graph: Graph) -> dict[str, int]:
    """Graph inputs that choose rows of a constant matrix -> the number of rows."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        if node.op_type != "Gather" or node.domain not in ONNX_DOMAINS or node.input[1] not in graph.inputs:
            continue
        table = graph.constants.get(node.input[0])
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        if table is not None and axis == 0 and len(table.dims) == MATRIX_RANK:
            rows = int(table.dims[0])
            found[node.input[1]] = min(rows, found.get(node.input[1], rows))
    return found


def with_random_ids(
    sample: Mapping[str, NDArray[Any]], sizes: Mapping[str, int], *, seed: tuple[int, ...]
) -> dict[str, NDArray[Any]]:
    """A copy of the sample with random ids in half of the places; the same for the same seed."""
    rng = np.random.Generator(np.random.PCG64(seed))
    copy = dict(sample)
    for name in sorted(sizes):
        ids = sample[name]
        drawn = rng.integers(0, sizes[name], ids.shape, np.int64)
        chosen = rng.integers(0, 1 << 16, ids.shape, np.int64) < REPLACED_SHARE * (1 << 16)
        copy[name] = np.where(chosen, drawn, ids).astype(ids.dtype)
    return copy
