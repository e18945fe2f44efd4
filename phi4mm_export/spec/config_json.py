"""config.json of either layout -> ModelConfig, checked against the shapes of the stored tensors.

Rules: a key that is present must agree with the tensors; a dimension that no key states is read off them; what
neither states takes the default of the layout's configuration class. Whatever this tool does not compute is
refused by name.

Sources: `configuration_phi4mm.py` of the original's remote code, transformers 5.24's `Phi4MultimodalConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phi4mm_export.errors import CheckpointError
from phi4mm_export.spec.config_dims import (
    CLASS_DEFAULTS,
    DECODER_DIMS,
    Dimensions,
    audio_dims,
    refuse_unsupported,
    vision_dims,
)
from phi4mm_export.spec.config_rope import parse_rope
from phi4mm_export.spec.json_fields import Fields, is_integer, shown
from phi4mm_export.spec.model import AUDIO_TOKEN_ID, IMAGE_TOKEN_ID, Layout, ModelConfig, Role
from phi4mm_export.spec.names import OUTPUT_HEAD

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"

MODEL_TYPES: dict[str, Layout] = {"phi4mm": Layout.ORIGINAL, "phi4_multimodal": Layout.NATIVE}
HEAD_MULTIPLE = 16
"""GroupQueryAttention with rotary needs the head dimension to be a multiple of this."""
DEFAULT_DYNAMIC_HD = 36
"""Class default of the image processor in both layouts."""


def parse_config(
    raw: dict[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    preprocessor: dict[str, Any] | None,
    generation: dict[str, Any] | None,
    preprocessor_file: str = PREPROCESSOR_FILE,
) -> ModelConfig:
    """The model's dimensions and constants.

    raw: config.json. shapes: canonical tensor name -> stored shape; empty where config.json alone is at hand, and
    then keys and class defaults count unchecked. preprocessor, generation: the parsed
    preprocessor_config.json (read from `preprocessor_file`) and generation_config.json, None when absent.
    Raises CheckpointError naming file, key and both values for anything unsupported or contradictory.
    """
    config = Fields(raw, CONFIG_FILE)
    layout = _layout(config)
    refuse_unsupported(config)
    dims = Dimensions(config, layout, shapes)
    decoder = {row.field: dims.read(row) for row in DECODER_DIMS}
    hidden, vocab = decoder["hidden_size"], decoder["vocab_size"]
    if vocab <= max(IMAGE_TOKEN_ID, AUDIO_TOKEN_ID):
        config.refuse(
            "vocab_size",
            f"more than the image and audio token ids {IMAGE_TOKEN_ID} and {AUDIO_TOKEN_ID}",
            fix="pass a checkpoint with the embedding rows of Phi-4-multimodal",
        )
    heads, kv_heads = _heads(config, layout, hidden, shapes)
    max_positions = config.integer("max_position_embeddings", CLASS_DEFAULTS[layout].max_positions)
    _check_sliding_window(config, max_positions)
    generation_fields = Fields(generation or {}, GENERATION_FILE)
    return ModelConfig(
        layout=layout,
        hidden_size=hidden,
        intermediate_size=decoder["intermediate_size"],
        num_layers=decoder["num_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=vocab,
        rms_norm_eps=config.number("rms_norm_eps", 1e-5),
        tied_head=_is_tied(config, shapes),
        rope=parse_rope(config, head_dim=hidden // heads, max_positions=max_positions),
        vision=vision_dims(dims),
        audio=audio_dims(dims),
        bos_token_id=_first_id("bos_token_id", generation_fields, config, vocab),
        eos_token_ids=_all_ids("eos_token_id", generation_fields, config, vocab),
        pad_token_id=_first_id("pad_token_id", generation_fields, config, vocab),
        lora=_stated_lora(config) if layout is Layout.ORIGINAL else {},
        dynamic_hd=Fields(preprocessor or {}, preprocessor_file).integer("dynamic_hd", DEFAULT_DYNAMIC_HD),
    )


def _layout(config: Fields) -> Layout:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        config.refuse(
            "model_type",
            " or ".join(f'"{name}" ({layout} layout)' for name, layout in MODEL_TYPES.items()),
            fix="pass a Phi-4-multimodal checkpoint",
        )
    return MODEL_TYPES[model_type]


def _heads(config: Fields, layout: Layout, hidden: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Query and key-value heads; the packed projection's rows must be (heads + 2 x kv heads) x head_dim."""
    defaults = CLASS_DEFAULTS[layout]
    heads = config.integer("num_attention_heads", defaults.num_heads)
    if "num_key_value_heads" in config and config.get("num_key_value_heads") is None:
        kv_heads = heads
    else:
        kv_heads = config.integer("num_key_value_heads", defaults.num_kv_heads or heads)
    place = config.where("num_attention_heads")
    fix = f"correct num_attention_heads and num_key_value_heads in {config.file}"
    if hidden % heads:
        raise CheckpointError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}", where=place, fix=fix
        )
    head_dim = hidden // heads
    if config.get("head_dim") is not None and config.integer("head_dim") != head_dim:
        config.refuse("head_dim", f"hidden_size / num_attention_heads = {head_dim}")
    if head_dim % HEAD_MULTIPLE:
        raise CheckpointError(
            f"the head dimension hidden_size / num_attention_heads is {head_dim}, "
            f"supported are multiples of {HEAD_MULTIPLE}",
            where=place,
            fix="no ONNX Runtime attention kernel rotates such heads; this model cannot be exported",
        )
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}", where=place, fix=fix
        )
    packed = shapes.get("model.layers.0.self_attn.qkv_proj.weight")
    rows = (heads + 2 * kv_heads) * head_dim
    if packed and packed[0] != rows:
        raise CheckpointError(
            f"num_attention_heads {heads} and num_key_value_heads {kv_heads} make {rows} rows of q, k and v, "
            f"but model.layers.0.self_attn.qkv_proj.weight has {packed[0]}",
            where=place,
            fix=fix,
        )
    return heads, kv_heads


def _check_sliding_window(config: Fields, max_positions: int) -> None:
    """A window as long as the context changes nothing; a shorter one is another model."""
    if config.get("sliding_window") is None:
        return
    window = config.integer("sliding_window")
    if window < max_positions:
        raise CheckpointError(
            f"sliding_window {window} is shorter than max_position_embeddings {max_positions}; "
            "attention inside a window is not supported",
            where=config.where("sliding_window"),
            fix="set sliding_window to null only if the model was trained without it",
        )


def _is_tied(config: Fields, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether head and embedding are one tensor, as far as keys and names tell.

    Both configuration classes default to false; without the key, a checkpoint that stores no head can only
    be tied. `open_checkpoint` compares the values of a stored head.
    """
    stored = OUTPUT_HEAD in shapes
    if config.get("tie_word_embeddings") is None:
        return not stored
    return config.boolean("tie_word_embeddings", False)


def _token_id(fields: Fields, key: str, value: object, vocab: int) -> int:
    if not is_integer(value) or not 0 <= value < vocab:  # type: ignore[operator]  # is_integer says so
        raise CheckpointError(
            f"{key} must be an integer from 0 to {vocab - 1} (vocab_size {vocab}), found {shown(value)}",
            where=fields.where(key),
            fix=f"correct {key} in {fields.file}",
        )
    return int(value)  # type: ignore[call-overload, no-any-return]  # is_integer says so


def _ids(fields: Fields, key: str, vocab: int) -> list[int]:
    value = fields.get(key)
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    return [_token_id(fields, key, item, vocab) for item in items]


def _all_ids(key: str, generation: Fields, config: Fields, vocab: int) -> tuple[int, ...]:
    """The ids of both files, generation_config.json first, in order, without doubles."""
    found = _ids(generation, key, vocab) + _ids(config, key, vocab)
    return tuple(dict.fromkeys(found))


def _first_id(key: str, generation: Fields, config: Fields, vocab: int) -> int | None:
    for fields in (generation, config):
        value = fields.get(key)
        if value is not None:
            return _token_id(fields, key, value, vocab)
    return None


def _stated_lora(config: Fields) -> dict[Role, tuple[int, float]]:
    """Rank and alpha of `vision_lora` and `speech_lora`; the keys survive merging, so they prove no adapter."""
    stated: dict[Role, tuple[int, float]] = {}
    for role in Role:
        section = config.section(f"{role}_lora")
        if "r" in section and "lora_alpha" in section:
            stated[role] = (section.integer("r"), section.number("lora_alpha", positive=False))
    return stated
