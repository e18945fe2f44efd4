"""neural-compressor's torch GPTQ, layer by layer on float activations: an independent second opinion.

neural-compressor 3.x quantizes no ONNX graphs any more; its GPTQ class solves one linear layer. Here it gets the
layers of an ONNX graph. For comparison only: no sequence, no bias correction, no zero points.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import MissingExtraError, UsageError
from phi4mm_export.package.write import WrittenFile
from phi4mm_export.quant.bias import give_biases
from phi4mm_export.quant.calibrate import Samples
from phi4mm_export.quant.codes import Codes, Grid
from phi4mm_export.quant.graph import read_graph
from phi4mm_export.quant.rewrite import Replacement, write_quantized
from phi4mm_export.quant.settings import CalibrationReader, QuantSettings
from phi4mm_export.quant.sites import find_sites
from phi4mm_export.quant.spill import Spill
from phi4mm_export.quant.stages import Streams, plan_stages

_BITS, _ZERO = 4, 8


def quantize_with_neural_compressor(
    source: Path, target: Path, *, reader: CalibrationReader, settings: QuantSettings
) -> tuple[WrittenFile, ...]:
    """Write `target` and its data file: 4 bits, symmetric, natural order, the damping of `settings`.

    Raises MissingExtraError without neural-compressor, UsageError for other bits or zero points.
    """
    if settings.bits != _BITS or not settings.symmetric:
        raise UsageError(
            "neural-compressor's engine writes symmetric 4-bit weights only", fix="use --engine native for others"
        )
    graph = read_graph(source)
    sites, _ = find_sites(graph, settings)
    graph, biases = give_biases(graph, sites, all_sites=False)
    sites, _ = find_sites(graph, settings)
    codes: dict[str, Codes] = {}
    with tempfile.TemporaryDirectory(prefix=".calibration-", dir=target.parent) as folder:
        spill = Spill(Path(folder) / "live")
        samples = Samples(graph, spill, reader, replace(settings, augment=False))
        stages = plan_stages(graph, sites)
        streams = Streams(graph, stages, spill, samples.order, jobs=settings.jobs, twofold=False)
        for number, stage in enumerate(stages):
            streams.advance(number)
            inputs = [np.asarray(exact, np.float32) for exact, _ in streams.captured(number)]
            rows = [x.T if stage.sites[0].flip_input else x for x in inputs]
            for site in stage.sites:
                grid = Grid(_BITS, settings.block_size, True, np.dtype(site.float_type))
                codes[site.label] = gptq_layer(site.matrix(graph), rows, grid, settings.damp)
            streams.retire(number)
        replacements = [
            Replacement(site, codes[site.label].grid, lambda label=site.label: codes[label])  # type: ignore[misc]
            for site in sites
        ]
        return write_quantized(graph, replacements, biases, {}, target, accuracy_level=settings.accuracy_level)


def gptq_layer(weight: NDArray[np.float32], inputs: list[NDArray[np.float32]], grid: Grid, damp: float) -> Codes:
    """One layer by neural-compressor's GPTQ. weight: float32 [K, N]; inputs: arrays [..., K]."""
    torch, gptq_class = _libraries()
    linear = torch.nn.Linear(*weight.shape, bias=False)
    linear.weight.data = torch.from_numpy(np.ascontiguousarray(weight.T))
    solver = gptq_class(linear, linear.weight.data, device="cpu")
    solver.quantizer.configure(
        {
            "bits": grid.bits,
            "sym": True,
            "mse": False,
            "perchannel": True,
            "double_quant_sym": False,
            "use_double_quant": False,
            "double_quant": False,
            "dtype": "int",
            "double_quant_dtype": "fp32",
        }
    )
    for x in inputs:
        solver.add_batch(torch.from_numpy(np.ascontiguousarray(x)).reshape(1, -1, len(weight)), None)
    scale, _, dense = _solve(solver, linear, grid, damp)
    size, width = weight.shape
    wide = np.repeat(scale, grid.block_size, axis=1)[:, :size]
    live = wide != 0
    ratio = np.divide(dense, wide, out=np.zeros_like(dense), where=live)
    codes = np.clip(np.rint(ratio) + _ZERO, 0, grid.top).astype(np.uint8)
    assert codes.shape == (width, size)
    return Codes(grid, np.ascontiguousarray(codes.T), np.ascontiguousarray(scale.T).astype(grid.scale_type), None)


def _solve(solver: Any, linear: Any, grid: Grid, damp: float) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    scale, _, zero, dense = solver.fasterquant(
        linear.weight.data.clone(),
        blocksize=128,
        percdamp=damp,
        groupsize=grid.block_size,
        act_order=False,
        static_groups=False,
    )
    return np.asarray(scale, np.float32), np.asarray(zero), np.asarray(dense, np.float32)


def _libraries() -> tuple[ModuleType, Any]:
    """torch and the GPTQ class. Importing neural_compressor leaves a folder behind: let it be a temporary one."""
    with _elsewhere():
        try:
            torch = importlib.import_module("torch")
            module = importlib.import_module("neural_compressor.torch.algorithms.weight_only.gptq")
        except ImportError as err:
            raise MissingExtraError("neural-compressor", "inc", "the neural-compressor engine") from err
    return torch, module.GPTQ


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
