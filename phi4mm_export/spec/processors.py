"""vision_processor.json and speech_processor.json: how onnxruntime-genai turns images and audio into tensors.

Operators and attributes are those of onnxruntime-extensions; values that the checkpoint's preprocessor config states
come from there, all others are the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phi4mm_export.errors import CheckpointError
from phi4mm_export.spec.json_text import json_kind
from phi4mm_export.spec.model import IMAGE_SIZE

VISION_PROCESSOR_FILE = "vision_processor.json"
SPEECH_PROCESSOR_FILE = "speech_processor.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
"""Where newer transformers versions keep the same values, in `image_processor` and `feature_extractor`."""
FIXED_VALUES: Mapping[str, int] = {
    "audio_downsample_rate": 1,
    "audio_feat_stride": 1,
    "feature_size": 80,
    "sampling_rate": 16000,
    "win_length": 400,
    "hop_length": 160,
    "n_fft": 512,
    "patch_size": 14,
}
"""Keys of either layout whose value is built into the graphs or the runtime's processors."""
MOST_CROPS = 1 << 16
"""Far above any use; keeps the number inside the runtime's integer."""


@dataclass(frozen=True)
class ProcessorValues:
    """What the preprocessor config of a checkpoint decides."""

    dynamic_hd: int = 36
    """Most sub-crops of one image."""
    audio_compression_rate: int = 8
    """Frames per audio token, rounded up."""
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)


def processor_values(preprocessor: Mapping[str, Any], *, where: str, time_reduction: int = 8) -> ProcessorValues:
    """The values of a preprocessor config; absent keys have the published values.

    `time_reduction` is the audio encoder's own factor: with another compression rate the runtime would expect
    another number of audio tokens than the graph gives. Raises CheckpointError naming the key for a value that the
    runtime's processors or the graphs cannot take.
    """
    defaults = ProcessorValues()
    rate = _whole(preprocessor, "audio_compression_rate", where, least=1, absent=time_reduction)
    if rate != time_reduction:
        raise CheckpointError(
            f"found {rate}, the audio encoder of this model shortens by {time_reduction}",
            where=f"{where}: audio_compression_rate",
            fix=f"write {time_reduction}",
        )
    _check_fixed_values(preprocessor, where)
    _check_crop_size(preprocessor, where)
    return ProcessorValues(
        dynamic_hd=_whole(preprocessor, "dynamic_hd", where, least=1, absent=defaults.dynamic_hd),
        audio_compression_rate=rate,
        image_mean=_channels(preprocessor, "image_mean", where, defaults.image_mean),
        image_std=_channels(preprocessor, "image_std", where, defaults.image_std, positive=True),
    )


def merged_preprocessor(processor: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a processor_config.json in the flat form of preprocessor_config.json."""
    merged: dict[str, Any] = {}
    for key in ("image_processor", "feature_extractor"):
        part = processor.get(key)
        if isinstance(part, Mapping):
            merged |= part
    return merged or dict(processor)


def vision_processor(values: ProcessorValues) -> dict[str, Any]:
    """vision_processor.json."""
    return {
        "processor": {
            "name": "phi_4_vision_processor",
            "transforms": [
                _operation("decode_image", "DecodeImage", attrs={"color_space": "RGB"}),
                _operation(
                    "phi4_vision_dynamic_preprocess",
                    "Phi4VisionDynamicPreprocess",
                    attrs={"dynamic_hd": values.dynamic_hd, "dyhd_base_resolution": IMAGE_SIZE},
                ),
                _operation("rescale", "Rescale", inputs=[":0"]),
                _operation(
                    "normalize", "Normalize", attrs={"mean": list(values.image_mean), "std": list(values.image_std)}
                ),
                _operation(
                    "phi4_vision_processor",
                    "Phi4VisionProcessor",
                    inputs=[":0", "phi4_vision_dynamic_preprocess:1"],
                    attrs={"dyhd_base_resolution": IMAGE_SIZE, "interpolation": "CUBIC"},
                ),
            ],
            "output_aligner": "phi4-vision-aligner",
        }
    }


def speech_processor(values: ProcessorValues, *, original_audio_limit: bool = False) -> dict[str, Any]:
    """speech_processor.json. Clips of any length pass whole, unless `original_audio_limit` restores the cut at 30 s.

    The cut is the decoder's default of 480,000 samples at 16 kHz; `max_samples` 0 means no limit.
    """
    decoder: dict[str, Any] = {"target_sample_rates": [8000, 16000]}
    if not original_audio_limit:
        decoder["max_samples"] = 0
    mel = {"chunk_size": 30, "hop_length": 160, "n_fft": 512, "n_mel": 80, "feature_first": 0, "no_padding": 1}
    embed = {
        "audio_compression_rate": values.audio_compression_rate,
        **_prefixed("stft_normal/", {"n_fft": 512, "frame_length": 400, "hop_length": 160, "win_fn": "hamming"}),
        **_prefixed("logmel/", mel),
        **_prefixed("stft_normal_8k/", {"n_fft": 256, "frame_length": 200, "hop_length": 80, "win_fn": "hamming"}),
        **_prefixed("logmel_8k/", {**mel, "hop_length": 80}),
    }
    return {
        "feature_extraction": {
            "sequence": [
                _operation("audio_decoder", "AudioDecoderEx", attrs=decoder),
                _operation("phi_4_audio_embed", "Phi4AudioEmbed", attrs=embed),
            ],
            "output_aligner": "phi4-audio-aligner",
        }
    }


def _operation(
    name: str, kind: str, *, inputs: list[str] | None = None, attrs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    body: dict[str, Any] = {"name": name, "type": kind}
    if inputs is not None:
        body["inputs"] = inputs
    if attrs is not None:
        body["attrs"] = dict(attrs)
    return {"operation": body}


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + key: value for key, value in values.items()}


def _whole(preprocessor: Mapping[str, Any], key: str, where: str, *, least: int, absent: int) -> int:
    value = preprocessor.get(key)
    if value is None:
        return absent
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_CROPS:
        shown = repr(value) if isinstance(value, int | float | str) else json_kind(value)
        raise CheckpointError(
            f"expected a whole number from {least} to {MOST_CROPS:,}, found {shown}",
            where=f"{where}: {key}",
            fix=f"write a whole number, for example {absent}",
        )
    return value


def _check_fixed_values(preprocessor: Mapping[str, Any], where: str) -> None:
    for key, wanted in FIXED_VALUES.items():
        value = preprocessor.get(key)
        if value is not None and (isinstance(value, bool) or value != wanted):
            raise CheckpointError(
                f"found {value!r}, expected {wanted}: the graphs and the runtime's processors know no other value",
                where=f"{where}: {key}",
                fix=f"write {wanted}",
            )


def _check_crop_size(preprocessor: Mapping[str, Any], where: str) -> None:
    """Crops are IMAGE_SIZE pixels square in graphs and runtime; the key occurs in the native layout only."""
    for key in ("size", "crop_size", "dyhd_base_resolution"):
        value = preprocessor.get(key)
        sides = list(value.values()) if isinstance(value, Mapping) else [value]
        if value is not None and any(side != IMAGE_SIZE for side in sides):
            raise CheckpointError(
                f"found {value!r}, expected {IMAGE_SIZE}: crops of another size do not fit the vision graph",
                where=f"{where}: {key}",
                fix=f"write {IMAGE_SIZE}",
            )


def _channels(
    preprocessor: Mapping[str, Any], key: str, where: str, absent: tuple[float, ...], *, positive: bool = False
) -> tuple[float, ...]:
    """Three floats; the runtime refuses integers here, so 1 becomes 1.0."""
    value = preprocessor.get(key)
    if value is None:
        return absent
    numbers = value if isinstance(value, list) else []
    fit = [isinstance(number, int | float) and not isinstance(number, bool) for number in numbers]
    if len(numbers) != 3 or not all(fit) or (positive and not all(number > 0 for number in numbers)):
        raise CheckpointError(
            f"expected three {'positive ' if positive else ''}numbers, found {value!r}",
            where=f"{where}: {key}",
            fix=f"write {list(absent)}",
        )
    return tuple(float(number) for number in numbers)
