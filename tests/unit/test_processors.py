"""vision_processor.json and speech_processor.json against the published files and the checkpoint's preprocessor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phi4mm_export.errors import CheckpointError
from phi4mm_export.package.configs import read_processor_values
from phi4mm_export.spec.json_text import json_bytes, parse_object
from phi4mm_export.spec.processors import (
    ProcessorValues,
    processor_values,
    speech_processor,
    vision_processor,
)

DATA = Path(__file__).parents[1] / "data"
WHERE = "preprocessor_config.json"


def attributes(document: dict[str, Any], operator: str) -> dict[str, Any]:
    """The attributes of one operator of a processor file."""
    part = document.get("processor") or document["feature_extraction"]
    steps = [step["operation"] for step in part.get("transforms") or part["sequence"]]
    return next(step["attrs"] for step in steps if step["type"] == operator)


def test_the_vision_processor_of_the_original_checkpoint_is_the_published_one() -> None:
    assert json_bytes(vision_processor(ProcessorValues())) == (DATA / "vision_processor.json").read_bytes()


def test_the_speech_processor_adds_only_the_lifted_limit_to_the_published_one() -> None:
    ours = speech_processor(ProcessorValues())
    assert attributes(ours, "AudioDecoderEx").pop("max_samples") == 0
    assert json_bytes(ours) == (DATA / "speech_processor.json").read_bytes()


def test_the_flag_restores_the_published_limit_byte_for_byte() -> None:
    original = speech_processor(ProcessorValues(), original_audio_limit=True)
    assert json_bytes(original) == (DATA / "speech_processor.json").read_bytes()


def test_fewer_crops_of_a_fine_tune_reach_the_vision_processor() -> None:
    values = processor_values({"dynamic_hd": 12}, where=WHERE)
    assert attributes(vision_processor(values), "Phi4VisionDynamicPreprocess")["dynamic_hd"] == 12


def test_the_compression_rate_follows_the_checkpoint() -> None:
    values = processor_values({"audio_compression_rate": 4}, where=WHERE, time_reduction=4)
    assert attributes(speech_processor(values), "Phi4AudioEmbed")["audio_compression_rate"] == 4


def test_whole_numbers_among_the_channel_means_become_floats_as_the_runtime_wants_them() -> None:
    values = processor_values({"image_mean": [0, 0.5, 1], "image_std": [1, 1, 1]}, where=WHERE)
    text = json_bytes(vision_processor(values)).decode()
    assert parse_object(text, "x")["processor"]["transforms"][3]["operation"]["attrs"]["mean"] == [0.0, 0.5, 1.0]
    assert "1.0" in text


@pytest.mark.parametrize("value", [0, -1, 36.0, "36", True, [36], 1 << 40])
def test_a_crop_number_that_the_runtime_cannot_take_is_refused_by_key(value: Any) -> None:
    with pytest.raises(CheckpointError, match="whole number") as caught:
        processor_values({"dynamic_hd": value}, where=WHERE)
    assert caught.value.where == "preprocessor_config.json: dynamic_hd"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("audio_compression_rate", 4),
        ("audio_downsample_rate", 2),
        ("sampling_rate", 8000),
        ("size", {"height": 336, "width": 336}),
        ("image_std", [0.5, 0.5, 0]),
        ("image_mean", [0.5, 0.5]),
    ],
)
def test_a_value_that_the_graphs_cannot_follow_is_refused_by_key(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        processor_values({key: value}, where=WHERE)
    assert caught.value.where == f"{WHERE}: {key}"


def test_keys_of_the_native_layout_are_accepted() -> None:
    native = {"size": {"height": 448, "width": 448}, "hop_length": 160, "n_fft": 512, "image_mean": [0.5, 0.5, 0.5]}
    assert processor_values(native, where=WHERE) == ProcessorValues()


def test_newer_transformers_keep_the_values_in_processor_config(tmp_path: Path) -> None:
    nested = {"image_processor": {"dynamic_hd": 8}, "feature_extractor": {"audio_compression_rate": 8}}
    (tmp_path / "processor_config.json").write_bytes(json_bytes(nested))
    values, warnings = read_processor_values(tmp_path, time_reduction=8)
    assert (values.dynamic_hd, warnings) == (8, ())


def test_without_any_preprocessor_file_the_published_values_are_taken_with_a_warning(tmp_path: Path) -> None:
    values, warnings = read_processor_values(tmp_path, time_reduction=8)
    assert values == ProcessorValues()
    assert "preprocessor_config.json" in warnings[0]
