"""Every tensor a checkpoint must hold, with its shape, derived from the model's dimensions.

The tables list names and dimensions in the order in which the original checkpoint stores them. Letters:

    V vocabulary   H hidden size    F MLP width         QKV packed q, k, v rows   O attention output width
    v SigLIP width                  u SigLIP MLP width  F2, v3, a2, l2: that many times the letter
    a audio width  h audio heads    l audio MLP width   M relative positions (2 x distance)
    c conv channels                 k conv kernel       m mel bins                e = c * m / time reduction
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phi4mm_export.spec.model import PATCH_SIZE, PATCHES_PER_SIDE, ModelConfig, Role
from phi4mm_export.spec.names import (
    ADAPTED_MODULES,
    AUDIO,
    EMBEDDING_TABLE,
    IMAGE,
    OUTPUT_HEAD,
    original_stored_name,
)

Shape = tuple[int, ...]
Dim = str | int


@dataclass(frozen=True)
class TensorRow:
    """One tensor, or one per layer where the name holds `{i}`."""

    name: str
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class Block:
    """Rows that repeat `repeat` times (a key of the dimensions), or stand once when it is None."""

    rows: tuple[TensorRow, ...]
    repeat: str | None = None


def _linear(name: str, out: Dim, width: Dim) -> tuple[TensorRow, ...]:
    return (TensorRow(f"{name}.weight", (out, width)), TensorRow(f"{name}.bias", (out,)))


def _norm(name: str, width: Dim) -> tuple[TensorRow, ...]:
    return (TensorRow(f"{name}.weight", (width,)), TensorRow(f"{name}.bias", (width,)))


def _conv(name: str, *dims: Dim) -> tuple[TensorRow, ...]:
    return (TensorRow(f"{name}.weight", dims), TensorRow(f"{name}.bias", dims[:1]))


_TOWER = IMAGE + "img_processor."
_TOWER_LAYER = _TOWER + "encoder.layers.{i}."
_AUDIO_ENCODER = AUDIO + "encoder."
_CONFORMER = _AUDIO_ENCODER + "encoders.{i}."
_DECODER = "model.layers.{i}."

BLOCKS: tuple[Block, ...] = (
    Block((TensorRow(EMBEDDING_TABLE, ("V", "H")),)),
    Block(
        (
            *_conv(_TOWER + "embeddings.patch_embedding", "v", 3, PATCH_SIZE, PATCH_SIZE),
            TensorRow(_TOWER + "embeddings.position_embedding.weight", (PATCHES_PER_SIDE**2, "v")),
        )
    ),
    Block(
        (
            *_norm(_TOWER_LAYER + "layer_norm1", "v"),
            *_linear(_TOWER_LAYER + "self_attn.k_proj", "v", "v"),
            *_linear(_TOWER_LAYER + "self_attn.v_proj", "v", "v"),
            *_linear(_TOWER_LAYER + "self_attn.q_proj", "v", "v"),
            *_linear(_TOWER_LAYER + "self_attn.out_proj", "v", "v"),
            *_norm(_TOWER_LAYER + "layer_norm2", "v"),
            *_linear(_TOWER_LAYER + "mlp.fc1", "u", "v"),
            *_linear(_TOWER_LAYER + "mlp.fc2", "v", "u"),
        ),
        repeat="vision layers",
    ),
    Block(
        (
            *_norm(_TOWER + "post_layernorm", "v"),
            TensorRow(_TOWER + "head.probe", (1, 1, "v")),
            TensorRow(_TOWER + "head.attention.in_proj_weight", ("v3", "v")),
            TensorRow(_TOWER + "head.attention.in_proj_bias", ("v3",)),
            *_linear(_TOWER + "head.attention.out_proj", "v", "v"),
            *_norm(_TOWER + "head.layernorm", "v"),
            *_linear(_TOWER + "head.mlp.fc1", "u", "v"),
            *_linear(_TOWER + "head.mlp.fc2", "v", "u"),
            TensorRow(IMAGE + "glb_GN", (1, 1, "v")),
            TensorRow(IMAGE + "sub_GN", (1, 1, 1, "v")),
            *_linear(IMAGE + "img_projection.0", "H", "v"),
            *_linear(IMAGE + "img_projection.2", "H", "H"),
        )
    ),
    Block(
        (
            TensorRow(_AUDIO_ENCODER + "encoder_embedding.global_mean", ("m",)),
            TensorRow(_AUDIO_ENCODER + "encoder_embedding.global_invstd", ("m",)),
            *_conv(_AUDIO_ENCODER + "embed.conv.0", "c", 1, 3, 3),
            *_conv(_AUDIO_ENCODER + "embed.conv.2", "c", 1, 3, 3),
            *_conv(_AUDIO_ENCODER + "embed.conv.3", "c", "c", 1, 1),
            *_conv(_AUDIO_ENCODER + "embed.conv.5", "c", 1, 3, 3),
            *_conv(_AUDIO_ENCODER + "embed.conv.6", "c", "c", 1, 1),
            *_linear(_AUDIO_ENCODER + "embed.out", "a", "e"),
            TensorRow(_AUDIO_ENCODER + "relative_attention_bias_layer.bias_values.weight", ("M", "h")),
        )
    ),
    Block(
        (
            *_norm(_CONFORMER + "feed_forward_in.layer_norm", "a"),
            *_linear(_CONFORMER + "feed_forward_in.net.0.linear", "l2", "a"),
            *_linear(_CONFORMER + "feed_forward_in.net.2", "a", "l"),
            *_norm(_CONFORMER + "feed_forward_out.layer_norm", "a"),
            *_linear(_CONFORMER + "feed_forward_out.net.0.linear", "l2", "a"),
            *_linear(_CONFORMER + "feed_forward_out.net.2", "a", "l"),
            *_linear(_CONFORMER + "self_attn.linear_q", "a", "a"),
            *_linear(_CONFORMER + "self_attn.linear_k", "a", "a"),
            *_linear(_CONFORMER + "self_attn.linear_v", "a", "a"),
            *_linear(_CONFORMER + "self_attn.linear_out", "a", "a"),
            *_norm(_CONFORMER + "conv.layer_norm", "a"),
            TensorRow(_CONFORMER + "conv.glu.b1", (1, "a", 1)),
            TensorRow(_CONFORMER + "conv.glu.b2", (1, "a", 1)),
            *_conv(_CONFORMER + "conv.glu.ext_pw_conv_1d", "a2", "a", 1),
            *_conv(_CONFORMER + "conv.dw_sep_conv_1d.dw_conv", "a", 1, "k"),
            *_conv(_CONFORMER + "conv.dw_sep_conv_1d.pw_conv", "a", "a", 1),
            *_conv(_CONFORMER + "conv.ext_pw_conv_1d", "a", "a", 1),
            *_norm(_CONFORMER + "layer_norm_att", "a"),
            *_norm(_CONFORMER + "layer_norm", "a"),
        ),
        repeat="audio blocks",
    ),
    Block(
        (
            *_linear(AUDIO + "audio_projection.speech.0", "H", "a"),
            *_linear(AUDIO + "audio_projection.speech.2", "H", "H"),
            *_linear(AUDIO + "audio_projection.vision.0", "H", "a"),
            *_linear(AUDIO + "audio_projection.vision.2", "H", "H"),
        )
    ),
    Block(
        (
            TensorRow(_DECODER + "self_attn.qkv_proj.weight", ("QKV", "H")),
            TensorRow(_DECODER + "self_attn.o_proj.weight", ("H", "O")),
            TensorRow(_DECODER + "mlp.gate_up_proj.weight", ("F2", "H")),
            TensorRow(_DECODER + "mlp.down_proj.weight", ("H", "F")),
            TensorRow(_DECODER + "input_layernorm.weight", ("H",)),
            TensorRow(_DECODER + "post_attention_layernorm.weight", ("H",)),
        ),
        repeat="layers",
    ),
    Block((TensorRow("model.norm.weight", ("H",)),)),
)


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape of every tensor without adapters, in the original's order.

    Holds what a checkpoint may leave out too: see `optional_tensors`. `lm_head.weight` is last.
    """
    sizes = _sizes(config)
    wanted: dict[str, Shape] = {}
    for block in BLOCKS:
        for i in range(sizes[block.repeat] if block.repeat else 1):
            for row in block.rows:
                wanted[row.name.replace("{i}", str(i))] = tuple(_size(sizes, d) for d in row.dims)
    wanted[OUTPUT_HEAD] = (config.vocab_size, config.hidden_size)
    return wanted


def optional_tensors(config: ModelConfig) -> frozenset[str]:
    """Canonical names that a checkpoint may leave out.

    The SigLIP tower's last layer, `post_layernorm` and pooling head are stored and never run (feature layer -2);
    `lm_head.weight` is left out when the head is the embedding table.
    """
    unused = (f"{_TOWER}encoder.layers.{config.vision.num_layers - 1}.", f"{_TOWER}post_layernorm.", f"{_TOWER}head.")
    names = {name for name in expected_tensors(config) if name.startswith(unused)}
    return frozenset(names | ({OUTPUT_HEAD} if config.tied_head else set()))


def adapted_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Canonical module -> (out, in) of every projection that may carry an adapter, in layer order."""
    wanted = expected_tensors(config)
    modules = (f"model.layers.{i}.{module}" for i in range(config.num_layers) for module in ADAPTED_MODULES)
    return {module: (wanted[f"{module}.weight"][0], wanted[f"{module}.weight"][1]) for module in modules}


def stored_inventory(config: ModelConfig) -> dict[str, Shape]:
    """Stored name -> shape of a whole original-layout checkpoint, adapters included, in its order.

    Adapter ranks come from `config.lora`; a tied head stores no `lm_head.weight`.
    """
    return dict(_stored_rows(config))


def _stored_rows(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    modules = adapted_shapes(config)
    for name, shape in expected_tensors(config).items():
        if name == OUTPUT_HEAD and config.tied_head:
            continue
        yield original_stored_name(name), shape
        module = name.removesuffix(".weight")
        if module in modules:
            out, width = modules[module]
            for role in Role:
                if role in config.lora:
                    rank, _ = config.lora[role]
                    yield f"{module}.lora_A.{role}.weight", (rank, width)
                    yield f"{module}.lora_B.{role}.weight", (out, rank)


def _sizes(config: ModelConfig) -> dict[str, int]:
    """Every letter of the tables for one model."""
    vision, audio = config.vision, config.audio
    return {
        "V": config.vocab_size,
        "H": config.hidden_size,
        "F": config.intermediate_size,
        "F2": 2 * config.intermediate_size,
        "QKV": config.qkv_size,
        "O": config.num_heads * config.head_dim,
        "layers": config.num_layers,
        "v": vision.hidden_size,
        "v3": 3 * vision.hidden_size,
        "u": vision.intermediate_size,
        "vision layers": vision.num_layers,
        "a": audio.hidden_size,
        "a2": 2 * audio.hidden_size,
        "l": audio.linear_units,
        "l2": 2 * audio.linear_units,
        "c": audio.conv_channels,
        "k": audio.kernel_size,
        "M": 2 * audio.bias_max_distance,
        "h": audio.num_heads,
        "m": audio.num_mels,
        "e": audio.conv_channels * (audio.num_mels // audio.time_reduction),
        "audio blocks": audio.num_blocks,
    }


def _size(sizes: dict[str, int], dim: Dim) -> int:
    return dim if isinstance(dim, int) else sizes[dim]
