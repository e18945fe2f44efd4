"""How checkpoints spell tensor names, and the one canonical spelling everything else uses.

A canonical name is the original layout's name without wrappers: `model.layers.0.self_attn.qkv_proj.weight`,
`model.embed_tokens_extend.image_embed.glb_GN`. Adapter tensors are `MODULE.lora_A.ROLE.weight` (the native
layout keeps them in one folder per role and leaves ROLE out: `MODULE.lora_A.weight`).

Sources: the name lists of the original and of the transformers-native checkpoint; PEFT 0.21 and torch 2.x
for the wrappers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

IMAGE = "model.embed_tokens_extend.image_embed."
AUDIO = "model.embed_tokens_extend.audio_embed."
_ENCODER = AUDIO + "encoder.encoders.{i}."

EMBEDDING_TABLE = "model.embed_tokens.weight"
OUTPUT_HEAD = "lm_head.weight"

WRAPPER_PREFIXES: tuple[str, ...] = (
    "base_model.model.",  # PEFT
    "module.",  # DistributedDataParallel, DeepSpeed
    "_orig_mod.",  # torch.compile
)
"""Prefixes that training wrappers put before every name; several may stand before one another."""

WRAPPER_SEGMENTS: frozenset[str] = frozenset(
    {
        "base_layer",  # PEFT, around a module that carries adapters
        "_checkpoint_wrapped_module",  # activation checkpointing
        "_fsdp_wrapped_module",  # FullyShardedDataParallel
        "_orig_mod",  # torch.compile of a submodule
    }
)
"""Path segments that wrappers put between a module and its parameters."""

ADAPTED_MODULES: tuple[str, ...] = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
"""The decoder projections that carry the built-in adapters."""


@dataclass(frozen=True)
class NameRow:
    """One module or parameter that the two layouts spell differently; `{i}` is a layer number."""

    native: str
    original: str


NATIVE_ROWS: tuple[NameRow, ...] = (
    NameRow(IMAGE + "global_img_feature_extensor", IMAGE + "glb_GN"),
    NameRow(IMAGE + "sub_img_feature_extensor", IMAGE + "sub_GN"),
    NameRow(IMAGE + "img_projection_up", IMAGE + "img_projection.0"),
    NameRow(IMAGE + "img_projection_down", IMAGE + "img_projection.2"),
    NameRow(AUDIO + "up_proj_for_speech", AUDIO + "audio_projection.speech.0"),
    NameRow(AUDIO + "down_proj_for_speech", AUDIO + "audio_projection.speech.2"),
    NameRow(AUDIO + "up_proj_for_vision_speech", AUDIO + "audio_projection.vision.0"),
    NameRow(AUDIO + "down_proj_for_vision_speech", AUDIO + "audio_projection.vision.2"),
    NameRow(_ENCODER + "feed_forward_in.gate_up_proj", _ENCODER + "feed_forward_in.net.0.linear"),
    NameRow(_ENCODER + "feed_forward_in.down_proj", _ENCODER + "feed_forward_in.net.2"),
    NameRow(_ENCODER + "feed_forward_out.gate_up_proj", _ENCODER + "feed_forward_out.net.0.linear"),
    NameRow(_ENCODER + "feed_forward_out.down_proj", _ENCODER + "feed_forward_out.net.2"),
    NameRow(_ENCODER + "self_attn.q_proj", _ENCODER + "self_attn.linear_q"),
    NameRow(_ENCODER + "self_attn.k_proj", _ENCODER + "self_attn.linear_k"),
    NameRow(_ENCODER + "self_attn.v_proj", _ENCODER + "self_attn.linear_v"),
    NameRow(_ENCODER + "self_attn.o_proj", _ENCODER + "self_attn.linear_out"),
)

RECOMPUTED_BUFFERS: tuple[str, ...] = (
    "model.rotary_emb.inv_freq",
    "model.layers.{i}.self_attn.rotary_emb.inv_freq",
    IMAGE + "img_processor.embeddings.position_ids",
)
"""Buffers that older savers stored; they follow from config.json and are never read."""


@dataclass(frozen=True)
class LoraName:
    """An adapter tensor's name, taken apart.

    `half` is "A" ([r, in]) or "B" ([out, r]); `adapter` is the name between half and `weight`, or None.
    """

    module: str
    half: str
    adapter: str | None


_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")


def canonical_name(stored: str) -> str:
    """The canonical spelling of a stored name, whichever layout and wrappers it came with."""
    bare = stored
    while prefix := next((p for p in WRAPPER_PREFIXES if bare.startswith(p)), None):
        bare = bare.removeprefix(prefix)
    bare = ".".join(s for s in bare.split(".") if s not in WRAPPER_SEGMENTS)
    return _respell(bare, "native")


def native_name(canonical: str) -> str:
    """The transformers-native spelling; an adapter tensor loses its role (its folder states it)."""
    lora = split_lora(canonical)
    if lora is not None:
        return f"{lora.module}.lora_{lora.half}.weight"
    return _respell(canonical, "original")


def original_stored_name(canonical: str) -> str:
    """The original checkpoint's spelling: PEFT's `.base_layer` in the four adapted projections."""
    module, _, parameter = canonical.rpartition(".")
    if parameter == "weight" and module.startswith("model.layers.") and module.endswith(ADAPTED_MODULES):
        return f"{module}.base_layer.weight"
    return canonical


def split_lora(name: str) -> LoraName | None:
    """Take an adapter tensor's name apart; None for any other name.

    "M.lora_A.vision.weight" -> ("M", "A", "vision"); "M.lora_B.weight" -> ("M", "B", None).
    """
    match = _LORA.fullmatch(name)
    return LoraName(match["module"], match["half"], match["adapter"]) if match else None


def is_recomputed_buffer(canonical: str) -> bool:
    """Whether the name is a buffer that follows from config.json and is never read."""
    return any(_pattern(row).fullmatch(canonical) for row in RECOMPUTED_BUFFERS)


def _respell(name: str, source: str) -> str:
    """Replace the row's `source` spelling at the start of `name` by the other one."""
    for row in NATIVE_ROWS:
        here, there = (row.native, row.original) if source == "native" else (row.original, row.native)
        match = _pattern(here).match(name)
        if match:
            number = match.groupdict().get("i") or ""
            return there.replace("{i}", number) + name[match.end() :]
    return name


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """`template` as a regular expression that ends at the end of a path segment."""
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)") + r"(?=\.|$)")
