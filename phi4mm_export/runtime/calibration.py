"""Calibration samples for the graphs of a package: pictures and clips, preprocessed by exactly what og runs.

Each reader follows onnxruntime's CalibrationDataReader protocol (`get_next`, `rewind`, `len`), gives its samples by
number too, and refuses bad sources before the first forward pass. `BUILTIN` as the source stands for made-up media.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from phi4mm_export.errors import PackageError, some
from phi4mm_export.runtime.audio import decode_audio
from phi4mm_export.runtime.builtin_media import DEFAULT_COUNT, builtin_files
from phi4mm_export.runtime.calibration_samples import (
    Feeds,
    GraphInput,
    SamplePlan,
    Samples,
    checked,
    digest_of,
    fit,
    graph_inputs,
)
from phi4mm_export.runtime.calibration_sources import FoundFiles, SampleKind, choose, find_files
from phi4mm_export.runtime.images import decode_image
from phi4mm_export.runtime.package import RunPackage, open_package
from phi4mm_export.runtime.processor import open_processor
from phi4mm_export.runtime.stepping import AUDIO_MODE, BOTH_MODE
from phi4mm_export.spec.contract import Component

BUILTIN = "builtin"
"""The source that stands for seeded synthetic media."""
_ONE_PICTURE = "<|user|>\n<|image_1|>\n<|end|>\n<|assistant|>\n"
_ONE_CLIP = "<|user|>\n<|audio_1|>\n<|end|>\n<|assistant|>\n"


class VisionCalibrationReader(Samples):
    """One picture a sample: the vision graph's inputs, in its own names and element types.

    Pictures go through the screen of `phi4mm run` (upright, opaque, re-encoded), then through og's processor with the
    package's own processor file. Raises UsageError for unusable sources and files (all files named at once, unless
    `skip_unreadable`), PackageError for a package that og refuses.
    """

    def __init__(
        self,
        package: RunPackage | Path | str,
        source: Path | str,
        *,
        num_samples: int | None = None,
        seed: int = 0,
        skip_unreadable: bool = False,
    ) -> None:
        opened, graph, inputs = component_graph(package, Component.VISION)
        found = samples_of(source, SampleKind.IMAGE, num_samples, seed)
        processor = open_processor(opened)
        keys = {key: opened.tensor_name(Component.VISION, key) for key in ("pixel_values", "image_sizes")}
        keys["image_attention_mask"] = opened.tensor_name(Component.VISION, "attention_mask")

        def make(index: int) -> Feeds:
            file = found.files[index]
            arrays = processor(_ONE_PICTURE, [decode_image(file.read(), file.name)]).arrays
            return fit({name: arrays[key] for key, name in keys.items()}, inputs, graph.name)

        super().__init__(checked(_names(found), make, skip_unreadable=skip_unreadable, notes=_passed_over(found)))


class SpeechCalibrationReader(Samples):
    """One clip a sample: the speech graph's inputs, in its own names and element types.

    Both projections of the tower have to see data: clips are taken for speech (mode 2) and for speech beside a picture
    (mode 3) in turn, in the order of their content; a single clip is taken for both. Raises as VisionCalibrationReader.
    """

    def __init__(
        self,
        package: RunPackage | Path | str,
        source: Path | str,
        *,
        num_samples: int | None = None,
        seed: int = 0,
        skip_unreadable: bool = False,
    ) -> None:
        opened, graph, inputs = component_graph(package, Component.SPEECH)
        found = samples_of(source, SampleKind.AUDIO, num_samples, seed)
        processor = open_processor(opened)
        keys = {
            key: opened.tensor_name(Component.SPEECH, key)
            for key in ("audio_embeds", "audio_sizes", "audio_projection_mode")
        }
        keys["audio_attention_mask"] = opened.tensor_name(Component.SPEECH, "attention_mask")

        def make(index: int, mode: int) -> Feeds:
            file = found.files[index]
            arrays = dict(processor(_ONE_CLIP, [], [decode_audio(file.read(), file.name)]).arrays)
            arrays.setdefault("audio_attention_mask", np.ones(arrays["audio_embeds"].shape[:2], np.bool_))
            arrays["audio_projection_mode"] = np.array([mode], np.int64)
            return fit({name: arrays[key] for key, name in keys.items()}, inputs, graph.name)

        clips = checked(
            _names(found),
            lambda index: make(index, AUDIO_MODE),
            skip_unreadable=skip_unreadable,
            notes=_passed_over(found),
        )
        numbers = {name: index for index, name in enumerate(_names(found))}
        samples = [(numbers[clips.names[i]], mode, clips.digests[i]) for i, mode in _modes(clips.digests)]
        super().__init__(
            SamplePlan(
                tuple(found.files[index].name for index, _, _ in samples),
                lambda i: make(*samples[i][:2]),
                tuple(
                    digest if mode == AUDIO_MODE else digest_of(make(index, mode)) for index, mode, digest in samples
                ),
                clips.notes,
                clips.unreadable,
            )
        )


def component_graph(
    package: RunPackage | Path | str, component: Component
) -> tuple[RunPackage, Path, Mapping[str, GraphInput]]:
    """A package opened, the file of one of its graphs, and what that graph must be fed."""
    opened = package if isinstance(package, RunPackage) else open_package(package)
    graph = opened.graph(component)
    if graph is None:
        raise PackageError(f"the package has no {component} graph", where="genai_config.json")
    return opened, graph, graph_inputs(graph)


def samples_of(source: Path | str, kind: SampleKind, num_samples: int | None, seed: int) -> FoundFiles:
    """The files of a source, or made-up ones for BUILTIN; of a larger source `num_samples`, chosen by the seed."""
    if str(source) == BUILTIN:
        return FoundFiles(builtin_files(kind, num_samples or DEFAULT_COUNT, seed))
    found = find_files(source, kind)
    kept = choose([file.name for file in found.files], num_samples, seed)
    return FoundFiles(tuple(found.files[index] for index in kept), found.ignored)


def _modes(digests: Sequence[str]) -> list[tuple[int, int]]:
    """Clip and mode of every sample: speech and both in turn by rank of the digest, so that file order is nothing."""
    if len(digests) == 1:
        return [(0, AUDIO_MODE), (0, BOTH_MODE)]
    rank = {index: place for place, index in enumerate(sorted(range(len(digests)), key=lambda i: digests[i]))}
    return [(index, (AUDIO_MODE, BOTH_MODE)[rank[index] % 2]) for index in range(len(digests))]


def _names(found: FoundFiles) -> list[str]:
    return [file.name for file in found.files]


def _passed_over(found: FoundFiles) -> list[str]:
    if not found.ignored:
        return []
    return [f"{len(found.ignored):,} files passed over, which are no samples by their names: {some(found.ignored)}"]
