"""Which key and which tensor state each dimension, and the values of config.json that are supported at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from phi4mm_export.errors import CheckpointError
from phi4mm_export.spec.json_fields import Fields, shown
from phi4mm_export.spec.model import (
    AUDIO_TOKEN_ID,
    IMAGE_SIZE,
    IMAGE_TOKEN_ID,
    PATCH_SIZE,
    SIGLIP_EPS,
    SIGLIP_HEADS,
    AudioDims,
    Layout,
    VisionDims,
)
from phi4mm_export.spec.names import AUDIO, EMBEDDING_TABLE, IMAGE

ORIGINAL_SIGLIP_WIDTH, ORIGINAL_SIGLIP_LAYERS = 1152, 27
"""The original's code builds this tower and no other; its config has no key for it."""


@dataclass(frozen=True)
class ClassDefaults:
    """What the layout's configuration class takes for decoder keys that no tensor shows."""

    num_heads: int
    num_kv_heads: int | None
    max_positions: int


CLASS_DEFAULTS: dict[Layout, ClassDefaults] = {
    Layout.ORIGINAL: ClassDefaults(num_heads=32, num_kv_heads=None, max_positions=4096),
    Layout.NATIVE: ClassDefaults(num_heads=32, num_kv_heads=8, max_positions=131072),
}


@dataclass(frozen=True)
class Supported:
    """A key (dotted path) that may be absent or null, or must have one of these values."""

    key: str
    values: tuple[object, ...]


_AUDIO_PROCESSOR = "audio_processor.config."
_IMAGE_LAYER, _AUDIO_LAYER = "embd_layer.image_embd_layer.", "embd_layer.audio_embd_layer."
_SIDES = (IMAGE_SIZE, [IMAGE_SIZE, IMAGE_SIZE])

SUPPORTED: tuple[Supported, ...] = (
    Supported("quantization_config", ()),
    Supported("hidden_act", ("silu", "swish")),
    Supported("attention_bias", (False,)),
    Supported("mlp_bias", (False,)),
    Supported("lm_head_bias", (False,)),
    Supported("full_attn_mod", (1,)),
    Supported("interpolate_factor", (1,)),
    Supported("image_token_id", (IMAGE_TOKEN_ID,)),
    Supported("audio_token_id", (AUDIO_TOKEN_ID,)),
    Supported("vision_config.image_token_id", (IMAGE_TOKEN_ID,)),
    Supported("vision_config.crop_size", (IMAGE_SIZE,)),
    Supported("vision_config.image_size", _SIDES),
    Supported("vision_config.patch_size", (PATCH_SIZE, [PATCH_SIZE, PATCH_SIZE])),
    Supported("vision_config.num_channels", (3,)),
    Supported("vision_config.hidden_act", ("gelu_pytorch_tanh",)),
    Supported("vision_config.feature_layer", (-2,)),
    Supported("vision_config.use_hd_transform", (True,)),
    Supported("vision_config.hd_transform_order", ("sub_glb",)),
    Supported("audio_config.audio_token_id", (AUDIO_TOKEN_ID,)),
    Supported("audio_config.input_size", (80,)),
    Supported("audio_config.time_reduction", (8,)),
    Supported("audio_config.chunk_size", (-1,)),
    Supported("audio_config.activation", ("swish", "silu")),
    Supported("audio_config.conv_activation", ("swish", "silu")),
    Supported("audio_config.conv_glu_type", ("swish", "silu")),
    Supported("audio_config.nemo_activation", ("relu",)),
    Supported("audio_config.depthwise_multiplier", (1,)),
    Supported("audio_config.bias_symmetric", (False,)),
    Supported("audio_config.downsample_rate", (1,)),
    Supported("audio_config.feature_layer", (-2,)),
    Supported("audio_processor.name", ("cascades",)),
    Supported(_AUDIO_PROCESSOR + "activation", ("swish",)),
    Supported(_AUDIO_PROCESSOR + "conv_activation", ("swish",)),
    Supported(_AUDIO_PROCESSOR + "conv_glu_type", ("swish",)),
    Supported(_AUDIO_PROCESSOR + "batch_norm", (False,)),
    Supported(_AUDIO_PROCESSOR + "bias_in_glu", (True,)),
    Supported(_AUDIO_PROCESSOR + "causal", (True,)),
    Supported(_AUDIO_PROCESSOR + "chunk_size", (-1,)),
    Supported(_AUDIO_PROCESSOR + "cnn_layer_norm", (True,)),
    Supported(_AUDIO_PROCESSOR + "depthwise_multiplier", (1,)),
    Supported(_AUDIO_PROCESSOR + "ext_pw_kernel_size", (1,)),
    Supported(_AUDIO_PROCESSOR + "input_layer", ("nemo_conv",)),
    Supported(_AUDIO_PROCESSOR + "input_size", (80,)),
    Supported(_AUDIO_PROCESSOR + "encoder_embedding_config.input_size", (80,)),
    Supported(_AUDIO_PROCESSOR + "relative_attention_bias_args.type", ("t5",)),
    Supported(_AUDIO_PROCESSOR + "relative_attention_bias_args.t5_bias_symmetric", (False,)),
    Supported(_AUDIO_PROCESSOR + "time_reduction", (8,)),
    Supported("embd_layer.embedding_cls", ("image_audio",)),
    Supported(_IMAGE_LAYER + "crop_size", (IMAGE_SIZE,)),
    Supported(_IMAGE_LAYER + "hd_transform_order", ("sub_glb",)),
    Supported(_IMAGE_LAYER + "image_token_compression_cls", ("avg_pool_2d",)),
    Supported(_IMAGE_LAYER + "projection_cls", ("mlp",)),
    Supported(_IMAGE_LAYER + "use_hd_transform", (True,)),
    Supported(_IMAGE_LAYER + "with_learnable_separator", (True,)),
    Supported(_IMAGE_LAYER + "layer_idx", (-2,)),
    Supported(_IMAGE_LAYER + "type_feature", ("patch",)),
    Supported(_AUDIO_LAYER + "compression_rate", (8,)),
    Supported(_AUDIO_LAYER + "downsample_rate", (1,)),
    Supported(_AUDIO_LAYER + "projection_cls", ("mlp",)),
    Supported(_AUDIO_LAYER + "use_conv_downsample", (False,)),
    Supported(_AUDIO_LAYER + "use_qformer", (False,)),
)


def refuse_unsupported(config: Fields) -> None:
    """Raise CheckpointError for the first key whose value would need other arithmetic."""
    for row in SUPPORTED:
        section, key = _resolve(config, row.key)
        value = section.get(key)
        if value is None or any(_same(value, allowed) for allowed in row.values):
            continue
        if not row.values:
            raise CheckpointError(
                f"{row.key} is present: the weights are quantized already",
                where=section.where(key),
                fix="export from the checkpoint before quantization (BF16, FP16 or FP32 weights)",
            )
        section.refuse(key, " or ".join(shown(v) for v in row.values), fix=f"no other {row.key} is supported")


@dataclass(frozen=True)
class Dim:
    """One dimension: its name in ModelConfig, its key per layout, and the tensor and axis that show it.

    `parts`: the axis holds this many times the dimension. A `{i}` in the tensor's name means that the
    dimension is the number of layers. `default` is the configuration class's, which counts only where no
    tensor is known at all (savers leave out keys that equal it).
    """

    field: str
    original: str
    native: str
    tensor: str
    axis: int = 0
    parts: int = 1
    default: int | None = None


_TOWER = IMAGE + "img_processor."
_ENCODER = AUDIO + "encoder."
_BIAS = _ENCODER + "relative_attention_bias_layer.bias_values.weight"

DECODER_DIMS: tuple[Dim, ...] = (
    Dim("hidden_size", "hidden_size", "hidden_size", EMBEDDING_TABLE, 1, default=3072),
    Dim("vocab_size", "vocab_size", "vocab_size", EMBEDDING_TABLE, 0, default=200064),
    Dim("intermediate_size", "intermediate_size", "intermediate_size", "model.layers.0.mlp.down_proj.weight", 1,
        default=8192),
    Dim("num_layers", "num_hidden_layers", "num_hidden_layers", "model.layers.{i}.", default=32),
)  # fmt: skip
VISION_DIMS: tuple[Dim, ...] = (
    Dim("hidden_size", "vision_config.hidden_size", "vision_config.hidden_size",
        _TOWER + "embeddings.patch_embedding.weight", default=ORIGINAL_SIGLIP_WIDTH),
    Dim("intermediate_size", "vision_config.intermediate_size", "vision_config.intermediate_size",
        _TOWER + "encoder.layers.0.mlp.fc1.weight", default=4304),
)  # fmt: skip
AUDIO_DIMS: tuple[Dim, ...] = (
    Dim("hidden_size", _AUDIO_PROCESSOR + "attention_dim", "audio_config.hidden_size",
        _ENCODER + "embed.out.weight", default=1024),
    Dim("num_heads", _AUDIO_PROCESSOR + "attention_heads", "audio_config.num_attention_heads", _BIAS, 1,
        default=16),
    Dim("linear_units", _AUDIO_PROCESSOR + "linear_units", "audio_config.intermediate_size",
        _ENCODER + "encoders.0.feed_forward_in.net.2.weight", 1, default=1536),
    Dim("num_blocks", _AUDIO_PROCESSOR + "num_blocks", "audio_config.num_blocks", _ENCODER + "encoders.{i}.",
        default=24),
    Dim("kernel_size", _AUDIO_PROCESSOR + "kernel_size", "audio_config.kernel_size",
        _ENCODER + "encoders.0.conv.dw_sep_conv_1d.dw_conv.weight", 2, default=3),
    Dim("conv_channels", _AUDIO_PROCESSOR + "nemo_conv_settings.conv_channels", "audio_config.nemo_conv_channels",
        _ENCODER + "embed.conv.0.weight", default=1024),
    Dim("bias_max_distance", _AUDIO_PROCESSOR + "relative_attention_bias_args.t5_bias_max_distance",
        "audio_config.bias_max_distance", _BIAS, 0, 2, default=1000),
)  # fmt: skip
AUDIO_WIDTH_KEYS: dict[Layout, tuple[str, ...]] = {
    Layout.ORIGINAL: (
        _AUDIO_PROCESSOR + "depthwise_seperable_out_channel",
        _AUDIO_PROCESSOR + "ext_pw_out_channel",
    ),
    Layout.NATIVE: ("audio_config.depthwise_separable_out_channel", "audio_config.ext_pw_out_channel"),
}
"""Further keys that must equal the audio width."""


class Dimensions:
    """Reads dimensions from config.json and the stored shapes, and refuses where they disagree."""

    def __init__(self, config: Fields, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.config, self.layout, self.shapes = config, layout, shapes

    def read(self, row: Dim) -> int:
        """The dimension: the key must agree with the tensor, the tensor decides where the key is absent.

        Without any shapes (config.json alone is at hand) the key counts, else the class's default.
        """
        path = row.original if self.layout is Layout.ORIGINAL else row.native
        section, key = _resolve(self.config, path)
        stated = section.integer(key) if section.get(key) is not None else None
        if not self.shapes and row.default is not None:
            return stated or row.default
        shown_by_tensors = self.counted(row.tensor) if "{i}" in row.tensor else self._measured(row)
        if shown_by_tensors is None and (stated is None or "{i}" in row.tensor):
            raise CheckpointError(
                f"no tensor {row.tensor.replace('{i}', '0')} is stored, which shows {path}",
                where=section.where(key),
                fix="pass a complete Phi-4-multimodal checkpoint",
            )
        if stated is not None and shown_by_tensors is not None and stated != shown_by_tensors:
            what = "layers are stored" if "{i}" in row.tensor else "is what the tensor's shape says"
            raise CheckpointError(
                f"{path} is {stated}, but {shown_by_tensors} {what} ({row.tensor.replace('{i}', 'N')})",
                where=section.where(key),
                fix=f"correct {key} in {self.config.file}, or fetch the tensors that belong to it",
            )
        return stated if stated is not None else shown_by_tensors or 0

    def same_width(self, path: str, width: int) -> None:
        """Refuse a key that states another width."""
        section, key = _resolve(self.config, path)
        if section.get(key) is not None and section.integer(key) != width:
            section.refuse(key, f"the encoder's width {width}")

    def _measured(self, row: Dim) -> int | None:
        shape = self.shapes.get(row.tensor)
        if shape is None:
            return None
        if len(shape) <= row.axis or shape[row.axis] % row.parts:
            raise CheckpointError(
                f"{row.tensor} has shape {list(shape)}, from which {row.field} cannot be read",
                where=row.tensor,
                fix="pass a complete Phi-4-multimodal checkpoint",
            )
        return shape[row.axis] // row.parts

    def counted(self, template: str) -> int | None:
        """Highest layer number + 1 among the stored names that start with `template`."""
        pattern = re.compile(re.escape(template).replace(r"\{i\}", r"(\d{1,6})"))
        numbers = [int(match[1]) for name in self.shapes if (match := pattern.match(name))]
        return max(numbers) + 1 if numbers else None


def vision_dims(dims: Dimensions) -> VisionDims:
    """The SigLIP tower; width and depth from the tensors, heads and eps from the native config or the code."""
    section = dims.config.section("vision_config")
    hidden, intermediate = (dims.read(row) for row in VISION_DIMS)
    heads = section.integer("num_attention_heads", SIGLIP_HEADS)
    if hidden % heads:
        raise CheckpointError(
            f"the SigLIP tower's width {hidden} is not a multiple of its {heads} heads",
            where=section.where("num_attention_heads"),
            fix="pass a checkpoint whose vision tower has a whole number of values per head",
        )
    eps = section.number("layer_norm_eps", SIGLIP_EPS)
    return VisionDims(hidden, intermediate, _vision_layers(dims, hidden), num_heads=heads, eps=eps)


def _vision_layers(dims: Dimensions, width: int) -> int:
    """Depth of the tower, the unused last layer included, even where a saver dropped it.

    What is stored decides where the tower is whole: with its post_layernorm or head, neither of which is ever used.
    """
    layers = _TOWER + "encoder.layers.{i}."
    stored = dims.counted(layers)
    section = dims.config.section("vision_config")
    key = "num_hidden_layers"
    stated = section.integer(key) if section.get(key) is not None else None
    unused_stored = any(name.startswith((_TOWER + "post_layernorm.", _TOWER + "head.")) for name in dims.shapes)
    original_tower = dims.layout is Layout.ORIGINAL and width == ORIGINAL_SIGLIP_WIDTH
    if stated is None and original_tower and (stored == ORIGINAL_SIGLIP_LAYERS - 1 or not unused_stored):
        stated = ORIGINAL_SIGLIP_LAYERS
    if stored is None:
        path = f"vision_config.{key}"
        return dims.read(Dim("num_layers", path, path, layers, default=ORIGINAL_SIGLIP_LAYERS))
    if stated is None:
        if not unused_stored:
            raise CheckpointError(
                f"{stored} vision layers are stored, but neither post_layernorm nor head: it cannot be told whether "
                "the unused last layer was dropped as well",
                where=section.where(key),
                fix=f"state the tower's full depth as vision_config.{key} in {dims.config.file}",
            )
        return stored
    if stored not in (stated, stated - 1):
        raise CheckpointError(
            f"vision_config.{key} is {stated}, but {stored} layers are stored",
            where=section.where(key),
            fix=f"correct {key} in {dims.config.file}, or fetch the tensors that belong to it",
        )
    return stated


def audio_dims(dims: Dimensions) -> AudioDims:
    """The conformer encoder; every dimension from key and tensor."""
    values = {row.field: dims.read(row) for row in AUDIO_DIMS}
    for path in AUDIO_WIDTH_KEYS[dims.layout]:
        dims.same_width(path, values["hidden_size"])
    if values["hidden_size"] % values["num_heads"]:
        raise CheckpointError(
            f"the audio encoder's width {values['hidden_size']} is not a multiple of its {values['num_heads']} heads",
            where=f"{dims.config.file}: {AUDIO_DIMS[1].original}",
            fix="pass a checkpoint whose audio encoder has a whole number of values per head",
        )
    return AudioDims(**values)


def _resolve(config: Fields, path: str) -> tuple[Fields, str]:
    """The section that holds the last key of a dotted path, and that key."""
    *parents, key = path.split(".")
    section = config
    for parent in parents:
        section = section.section(parent)
    return section, key


def _same(value: object, allowed: object) -> bool:
    """JSON equality: 1 equals 1.0, but not true."""
    if isinstance(value, bool) or isinstance(allowed, bool):
        return value is allowed
    return value == allowed
