"""The quality gate of `phi4mm quantize`: how far a quantized graph's output is from the float graph's on samples that
it was not calibrated on, against rounding to nearest and against a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.checks.numerics import errors
from phi4mm_export.errors import CheckpointError, QualityError, UsageError
from phi4mm_export.quant.samples import calibration_order
from phi4mm_export.runtime.calibration_samples import Feeds, Samples
from phi4mm_export.runtime.ort import first_line, import_onnxruntime, native_faults
from phi4mm_export.spec.sizes import format_bytes

DEFAULT_MAX_REL_L2 = 0.5
"""An output that lost half its size to noise is of no use; the published vision tower, at 0.94 to 1.09, is ruined."""
HOLDOUT_STEP = 8
"""Every 8th sample is left out of the calibration that is judged."""


@dataclass(frozen=True)
class Fidelity:
    """Errors of a graph's output against the float graph, over samples: relative L2 and cosine."""

    rel_l2: tuple[float, ...]
    cosine: tuple[float, ...]

    @property
    def mean_rel_l2(self) -> float:
        return float(np.mean(self.rel_l2))

    @property
    def worst_rel_l2(self) -> float:
        return float(np.max(self.rel_l2))

    @property
    def mean_cosine(self) -> float:
        return float(np.mean(self.cosine))


@dataclass(frozen=True)
class GateReport:
    """What the gate measured. `judged_on`: "held-out samples", "validation samples" or "calibration samples" (when one
    sample was all there was). `rounded` is None where the method is rounding itself."""

    output: str
    judged_on: str
    samples: int
    quantized: Fidelity
    rounded: Fidelity | None
    max_rel_l2: float

    @property
    def judged(self) -> str:
        """Samples with their number, for a sentence."""
        return f"{self.samples:,} {self.judged_on.removesuffix('s') if self.samples == 1 else self.judged_on}"


def check_limit(max_rel_l2: float) -> None:
    """Raise UsageError for a limit that no result can meet, or every one."""
    if not 0 < max_rel_l2 < float("inf"):
        raise UsageError(f"expected a limit above 0, found {max_rel_l2:g}", where="--max-rel-l2")


def split(digests: Sequence[str]) -> tuple[list[int], list[int]]:
    """Numbers of the samples to calibrate on and of those to judge by, both in the order of their content.

    Every 8th is left out, the last of fewer; one sample alone is in both lists.
    """
    order = calibration_order(digests)
    held = order[HOLDOUT_STEP - 1 :: HOLDOUT_STEP] or order[-1:]
    kept = [index for index in order if index not in set(held)]
    return (kept or order), held


class Reference:
    """The float graph's main output on some samples, kept on disk."""

    def __init__(self, graph: Path, samples: Samples, folder: Path) -> None:
        """Run `graph` on every sample. Raises CheckpointError for a graph that onnxruntime refuses or whose output is
        not finite."""
        self.samples, self._folder = samples, folder
        folder.mkdir(parents=True, exist_ok=True)
        session = open_session(graph)
        self.output = main_output(session, graph)
        for index in range(len(samples)):
            value = run_one(session, self.output, samples.sample(index), graph)
            if not np.isfinite(value).all():
                raise CheckpointError(
                    f"the float graph's output {self.output} is NaN or infinite on {samples.names[index]}",
                    where=graph.name,
                    fix="check the graph and the sample",
                )
            np.save(folder / f"{index:06d}.npy", value.astype(np.float32))

    def fidelity(self, graph: Path) -> Fidelity:
        """How near another graph comes."""
        session = open_session(graph)
        found = []
        for index in range(len(self.samples)):
            value = run_one(session, self.output, self.samples.sample(index), graph)
            found.append(errors(value, np.load(self._folder / f"{index:06d}.npy")))
        return Fidelity(tuple(e.relative_l2 for e in found), tuple(e.cosine for e in found))


def judge(report: GateReport, *, fallbacks: int, layers: int) -> None:
    """Raise QualityError, with figure and threshold, when a report misses the limit or is no better than rounding.

    A result without any error passes: nothing is better.
    """
    figure = report.quantized.mean_rel_l2
    place = f"{report.output}, {report.judged}"
    if not figure <= report.max_rel_l2:
        raise QualityError(
            f"relative L2 error {figure:.4f}, allowed at most {report.max_rel_l2:g}",
            where=place,
            fix="give more calibration data, --bits 8 or a smaller --block-size; --no-quality-gate keeps the result",
        )
    if report.rounded is not None and figure and not figure < report.rounded.mean_rel_l2:
        rounded = f"; {fallbacks} of {layers} layers fell back to rounding" if fallbacks else ""
        raise QualityError(
            f"relative L2 error {figure:.4f}, not better than rounding to nearest with "
            f"{report.rounded.mean_rel_l2:.4f}{rounded}",
            where=place,
            fix="give more calibration data of the kind that will be served, or use --method rtn; "
            "--no-quality-gate keeps the result",
        )


def open_session(graph: Path) -> Any:
    """An onnxruntime CPU session. Raises CheckpointError naming the graph that onnxruntime refuses."""
    ort = import_onnxruntime("judging the result")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except native_faults(ort) as err:
        raise _refused(graph, err) from err


def main_output(session: Any, graph: Path) -> str:
    """The first output with float elements: the features, the logits, the last hidden state."""
    for value in session.get_outputs():
        if value.type in ("tensor(float)", "tensor(float16)", "tensor(double)", "tensor(bfloat16)"):
            return str(value.name)
    raise CheckpointError(
        "the graph has no output with float elements to judge by",
        where=graph.name,
        fix="make the values before it an output, or pass --no-quality-gate",
    )


def run_one(session: Any, output: str, feeds: Feeds, graph: Path) -> NDArray[Any]:
    """One output for one sample. Raises CheckpointError where onnxruntime fails."""
    ort = import_onnxruntime("judging the result")
    try:
        return np.asarray(session.run([output], dict(feeds))[0])
    except native_faults(ort) as err:
        raise _refused(graph, err) from err


def _refused(graph: Path, err: Exception) -> CheckpointError:
    message = first_line(err).replace(str(graph.parent), "")
    return CheckpointError(
        f"onnxruntime cannot run the graph: {message}", where=f"{graph.name} ({format_bytes(graph.stat().st_size)})"
    )
