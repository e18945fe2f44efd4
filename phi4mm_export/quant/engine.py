"""Quantize the constant weights of one ONNX graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.quant.settings import (
    CalibrationReader,
    LayerReport,
    Method,
    Order,
    QuantResult,
    QuantSettings,
)

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
    raise NotImplementedError
