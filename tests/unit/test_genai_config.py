"""genai_config.json: the builder for any model type, the phi4mm config against the published one, cache cost."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from support.real_model import REAL

import phi4mm_export
from phi4mm_export.errors import SystemLimitError, UsageError
from phi4mm_export.spec.contract import FILE_NAMES, Component, FloatType, PackageLayout, Provider
from phi4mm_export.spec.genai import GenaiConfigGenerator, PackageKind, package_kind
from phi4mm_export.spec.json_text import json_bytes
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.phi4mm_config import (
    check_device,
    choose_max_length,
    kv_bytes_per_token,
    largest_max_length,
    official_graphs,
    parse_provider,
    phi4mm_genai_config,
)
from phi4mm_export.spec.tokens import TokenIds

DATA = Path(__file__).parents[1] / "data"
TARGET = (DATA / "genai_config.target.json").read_bytes()
TOKENS = TokenIds(bos=199999, eos=(200020, 199999), pad=199999)
DIMS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
PHI4MM_VISION = {
    "pixel_values": "pixel_values",
    "attention_mask": "image_attention_mask",
    "image_sizes": "image_sizes",
}


def generator(model_type: str = "llama", **changes: Any) -> GenaiConfigGenerator:
    return GenaiConfigGenerator(model_type, **{**DIMS, **changes})


def phi4mm(**options: Any) -> dict[str, Any]:
    return phi4mm_genai_config(REAL, tokens=TOKENS, layout=PackageLayout.NESTED, **options)


def differences(found: Any, wanted: Any, path: str = "") -> dict[str, Any]:
    """Dotted path -> found value, for every leaf that the wanted document lacks or has with another value."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        result: dict[str, Any] = {f"{path}-{key}": None for key in wanted if key not in found}
        for key, value in found.items():
            result |= differences(value, wanted.get(key), f"{path}.{key}" if path else key)
        return result
    return {} if found == wanted and type(found) is type(wanted) else {path: found}


def test_the_builder_is_a_public_name_of_the_package() -> None:
    assert phi4mm_export.GenaiConfigGenerator is GenaiConfigGenerator


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = phi4mm_export.NoSuchName  # type: ignore[attr-defined]


def test_the_real_config_in_the_nested_layout_is_the_published_target_byte_for_byte() -> None:
    assert json_bytes(phi4mm()) == TARGET


def test_the_builder_alone_reaches_the_published_target_in_the_same_key_order() -> None:
    built = (
        GenaiConfigGenerator(
            "phi4_multimodal",
            vocab_size=200064,
            hidden_size=3072,
            num_hidden_layers=32,
            num_attention_heads=24,
            num_key_value_heads=8,
            head_dim=128,
            context_length=131072,
            bos_token_id=199999,
            eos_token_id=[200020, 199999],
            pad_token_id=199999,
        )
        .with_vision(
            spatial_merge_size=None,
            config_filename="vision_processor.json",
            input_names=PHI4MM_VISION,
        )
        .with_speech()
    )
    assert json_bytes(built.generate()) == TARGET


def test_the_flat_layout_changes_the_file_names_only() -> None:
    flat = phi4mm_genai_config(REAL, tokens=TOKENS, layout=PackageLayout.FLAT)
    names = {f"model.{part}.filename": FILE_NAMES[PackageLayout.FLAT][part] for part in Component}
    assert differences(flat, json.loads(TARGET)) == names


def test_cuda_adds_one_provider_whose_device_is_a_string() -> None:
    added = differences(phi4mm(provider=Provider.CUDA), json.loads(TARGET))
    assert added == {"model.decoder.session_options.provider_options": [{"cuda": {"device_id": "0"}}]}


@pytest.mark.parametrize(("provider", "device"), [(Provider.CPU, "cpu:0"), (Provider.CUDA, "gpu:0")])
def test_releasing_the_arena_names_the_device_of_the_provider_for_both_towers(provider: Provider, device: str) -> None:
    model = phi4mm(provider=provider, release_arena=True)["model"]
    wanted = {"memory.enable_memory_arena_shrinkage": device}
    assert model["vision"]["run_options"] == model["speech"]["run_options"] == wanted
    assert "run_options" not in model["decoder"]
    assert "run_options" not in model["embedding"]


def test_adapter_files_are_named_beside_the_processor_of_their_role() -> None:
    model = phi4mm(adapters=(Role.VISION, Role.SPEECH))["model"]
    assert list(model["vision"])[:3] == ["filename", "config_filename", "adapter_filename"]
    assert model["vision"]["adapter_filename"] == "phi-4-mm-vision.onnx_adapter"
    assert model["speech"]["adapter_filename"] == "phi-4-mm-speech.onnx_adapter"


def test_one_adapter_leaves_the_other_section_alone() -> None:
    added = differences(phi4mm(adapters=(Role.SPEECH,)), json.loads(TARGET))
    assert added == {"model.speech.adapter_filename": "phi-4-mm-speech.onnx_adapter"}


def test_a_package_without_speech_says_so_explicitly() -> None:
    graphs = official_graphs(PackageLayout.NESTED)
    del graphs[Component.SPEECH]
    model = phi4mm(graphs=graphs)["model"]
    assert model["speech"] == {"filename": "", "config_filename": ""}


def test_a_cache_that_cannot_be_shared_is_stated() -> None:
    added = differences(phi4mm(share_cache=False), json.loads(TARGET))
    assert added == {"search.past_present_share_buffer": False}


def test_a_decoder_only_config_takes_ids_and_has_no_towers() -> None:
    config = generator(context_length=2048).generate()
    model = config["model"]
    assert model["type"] == "llama"
    assert model["decoder"]["filename"] == "model.onnx"
    assert "input_ids" in model["decoder"]["inputs"]
    assert "inputs_embeds" not in model["decoder"]["inputs"]
    assert not {"vision", "speech", "embedding", "bos_token_id", "eos_token_id", "pad_token_id"} & set(model)
    assert config["search"]["max_length"] == model["context_length"] == 2048
    assert config["search"]["past_present_share_buffer"] is False


def test_the_context_length_is_4096_unless_given() -> None:
    assert generator().generate()["model"]["context_length"] == 4096


def test_a_vision_language_config_has_grid_inputs_and_an_embedding_without_audio() -> None:
    model = generator("qwen2_5_vl").with_vision(image_token_id=151655).generate()["model"]
    assert model["vision"] == {
        "filename": "vision/model.onnx",
        "config_filename": "processor_config.json",
        "inputs": {"pixel_values": "pixel_values", "image_grid_thw": "image_grid_thw"},
        "outputs": {"image_features": "image_features"},
        "spatial_merge_size": 2,
    }
    assert model["embedding"]["inputs"] == {"input_ids": "input_ids", "image_features": "image_features"}
    assert "inputs_embeds" in model["decoder"]["inputs"]
    assert "input_ids" not in model["decoder"]["inputs"]
    assert model["image_token_id"] == 151655
    assert "speech" not in model


def test_a_speech_config_embeds_ids_and_audio_features() -> None:
    model = generator().with_speech(audio_token_id=7).generate()["model"]
    assert model["speech"]["inputs"] == {
        "audio_embeds": "audio_embeds",
        "attention_mask": "audio_attention_mask",
        "audio_sizes": "audio_sizes",
        "audio_projection_mode": "audio_projection_mode",
    }
    assert model["speech"]["config_filename"] == "speech_processor.json"
    assert model["embedding"]["inputs"] == {"input_ids": "input_ids", "audio_features": "audio_features"}
    assert "inputs_embeds" in model["decoder"]["inputs"]
    assert model["audio_token_id"] == 7
    assert "vision" not in model


@pytest.mark.parametrize("first", ["vision", "speech"])
def test_a_four_model_config_does_not_depend_on_the_order_of_calls(first: str) -> None:
    built = generator()
    built = built.with_vision().with_speech() if first == "vision" else built.with_speech().with_vision()
    model = built.generate()["model"]
    assert list(model["embedding"]["inputs"]) == ["input_ids", "image_features", "audio_features"]
    assert [key for key in model if key in ("decoder", "vision", "speech", "embedding")] == [
        "decoder", "vision", "speech", "embedding",
    ]  # fmt: skip
    assert "image_token_id" not in model
    assert "audio_token_id" not in model


def test_a_merge_size_of_none_is_left_out() -> None:
    assert "spatial_merge_size" not in generator().with_vision(spatial_merge_size=None).generate()["model"]["vision"]


def test_names_of_tensors_and_files_can_be_replaced() -> None:
    model = (
        generator()
        .with_vision(
            filename="v.onnx",
            embedding_filename="e.onnx",
            output_names={"image_features": "feats"},
            embedding_input_names={"input_ids": "input_ids", "image_features": "feats"},
            embedding_output_names={"inputs_embeds": "x"},
        )
        .with_speech(filename="s.onnx", output_names={"audio_features": "sounds"})
        .with_decoder(filename="d.onnx")
        .generate()["model"]
    )
    assert [model[part]["filename"] for part in ("decoder", "vision", "speech", "embedding")] == [
        "d.onnx", "v.onnx", "s.onnx", "e.onnx",
    ]  # fmt: skip
    assert model["embedding"]["inputs"] == {"input_ids": "input_ids", "image_features": "feats"}
    assert model["embedding"]["outputs"] == {"inputs_embeds": "x"}


def test_generating_twice_gives_equal_documents_that_share_nothing() -> None:
    built = generator(eos_token_id=[1, 2]).with_vision().with_speech().with_provider("cuda", {"device_id": "0"})
    first = built.generate()
    untouched = copy.deepcopy(first)
    first["model"]["eos_token_id"].append(3)
    first["model"]["vision"]["inputs"].clear()
    first["model"]["decoder"]["session_options"]["provider_options"].clear()
    first["search"]["top_k"] = 99
    assert built.generate() == untouched


def test_generating_does_not_freeze_the_builder() -> None:
    built = generator().with_vision()
    before = built.generate()["model"]["embedding"]["inputs"]
    after = built.with_speech().generate()["model"]["embedding"]["inputs"]
    assert "audio_features" not in before
    assert "audio_features" in after


def test_arguments_are_copied_when_they_are_given() -> None:
    names, ids = dict(PHI4MM_VISION), [1, 2]
    built = generator(eos_token_id=ids).with_vision(input_names=names)
    names.clear()
    ids.clear()
    model = built.generate()["model"]
    assert model["vision"]["inputs"] == PHI4MM_VISION
    assert model["eos_token_id"] == [1, 2]


@pytest.mark.parametrize("name", ["phi4mm", "phi4_multimodal"])
def test_both_names_of_the_model_map_to_the_runtimes_type_and_share_the_cache(name: str) -> None:
    config = generator(name).generate()
    assert config["model"]["type"] == "phi4mm"
    assert config["search"]["past_present_share_buffer"] is True


@pytest.mark.parametrize(
    ("components", "kind"),
    [
        (["model"], PackageKind.DECODER_ONLY),
        (["model", "vision"], PackageKind.DECODER_ONLY),
        (["model", "vision", "embedding"], PackageKind.VISION_LANGUAGE),
        (["model", "speech"], PackageKind.SPEECH),
        (["model", "vision", "embedding", "speech"], PackageKind.MULTIMODAL),
    ],
)
def test_the_kind_of_a_package_follows_from_what_it_holds(components: list[str], kind: PackageKind) -> None:
    assert package_kind(components) is kind


def test_provider_options_are_written_as_strings() -> None:
    options = generator().with_provider("cuda", {"device_id": 0}).generate()  # type: ignore[dict-item]
    assert options["model"]["decoder"]["session_options"]["provider_options"] == [{"cuda": {"device_id": "0"}}]


@pytest.mark.parametrize("target", ["", "genai_config.json", "new folder/genai_config.json"])
def test_write_takes_a_folder_or_a_file_and_leaves_nothing_else(tmp_path: Path, target: str) -> None:
    path = generator().write(tmp_path / target)
    assert path.name == "genai_config.json"
    assert json.loads(path.read_text(encoding="utf-8")) == generator().generate()
    assert [file.name for file in path.parent.iterdir()] == ["genai_config.json"]
    assert path.read_bytes().endswith(b"}\n")


def test_the_cache_of_the_real_model_costs_128_kib_per_token_in_float16() -> None:
    assert kv_bytes_per_token(REAL, FloatType.FLOAT16) == 128 << 10
    assert kv_bytes_per_token(REAL, FloatType.FLOAT32) == 256 << 10


def test_a_budget_picks_the_largest_length_that_fits_and_never_more_than_the_context() -> None:
    assert largest_max_length(REAL, FloatType.FLOAT16, (4096 * 128 << 10) - 1) == 4095
    assert choose_max_length(REAL, FloatType.FLOAT16, max_length=None, budget_nbytes=512 << 20) == 4096
    assert choose_max_length(REAL, FloatType.FLOAT16, max_length=None, budget_nbytes=1 << 40) == 131072


def test_without_wishes_the_length_is_the_context() -> None:
    assert choose_max_length(REAL, FloatType.FLOAT16, max_length=None, budget_nbytes=None) == 131072


def test_more_than_the_budget_is_refused_with_the_largest_length_that_fits() -> None:
    with pytest.raises(SystemLimitError, match="4,096") as caught:
        choose_max_length(REAL, FloatType.FLOAT16, max_length=4097, budget_nbytes=512 << 20)
    assert caught.value.exit_code == 6


@pytest.mark.parametrize("length", [0, -1, 131073])
def test_a_length_outside_the_context_is_refused_with_both_numbers(length: int) -> None:
    with pytest.raises(UsageError, match="131,072"):
        choose_max_length(REAL, FloatType.FLOAT16, max_length=length, budget_nbytes=None)


@pytest.mark.parametrize(
    ("name", "provider"),
    [("cuda", Provider.CUDA), ("CUDAExecutionProvider", Provider.CUDA), ("CPUExecutionProvider", Provider.CPU)],
)
def test_providers_are_known_under_both_spellings(name: str, provider: Provider) -> None:
    assert parse_provider(name) is provider


def test_an_unknown_provider_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="CUDAExecutionProvider"):
        parse_provider("gpu")


def test_another_device_is_refused_with_the_way_to_mask_it() -> None:
    with pytest.raises(UsageError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1"):
        check_device(1)
