"""The JSON files of a synthetic checkpoint: config of both layouts, generation, preprocessor and adapter configs.

Keys, their order and their values are those of the real files, dimensions aside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from phi4mm_export.checkpoint.synth_settings import SynthSettings, rope_factors
from phi4mm_export.spec.model import (
    AUDIO_TOKEN_ID,
    IMAGE_SIZE,
    IMAGE_TOKEN_ID,
    PATCH_SIZE,
    SIGLIP_EPS,
    SIGLIP_HEADS,
    Layout,
    Role,
)

END_OF_TEXT_ID, END_ID = 199999, 200020
MELS, REDUCTION = 80, 8
LORA_DROPOUT = {Role.VISION: 0.0, Role.SPEECH: 0.01}
LORA_LAYERS = {
    Role.VISION: r"layers.*((self_attn\.(qkv_proj|o_proj))|(mlp\.(gate_up|down)_proj))",
    Role.SPEECH: r"((layers.*self_attn\.(qkv|o)_proj)|(layers.*mlp\.(gate_up|down)_proj))",
}


def json_text(value: dict[str, Any]) -> str:
    """Two-space indent and a final newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def side_files(settings: SynthSettings, layout: Layout) -> Iterator[tuple[str, str]]:
    """Path and text of every JSON file but the index and the tokenizer's."""
    if layout is Layout.ORIGINAL:
        yield "config.json", json_text(original_config(settings))
    else:
        yield "config.json", json_text(native_config(settings))
        for role in Role:
            yield f"{role}-lora/adapter_config.json", json_text(adapter_config(settings, role))
    yield "generation_config.json", json_text(_generation_config())
    yield "preprocessor_config.json", json_text(_preprocessor_config(layout))


def original_config(s: SynthSettings) -> dict[str, Any]:
    """config.json as Microsoft's remote code reads it; the SigLIP tower has no keys there."""
    short, long = rope_factors(s)
    return {
        "_name_or_path": "Phi-4-multimodal-instruct",
        "architectures": ["Phi4MMForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "audio_processor": {"config": _original_audio(s), "name": "cascades"},
        "auto_map": {
            "AutoConfig": "configuration_phi4mm.Phi4MMConfig",
            "AutoModelForCausalLM": "modeling_phi4mm.Phi4MMForCausalLM",
            "AutoTokenizer": "Xenova/gpt-4o",
        },
        "bos_token_id": END_OF_TEXT_ID,
        "embd_layer": _embd_layer(),
        "embd_pdrop": 0.0,
        "eos_token_id": END_OF_TEXT_ID,
        "full_attn_mod": 1,
        "hidden_act": "silu",
        "hidden_size": s.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": s.intermediate_size,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "max_position_embeddings": s.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "phi4mm",
        **_shared_decoder_keys(s),
        "rope_scaling": {"long_factor": list(long), "short_factor": list(short), "type": "longrope"},
        "rope_theta": s.rope_theta,
        "sliding_window": s.sliding_window,
        "tie_word_embeddings": s.tie_word_embeddings,
        "torch_dtype": s.dtype,
        "transformers_version": "4.46.1",
        "use_cache": True,
        "vocab_size": s.vocab_size,
        "_attn_implementation": "flash_attention_2",
        **{f"{role}_lora": _original_lora(s, role) for role in (Role.SPEECH, Role.VISION)},
    }


def native_config(s: SynthSettings) -> dict[str, Any]:
    """config.json of the model class built into transformers."""
    short, long = rope_factors(s)
    return {
        "architectures": ["Phi4MultimodalForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "audio_config": _native_audio(s),
        "bos_token_id": END_OF_TEXT_ID,
        "embd_pdrop": 0.0,
        "eos_token_id": [END_OF_TEXT_ID, END_ID],
        "hidden_act": "silu",
        "hidden_size": s.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": s.intermediate_size,
        "max_position_embeddings": s.max_position_embeddings,
        "model_type": "phi4_multimodal",
        **_shared_decoder_keys(s),
        "rope_scaling": {
            "long_factor": list(long),
            "rope_type": "longrope",
            "short_factor": list(short),
            "type": "longrope",
        },
        "rope_theta": s.rope_theta,
        "sliding_window": s.sliding_window,
        "tie_word_embeddings": s.tie_word_embeddings,
        "torch_dtype": s.dtype,
        "transformers_version": "4.50.0.dev0",
        "use_cache": True,
        "vision_config": _native_vision(s),
        "vocab_size": s.vocab_size,
    }


def adapter_config(s: SynthSettings, role: Role) -> dict[str, Any]:
    """adapter_config.json of a native adapter folder, as PEFT writes it."""
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": s.lora_alpha(role),
        "lora_dropout": LORA_DROPOUT[role],
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": s.lora_rank(role),
        "rank_pattern": {},
        "revision": None,
        "target_modules": r"model.layers.\d+.((self_attn.(qkv|o)_proj)|(mlp.(gate_up|down)_proj))",
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _shared_decoder_keys(s: SynthSettings) -> dict[str, Any]:
    return {
        "num_attention_heads": s.num_attention_heads,
        "num_hidden_layers": s.num_hidden_layers,
        "num_key_value_heads": s.num_key_value_heads,
        "original_max_position_embeddings": s.original_max_position_embeddings,
        "pad_token_id": END_OF_TEXT_ID,
        "partial_rotary_factor": s.partial_rotary_factor,
        "resid_pdrop": 0.0,
        "rms_norm_eps": s.rms_norm_eps,
    }


def _original_lora(s: SynthSettings, role: Role) -> dict[str, Any]:
    return {
        "dp": LORA_DROPOUT[role],
        "layer": LORA_LAYERS[role],
        "lora_alpha": s.lora_alpha(role),
        "r": s.lora_rank(role),
    }


def _original_audio(s: SynthSettings) -> dict[str, Any]:
    return {
        "activation": "swish",
        "activation_checkpointing": {"interval": 1, "module": "transformer", "offload": False},
        "attention_dim": s.audio_attention_dim,
        "attention_heads": s.audio_attention_heads,
        "batch_norm": False,
        "bias_in_glu": True,
        "causal": True,
        "chunk_size": -1,
        "cnn_layer_norm": True,
        "conv_activation": "swish",
        "conv_glu_type": "swish",
        "depthwise_multiplier": 1,
        "depthwise_seperable_out_channel": s.audio_attention_dim,
        "dropout_rate": 0.0,
        "encoder_embedding_config": {"input_size": MELS},
        "ext_pw_kernel_size": 1,
        "ext_pw_out_channel": s.audio_attention_dim,
        "input_layer": "nemo_conv",
        "input_size": MELS,
        "kernel_size": s.audio_kernel_size,
        "left_chunk": 18,
        "linear_units": s.audio_linear_units,
        "nemo_conv_settings": {"conv_channels": s.audio_conv_channels},
        "num_blocks": s.audio_num_blocks,
        "relative_attention_bias_args": {"t5_bias_max_distance": s.t5_bias_max_distance, "type": "t5"},
        "time_reduction": REDUCTION,
    }


def _embd_layer() -> dict[str, Any]:
    return {
        "audio_embd_layer": {
            "compression_rate": 8,
            "downsample_rate": 1,
            "embedding_cls": "audio",
            "enable_gradient_checkpointing": True,
            "projection_cls": "mlp",
            "use_conv_downsample": False,
            "use_qformer": False,
        },
        "embedding_cls": "image_audio",
        "image_embd_layer": {
            "crop_size": IMAGE_SIZE,
            "embedding_cls": "tune_image",
            "enable_gradient_checkpointing": True,
            "hd_transform_order": "sub_glb",
            "image_token_compression_cls": "avg_pool_2d",
            "projection_cls": "mlp",
            "use_hd_transform": True,
            "with_learnable_separator": True,
        },
    }


def _native_audio(s: SynthSettings) -> dict[str, Any]:
    return {
        "activation": "swish",
        "audio_token_id": AUDIO_TOKEN_ID,
        "bias_max_distance": s.t5_bias_max_distance,
        "bias_symmetric": False,
        "chunk_size": -1,
        "conv_activation": "swish",
        "conv_glu_type": "swish",
        "depthwise_multiplier": 1,
        "depthwise_separable_out_channel": s.audio_attention_dim,
        "downsample_rate": 1,
        "dropout_rate": 0.0,
        "ext_pw_out_channel": s.audio_attention_dim,
        "feature_layer": -2,
        "hidden_size": s.audio_attention_dim,
        "initializer_range": 0.02,
        "input_size": MELS,
        "intermediate_size": s.audio_linear_units,
        "kernel_size": s.audio_kernel_size,
        "left_chunk": 18,
        "model_type": "phi4_multimodal_audio",
        "nemo_activation": "relu",
        "nemo_conv_channels": s.audio_conv_channels,
        "nemo_final_size": MELS // REDUCTION,
        "num_attention_heads": s.audio_attention_heads,
        "num_blocks": s.audio_num_blocks,
        "time_reduction": REDUCTION,
    }


def _native_vision(s: SynthSettings) -> dict[str, Any]:
    return {
        "attention_dropout": 0.0,
        "crop_size": IMAGE_SIZE,
        "feature_layer": -2,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": s.vision_hidden_size,
        "image_size": IMAGE_SIZE,
        "image_token_id": IMAGE_TOKEN_ID,
        "intermediate_size": s.vision_intermediate_size,
        "layer_norm_eps": SIGLIP_EPS,
        "model_type": "phi4_multimodal_vision",
        "num_attention_heads": SIGLIP_HEADS,
        "num_channels": 3,
        "num_hidden_layers": s.vision_num_hidden_layers,
        "patch_size": PATCH_SIZE,
    }


def _generation_config() -> dict[str, Any]:
    return {
        "_from_model_config": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": [END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
        "transformers_version": "4.46.1",
        "use_cache": True,
    }


def _preprocessor_config(layout: Layout) -> dict[str, Any]:
    values: dict[str, Any] = {
        "audio_compression_rate": 8,
        "audio_downsample_rate": 1,
        "audio_feat_stride": 1,
        "dynamic_hd": 36,
    }
    if layout is Layout.NATIVE:
        return values | {
            "feature_extractor_type": "Phi4MultimodalFeatureExtractor",
            "image_processor_type": "Phi4MultimodalImageProcessorFast",
            "processor_class": "Phi4MultimodalProcessor",
        }
    return values | {
        "auto_map": {
            "AutoProcessor": "processing_phi4mm.Phi4MMProcessor",
            "AutoImageProcessor": "processing_phi4mm.Phi4MMImageProcessor",
            "AutoFeatureExtractor": "processing_phi4mm.Phi4MMAudioFeatureExtractor",
        },
        "feature_extractor_type": "Phi4MMAudioFeatureExtractor",
        "image_processor_type": "Phi4MMImageProcessor",
        "processor_class": "Phi4MMProcessor",
    }
