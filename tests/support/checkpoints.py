"""Small checkpoints for tests, written byte by byte: independent of the package's own writer.

Large tables are holes in sparse files, so the full vocabulary costs nothing.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

INDEX = "model.safetensors.index.json"
ITEM_NBYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I8": 1, "U8": 1, "F8_E4M3": 1}
VOCAB, WIDTH, MLP, LAYERS, RANK = 200064, 16, 24, 2, 4
VISION_WIDTH, VISION_MLP, VISION_LAYERS = 32, 20, 2
AUDIO_WIDTH, AUDIO_HEADS, AUDIO_UNITS, AUDIO_BLOCKS, CHANNELS, KERNEL, DISTANCE = 16, 2, 12, 1, 8, 3, 5
PROJECTIONS = {
    "self_attn.qkv_proj": (3 * WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_up_proj": (2 * MLP, WIDTH),
    "mlp.down_proj": (WIDTH, MLP),
}


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: zeros (a hole) unless `data` is given."""

    shape: tuple[int, ...]
    dtype: str = "BF16"
    data: bytes | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_NBYTES[self.dtype]


def stored_f32(values: NDArray[np.float32]) -> Stored:
    """A float32 tensor with these values."""
    return Stored(values.shape, "F32", np.ascontiguousarray(values, "<f4").tobytes())


def header_of(tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """The header that describes `tensors` one after another."""
    head: dict[str, Any] = {}
    position = 0
    for name, tensor in tensors.items():
        head[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    return head


def file_head(header: str | bytes) -> bytes:
    """Length and text of a safetensors header, padded to eight bytes."""
    text = header.encode() if isinstance(header, str) else header
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_safetensors(path: Path, tensors: Mapping[str, Stored], header: str | bytes | None = None) -> None:
    """Write `tensors`; `header` replaces the right one by any text."""
    head = file_head(json.dumps(header_of(tensors)) if header is None else header)
    with path.open("wb") as file:
        file.write(head)
        position = len(head)
        for tensor in tensors.values():
            if tensor.data is not None:
                file.seek(position)
                file.write(tensor.data)
            position += tensor.nbytes
        file.truncate(position)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@dataclass
class Draft:
    """A checkpoint to be written; tests edit it first."""

    tensors: dict[str, Stored]
    config: dict[str, Any]
    generation: dict[str, Any] | None = field(default_factory=lambda: {"eos_token_id": [200020, 199999]})
    preprocessor: dict[str, Any] | None = field(default_factory=lambda: {"dynamic_hd": 36})
    shards: int = 2

    def write(self, folder: Path) -> Path:
        """Write it into `folder` (created) and return the folder; one shard means no index."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", self.config)
        if self.generation is not None:
            write_json(folder / "generation_config.json", self.generation)
        if self.preprocessor is not None:
            write_json(folder / "preprocessor_config.json", self.preprocessor)
        if self.shards == 1:
            write_safetensors(folder / "model.safetensors", self.tensors)
            return folder
        weight_map: dict[str, str] = {}
        names = list(self.tensors)
        for i in range(self.shards):
            file = shard_name(i + 1, self.shards)
            part = names[i * len(names) // self.shards : (i + 1) * len(names) // self.shards]
            write_safetensors(folder / file, {name: self.tensors[name] for name in part})
            weight_map |= dict.fromkeys(part, file)
        write_index(folder, weight_map)
        return folder


def shard_name(number: int, count: int = 2) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, weight_map: Mapping[str, object]) -> None:
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})


def read_index(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return weight_map


def original(*, adapters: bool = True) -> Draft:
    """A complete checkpoint in Microsoft's layout; without adapters also without `.base_layer`."""
    tensors = {**_towers(), **_decoder(".base_layer" if adapters else "")}
    for role in ("vision", "speech") if adapters else ():
        tensors |= lora_tensors(f".{role}")
    config = {
        "model_type": "phi4mm",
        "audio_processor": {
            "config": {
                "attention_dim": AUDIO_WIDTH,
                "attention_heads": AUDIO_HEADS,
                "linear_units": AUDIO_UNITS,
                "num_blocks": AUDIO_BLOCKS,
                "kernel_size": KERNEL,
                "nemo_conv_settings": {"conv_channels": CHANNELS},
                "relative_attention_bias_args": {"t5_bias_max_distance": DISTANCE, "type": "t5"},
                "chunk_size": -1,
            }
        },
        "embd_layer": {"image_embd_layer": {"crop_size": 448, "hd_transform_order": "sub_glb"}},
        "vision_lora": {"r": RANK, "lora_alpha": 2 * RANK},
        "speech_lora": {"r": RANK, "lora_alpha": 3 * RANK},
        **_decoder_keys(),
    }
    return Draft(tensors, config)


def native() -> Draft:
    """The same model in the layout of transformers, without adapter folders."""
    tensors = {NATIVE_SPELLING.get(_module(name), _module(name)) + _parameter(name): t for name, t in _towers().items()}
    config = {
        "model_type": "phi4_multimodal",
        "vision_config": {
            "hidden_size": VISION_WIDTH,
            "intermediate_size": VISION_MLP,
            "num_hidden_layers": VISION_LAYERS,
            "image_token_id": 200010,
        },
        "audio_config": {
            "hidden_size": AUDIO_WIDTH,
            "intermediate_size": AUDIO_UNITS,
            "num_attention_heads": AUDIO_HEADS,
            "num_blocks": AUDIO_BLOCKS,
            "nemo_conv_channels": CHANNELS,
            "bias_max_distance": DISTANCE,
            "audio_token_id": 200011,
        },
        **_decoder_keys(),
    }
    return Draft({**tensors, **_decoder("")}, config)


def adapter_config(**changes: object) -> dict[str, Any]:
    """An adapter_config.json as PEFT writes it."""
    return {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        **changes,
    }


def lora_tensors(role: str = "", *, prefix: str = "", rank: int = RANK) -> dict[str, Stored]:
    """Both matrices for every decoder projection: `PREFIXmodel.layers.N.M.lora_AROLE.weight`."""
    tensors: dict[str, Stored] = {}
    for layer in range(LAYERS):
        for module, (out, width) in PROJECTIONS.items():
            stem = f"{prefix}model.layers.{layer}.{module}"
            tensors[f"{stem}.lora_A{role}.weight"] = Stored((rank, width))
            tensors[f"{stem}.lora_B{role}.weight"] = Stored((out, rank))
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, Stored] | None = None, **changes: object) -> Path:
    """A PEFT folder."""
    folder.mkdir(parents=True)
    write_json(folder / "adapter_config.json", adapter_config(**changes))
    write_safetensors(folder / "adapter_model.safetensors", lora_tensors() if tensors is None else tensors)
    return folder


IMAGE, AUDIO = "model.embed_tokens_extend.image_embed.", "model.embed_tokens_extend.audio_embed."
BLOCK = AUDIO + "encoder.encoders.0."
NATIVE_SPELLING = {
    IMAGE + "glb_GN": IMAGE + "global_img_feature_extensor",
    IMAGE + "sub_GN": IMAGE + "sub_img_feature_extensor",
    IMAGE + "img_projection.0": IMAGE + "img_projection_up",
    IMAGE + "img_projection.2": IMAGE + "img_projection_down",
    AUDIO + "audio_projection.speech.0": AUDIO + "up_proj_for_speech",
    AUDIO + "audio_projection.speech.2": AUDIO + "down_proj_for_speech",
    AUDIO + "audio_projection.vision.0": AUDIO + "up_proj_for_vision_speech",
    AUDIO + "audio_projection.vision.2": AUDIO + "down_proj_for_vision_speech",
    BLOCK + "feed_forward_in.net.0.linear": BLOCK + "feed_forward_in.gate_up_proj",
    BLOCK + "feed_forward_in.net.2": BLOCK + "feed_forward_in.down_proj",
    BLOCK + "feed_forward_out.net.0.linear": BLOCK + "feed_forward_out.gate_up_proj",
    BLOCK + "feed_forward_out.net.2": BLOCK + "feed_forward_out.down_proj",
    BLOCK + "self_attn.linear_q": BLOCK + "self_attn.q_proj",
    BLOCK + "self_attn.linear_k": BLOCK + "self_attn.k_proj",
    BLOCK + "self_attn.linear_v": BLOCK + "self_attn.v_proj",
    BLOCK + "self_attn.linear_out": BLOCK + "self_attn.o_proj",
}


def _module(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias")


def _parameter(name: str) -> str:
    return name[len(_module(name)) :]


def _decoder_keys() -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        "hidden_act": "silu",
        "bos_token_id": 199999,
        "eos_token_id": 199999,
        "pad_token_id": 199999,
    }


def _decoder(wrapper: str) -> dict[str, Stored]:
    tensors = {"model.embed_tokens.weight": Stored((VOCAB, WIDTH))}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        tensors[stem + "input_layernorm.weight"] = Stored((WIDTH,))
        tensors[stem + "post_attention_layernorm.weight"] = Stored((WIDTH,))
        for module, shape in PROJECTIONS.items():
            tensors[f"{stem}{module}{wrapper}.weight"] = Stored(shape)
    return {**tensors, "model.norm.weight": Stored((WIDTH,))}


def _towers() -> dict[str, Stored]:
    return {name: Stored(shape) for name, shape in (_vision() | _audio()).items()}


def _with_bias(*names_and_shapes: tuple[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in names_and_shapes:
        shapes[name + ".weight"], shapes[name + ".bias"] = shape, shape[:1]
    return shapes


def _vision() -> dict[str, tuple[int, ...]]:
    v, u, tower = VISION_WIDTH, VISION_MLP, IMAGE + "img_processor."
    shapes = _with_bias((tower + "embeddings.patch_embedding", (v, 3, 14, 14)))
    shapes[tower + "embeddings.position_embedding.weight"] = (1024, v)
    for layer in range(VISION_LAYERS):
        stem = f"{tower}encoder.layers.{layer}."
        square = [(f"{stem}self_attn.{m}_proj", (v, v)) for m in ("q", "k", "v", "out")]
        norms = [(f"{stem}layer_norm{n}", (v,)) for n in (1, 2)]
        shapes |= _with_bias(*norms, *square, (stem + "mlp.fc1", (u, v)), (stem + "mlp.fc2", (v, u)))
    head = tower + "head."
    shapes |= _with_bias(
        (tower + "post_layernorm", (v,)), (head + "layernorm", (v,)), (head + "attention.out_proj", (v, v))
    )
    shapes |= _with_bias((head + "mlp.fc1", (u, v)), (head + "mlp.fc2", (v, u)))
    shapes |= {head + "probe": (1, 1, v), head + "attention.in_proj_weight": (3 * v, v)}
    shapes |= {head + "attention.in_proj_bias": (3 * v,), IMAGE + "glb_GN": (1, 1, v), IMAGE + "sub_GN": (1, 1, 1, v)}
    return shapes | _with_bias((IMAGE + "img_projection.0", (WIDTH, v)), (IMAGE + "img_projection.2", (WIDTH, WIDTH)))


def _audio() -> dict[str, tuple[int, ...]]:
    a, u, c, encoder = AUDIO_WIDTH, AUDIO_UNITS, CHANNELS, AUDIO + "encoder."
    shapes: dict[str, tuple[int, ...]] = {
        encoder + "encoder_embedding.global_mean": (80,),
        encoder + "encoder_embedding.global_invstd": (80,),
        encoder + "relative_attention_bias_layer.bias_values.weight": (2 * DISTANCE, AUDIO_HEADS),
        BLOCK + "conv.glu.b1": (1, a, 1),
        BLOCK + "conv.glu.b2": (1, a, 1),
    }
    shapes |= _with_bias(*((f"{encoder}embed.conv.{i}", (c, 1, 3, 3)) for i in (0, 2, 5)))
    shapes |= _with_bias(*((f"{encoder}embed.conv.{i}", (c, c, 1, 1)) for i in (3, 6)))
    shapes |= _with_bias((encoder + "embed.out", (a, 10 * c)))
    for side in ("in", "out"):
        stem = f"{BLOCK}feed_forward_{side}."
        shapes |= _with_bias((stem + "layer_norm", (a,)), (stem + "net.0.linear", (2 * u, a)), (stem + "net.2", (a, u)))
    shapes |= _with_bias(*((f"{BLOCK}self_attn.linear_{m}", (a, a)) for m in ("q", "k", "v", "out")))
    shapes |= _with_bias(*((BLOCK + n, (a,)) for n in ("conv.layer_norm", "layer_norm_att", "layer_norm")))
    shapes |= _with_bias((BLOCK + "conv.glu.ext_pw_conv_1d", (2 * a, a, 1)), (BLOCK + "conv.ext_pw_conv_1d", (a, a, 1)))
    shapes |= _with_bias((BLOCK + "conv.dw_sep_conv_1d.dw_conv", (a, 1, KERNEL)))
    shapes |= _with_bias((BLOCK + "conv.dw_sep_conv_1d.pw_conv", (a, a, 1)))
    for role in ("speech", "vision"):
        stem = f"{AUDIO}audio_projection.{role}."
        shapes |= _with_bias((stem + "0", (WIDTH, a)), (stem + "2", (WIDTH, WIDTH)))
    return shapes
