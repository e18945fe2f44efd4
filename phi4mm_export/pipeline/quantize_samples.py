"""The samples that a quantization calibrates on or is judged by, for whichever graph it works on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phi4mm_export.errors import UsageError
from phi4mm_export.runtime.calibration import BUILTIN, SpeechCalibrationReader, VisionCalibrationReader
from phi4mm_export.runtime.calibration_npz import NpzReader
from phi4mm_export.runtime.calibration_prompts import TextCalibrationReader
from phi4mm_export.runtime.calibration_samples import Samples, collected
from phi4mm_export.runtime.calibration_sources import SampleKind, find_files, holds_arrays
from phi4mm_export.runtime.package import RunPackage
from phi4mm_export.spec.contract import Component

WHAT_GPTQ_NEEDS = (
    "gptq measures what the weights do to real inputs, so it needs samples: --calibration with a folder, list (.txt), "
    "glob or .zip of pictures (vision), clips (speech) or prompts (decoder), of .npz files for a plain .onnx file, or "
    "'builtin' for made-up media"
)

KINDS = {
    Component.VISION: SampleKind.IMAGE,
    Component.SPEECH: SampleKind.AUDIO,
    Component.DECODER: SampleKind.PROMPT,
}
"""What the files of each graph's samples hold."""


def open_samples(
    graph: Path,
    package: RunPackage | None,
    component: Component | None,
    source: str | Path | None,
    spool: Path,
    *,
    num_samples: int | None = None,
    seed: int = 0,
    skip_unreadable: bool = False,
) -> Samples | None:
    """The reader for a source: .npz files for a plain graph (or whenever the source is such files), else what the
    component takes; None for no source. Every file is checked here, before any forward pass.

    spool: an empty folder for what has to be computed first. Raises UsageError for unusable sources and files.
    """
    if source is None:
        return None
    options: dict[str, Any] = {"num_samples": num_samples, "seed": seed, "skip_unreadable": skip_unreadable}
    if package is None or (str(source) != BUILTIN and holds_arrays(source)):
        if str(source) == BUILTIN:
            raise UsageError(
                "there is no builtin set for a plain .onnx file",
                where="--calibration builtin",
                fix="give a folder of .npz files, one a sample, whose keys are the graph's inputs",
            )
        return NpzReader(source, graph, **options)
    if component is Component.VISION:
        return VisionCalibrationReader(package, source, **options)
    if component is Component.SPEECH:
        return SpeechCalibrationReader(package, source, **options)
    return TextCalibrationReader(package, source, spool, **options)


def check_sample_source(source: str | Path, component: Component | None, *, option: str = "--calibration") -> None:
    """Raise UsageError for samples that are not there, without reading one of them.

    component: None for a plain .onnx file.
    """
    if str(source) != BUILTIN and not holds_arrays(source):
        find_files(source, SampleKind.ARRAYS if component is None else KINDS[component], option=option)


def foreign_samples(reader: object, spool: Path) -> Samples:
    """The samples of any object with `get_next()`, stored once."""
    return collected(reader, spool)


def unseen_modes(samples: Samples | None, package: RunPackage | None) -> tuple[str, ...]:
    """A remark when a gated decoder is calibrated on prompts that leave an adapter out."""
    if not isinstance(samples, TextCalibrationReader) or package is None or not package.gated:
        return ()
    modes = samples.modes
    unseen = [] if modes["image"] + modes["both"] else ["pictures: the vision adapter"]
    unseen += [] if modes["audio"] else ["clips alone: the speech adapter"]
    return tuple(f"no prompt has {what} was not calibrated" for what in unseen)
