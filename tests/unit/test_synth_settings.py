"""Sizes and `--set` keys of synthetic checkpoints: each key does what its name says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phi4mm_export.checkpoint.synth_configs import adapter_config, native_config, original_config
from phi4mm_export.checkpoint.synth_plan import planned_files, planned_tensors
from phi4mm_export.checkpoint.synth_settings import DEFAULTS, Size, SynthSettings, settings_of
from phi4mm_export.errors import UsageError
from phi4mm_export.spec.model import Layout, Role

LAYER = "model.layers.0."
IMAGE = "model.embed_tokens_extend.image_embed."
AUDIO = "model.embed_tokens_extend.audio_embed."
BLOCK = f"{AUDIO}encoder.encoders.0."

SHAPES: dict[str, tuple[Any, str, tuple[int, ...]]] = {
    # key: (value, a tensor, its shape then); the other dimensions are those of size tiny
    "hidden_size": (256, "model.norm.weight", (256,)),
    "intermediate_size": (96, f"{LAYER}mlp.gate_up_proj.base_layer.weight", (192, 128)),
    "num_hidden_layers": (5, "model.layers.4.input_layernorm.weight", (128,)),
    "num_attention_heads": (1, f"{LAYER}self_attn.qkv_proj.base_layer.weight", (128 + 2 * 128, 128)),
    "num_key_value_heads": (2, f"{LAYER}self_attn.qkv_proj.base_layer.weight", (128 + 2 * 2 * 64, 128)),
    "vocab_size": (200100, "model.embed_tokens.weight", (200100, 128)),
    "tie_word_embeddings": (False, "lm_head.weight", (200064, 128)),
    "vision_lora_r": (5, f"{LAYER}mlp.down_proj.lora_A.vision.weight", (5, 160)),
    "speech_lora_r": (7, f"{LAYER}mlp.down_proj.lora_B.speech.weight", (128, 7)),
    "vision_hidden_size": (96, f"{IMAGE}glb_GN", (1, 1, 96)),
    "vision_intermediate_size": (50, f"{IMAGE}img_processor.encoder.layers.0.mlp.fc1.weight", (50, 64)),
    "vision_num_hidden_layers": (6, f"{IMAGE}img_processor.encoder.layers.5.layer_norm1.bias", (64,)),
    "audio_attention_dim": (32, f"{BLOCK}conv.glu.ext_pw_conv_1d.weight", (64, 32, 1)),
    "audio_attention_heads": (8, f"{AUDIO}encoder.relative_attention_bias_layer.bias_values.weight", (1000, 8)),
    "audio_linear_units": (40, f"{BLOCK}feed_forward_in.net.2.weight", (64, 40)),
    "audio_num_blocks": (4, f"{AUDIO}encoder.encoders.3.layer_norm.weight", (64,)),
    "audio_kernel_size": (5, f"{BLOCK}conv.dw_sep_conv_1d.dw_conv.weight", (64, 1, 5)),
    "audio_conv_channels": (8, f"{AUDIO}encoder.embed.out.weight", (64, 80)),
    "t5_bias_max_distance": (30, f"{AUDIO}encoder.relative_attention_bias_layer.bias_values.weight", (60, 4)),
}

CONFIG_KEYS: dict[str, tuple[Any, str, str]] = {
    # key: (value, path in the original config.json, path in the native one)
    "hidden_size": (256, "hidden_size", "hidden_size"),
    "intermediate_size": (96, "intermediate_size", "intermediate_size"),
    "num_hidden_layers": (5, "num_hidden_layers", "num_hidden_layers"),
    "num_attention_heads": (1, "num_attention_heads", "num_attention_heads"),
    "num_key_value_heads": (2, "num_key_value_heads", "num_key_value_heads"),
    "partial_rotary_factor": (0.5, "partial_rotary_factor", "partial_rotary_factor"),
    "vocab_size": (200100, "vocab_size", "vocab_size"),
    "tie_word_embeddings": (False, "tie_word_embeddings", "tie_word_embeddings"),
    "rms_norm_eps": (1e-6, "rms_norm_eps", "rms_norm_eps"),
    "rope_theta": (5000.0, "rope_theta", "rope_theta"),
    "max_position_embeddings": (8192, "max_position_embeddings", "max_position_embeddings"),
    "original_max_position_embeddings": (64, "original_max_position_embeddings", "original_max_position_embeddings"),
    "sliding_window": (100, "sliding_window", "sliding_window"),
    "dtype": ("float16", "torch_dtype", "torch_dtype"),
    "audio_attention_dim": (32, "audio_processor.config.attention_dim", "audio_config.hidden_size"),
    "audio_attention_heads": (8, "audio_processor.config.attention_heads", "audio_config.num_attention_heads"),
    "audio_linear_units": (40, "audio_processor.config.linear_units", "audio_config.intermediate_size"),
    "audio_num_blocks": (4, "audio_processor.config.num_blocks", "audio_config.num_blocks"),
    "audio_kernel_size": (5, "audio_processor.config.kernel_size", "audio_config.kernel_size"),
    "audio_conv_channels": (
        8,
        "audio_processor.config.nemo_conv_settings.conv_channels",
        "audio_config.nemo_conv_channels",
    ),
    "t5_bias_max_distance": (
        30,
        "audio_processor.config.relative_attention_bias_args.t5_bias_max_distance",
        "audio_config.bias_max_distance",
    ),
}

ADAPTER_KEYS = {"vision_lora_r": 5, "vision_lora_alpha": 11, "speech_lora_r": 7, "speech_lora_alpha": 13}
NATIVE_VISION_KEYS = {
    "vision_hidden_size": (96, "hidden_size"),
    "vision_intermediate_size": (50, "intermediate_size"),
    "vision_num_hidden_layers": (6, "num_hidden_layers"),
}
FILE_KEYS = {"shards", "dtype", "fp32_pattern", "adapter_prefix", "short_factor_step"}
"""Each has its own test below."""


def _tiny(key: str, value: Any) -> SynthSettings:
    return settings_of(Size.TINY, [f"{key}={json.dumps(value)}"])


def _at(document: dict[str, Any], path: str) -> Any:
    value: Any = document
    for key in path.split("."):
        value = value[key]
    return value


def test_every_key_has_a_test_in_this_file() -> None:
    assert {*SHAPES, *CONFIG_KEYS, *ADAPTER_KEYS, *NATIVE_VISION_KEYS, *FILE_KEYS} == set(SynthSettings.model_fields)


@pytest.mark.parametrize("key", SHAPES)
def test_a_dimension_is_found_in_the_tensor_it_shapes(key: str) -> None:
    value, name, shape = SHAPES[key]

    shapes = {row.name: row.shape for row in planned_tensors(_tiny(key, value))}

    assert shapes[name] == shape


@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_a_setting_is_found_in_both_config_files(key: str) -> None:
    value, original, native = CONFIG_KEYS[key]

    settings = _tiny(key, value)

    assert _at(original_config(settings), original) == value
    assert _at(native_config(settings), native) == value


@pytest.mark.parametrize("key", ADAPTER_KEYS)
def test_rank_and_alpha_are_found_in_the_adapter_configs(key: str) -> None:
    role, _, kind = key.split("_")
    name = {"r": "r", "alpha": "lora_alpha"}[kind]

    settings = _tiny(key, ADAPTER_KEYS[key])

    assert original_config(settings)[f"{role}_lora"][name] == ADAPTER_KEYS[key]
    assert adapter_config(settings, Role(role))[name] == ADAPTER_KEYS[key]


@pytest.mark.parametrize("key", NATIVE_VISION_KEYS)
def test_the_vision_tower_is_described_in_the_native_config(key: str) -> None:
    value, name = NATIVE_VISION_KEYS[key]

    assert native_config(_tiny(key, value))["vision_config"][name] == value


def test_short_factors_grow_by_their_step_and_stay_at_one_at_full_size() -> None:
    assert original_config(_tiny("short_factor_step", 0.5))["rope_scaling"]["short_factor"][:3] == [1.0, 1.5, 2.0]
    assert set(original_config(DEFAULTS[Size.FULL])["rope_scaling"]["short_factor"]) == {1.0}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shards_split_the_tensors_in_order(count: int) -> None:
    settings = _tiny("shards", count)
    rows = planned_tensors(settings)

    files = planned_files(settings, Layout.ORIGINAL, rows)

    assert len(files) == count
    assert [tensor.name for file in files for tensor in file.tensors] == [row.name for row in rows]
    assert max(len(file.tensors) for file in files) - min(len(file.tensors) for file in files) <= 1


def test_dtype_is_the_stored_type_and_fp32_pattern_keeps_some_tensors_wide() -> None:
    settings = settings_of(Size.TINY, ["dtype=float16", "fp32_pattern=layer_norm"])

    (first, second) = planned_files(settings, Layout.NATIVE, planned_tensors(settings))[:2]

    types = {tensor.name: tensor.dtype for tensor in (*first.tensors, *second.tensors)}
    assert {dtype for name, dtype in types.items() if "layer_norm" in name} == {"F32"}
    assert {dtype for name, dtype in types.items() if "layer_norm" not in name} == {"F16"}


def test_adapter_prefix_stands_before_the_names_of_native_adapters_only() -> None:
    settings = _tiny("adapter_prefix", "base_model.model.")

    files = {file.path: file for file in planned_files(settings, Layout.NATIVE, planned_tensors(settings))}

    adapters = files["vision-lora/adapter_model.safetensors"].tensors
    assert adapters[0].name == "base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight"
    assert not any(tensor.name.startswith("base") for tensor in files["model-00001-of-00002.safetensors"].tensors)


def test_tiny_differs_between_the_adapters_and_has_short_factors_that_are_not_one() -> None:
    tiny = DEFAULTS[Size.TINY]

    assert tiny.vision_lora_r != tiny.speech_lora_r
    assert tiny.vision_lora_alpha / tiny.vision_lora_r != tiny.speech_lora_alpha / tiny.speech_lora_r
    assert original_config(tiny)["rope_scaling"]["short_factor"][1] == 1.01


def test_a_misspelt_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="found hiden_size; the nearest name is hidden_size"):
        settings_of(Size.TINY, ["hiden_size=256"])


def test_a_pair_without_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match="expected key=value, found 'shards'"):
        settings_of(Size.TINY, ["shards"])


def test_wrong_values_are_refused_together_and_say_what_was_found() -> None:
    with pytest.raises(UsageError) as caught:
        settings_of(Size.TINY, ["shards=0", "dtype=int8", "vocab_size=1000", "hidden_size=64.5"])

    assert "shards: input should be greater than 0, found 0" in caught.value.what
    assert "dtype: input should be 'bfloat16', 'float16' or 'float32', found 'int8'" in caught.value.what
    assert "vocab_size: input should be greater than or equal to 200064, found 1000" in caught.value.what
    assert "hidden_size: input should be a valid integer" in caught.value.what


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        (
            ["num_attention_heads=3", "num_key_value_heads=1"],
            "hidden_size / num_attention_heads is 42.6667,",
        ),
        (["hidden_size=48"], "hidden_size / num_attention_heads is 24, expected a multiple of 16"),
        (["partial_rotary_factor=0.6"], "the rotary dimension is 38, expected a multiple of 16"),
        (["num_attention_heads=4", "num_key_value_heads=3"], "4 attention heads are no multiple of 3 key-value heads"),
        (["vision_hidden_size=40"], "vision_hidden_size is 40, expected a multiple of its 16 heads"),
        (["audio_attention_heads=5"], "audio_attention_dim 64 is no multiple of 5 heads"),
        (["max_position_embeddings=100"], "original_max_position_embeddings 4096 exceeds max_position_embeddings 100"),
    ],
)
def test_dimensions_that_do_not_go_together_are_refused(pairs: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match="agree") as caught:
        settings_of(Size.TINY, pairs)

    assert sentence in caught.value.what
