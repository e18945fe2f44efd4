"""What onnxruntime-genai 0.18 binds at the border of each phi4mm graph, and how to know a tensor under another name.

A key of genai_config.json can name any tensor, except where `fixed` says that the runtime feeds the tensor under its
official name whatever the config says (tried on renamed toy packages).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from phi4mm_export.package.graph_io import TensorIo
from phi4mm_export.spec.contract import Component


class Kind(StrEnum):
    """Families of element types."""

    FLOAT = "float"
    INTEGER = "integer"
    BOOL = "bool"


KIND_DTYPES: Mapping[Kind, tuple[str, ...]] = {
    Kind.FLOAT: ("float", "float16", "bfloat16"),
    Kind.INTEGER: ("int64", "int32"),
    Kind.BOOL: ("bool",),
}


@dataclass(frozen=True)
class Rule:
    """One tensor of a graph's border.

    `key` is the config's key, `name` the official tensor; `others` are names seen in other teams' packages. What
    neither finds, the shape tells (`ranks`, and `dims`: axis -> static size), preferably with one of `words` in the
    name. `optional` tensors may be absent.
    """

    key: str
    name: str
    kind: Kind
    ranks: tuple[int, ...]
    others: tuple[str, ...] = ()
    dims: Mapping[int, int] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    fixed: bool = False
    optional: bool = False

    def fits(self, tensor: TensorIo) -> bool:
        """Whether element type, rank and static dims are those of this rule."""
        if tensor.dtype not in KIND_DTYPES[self.kind] or tensor.rank not in self.ranks:
            return False
        return tensor.rank == 0 or all(tensor.dim(axis) == size for axis, size in self.dims.items())


FLOAT, INTEGER, BOOL = Kind.FLOAT, Kind.INTEGER, Kind.BOOL
IMAGE_WORDS, AUDIO_WORDS = ("image", "img", "vision", "visual"), ("audio", "speech")
INPUTS: Mapping[Component, tuple[Rule, ...]] = {
    Component.VISION: (
        Rule("pixel_values", "pixel_values", FLOAT, (5, 4), dims={-3: 3}),
        Rule("attention_mask", "image_attention_mask", FLOAT, (4,), dims={-1: 32, -2: 32}, fixed=True),
        Rule("image_sizes", "image_sizes", INTEGER, (2,), dims={-1: 2}, optional=True),
    ),
    Component.SPEECH: (
        Rule("audio_embeds", "audio_embeds", FLOAT, (3,), ("audio_features", "input_features"), {-1: 80}),
        Rule("attention_mask", "audio_attention_mask", BOOL, (2,), optional=True),
        Rule(
            "audio_projection_mode", "audio_projection_mode", INTEGER, (1, 0), dims={-1: 1}, fixed=True, optional=True
        ),
        Rule("audio_sizes", "audio_sizes", INTEGER, (1,), words=("size", "length")),
    ),
    Component.EMBEDDING: (
        Rule("input_ids", "input_ids", INTEGER, (2,), fixed=True),
        Rule("image_features", "image_features", FLOAT, (2, 3), words=IMAGE_WORDS),
        Rule("audio_features", "audio_features", FLOAT, (2, 3), words=AUDIO_WORDS, optional=True),
    ),
    Component.DECODER: (
        Rule("inputs_embeds", "inputs_embeds", FLOAT, (3,)),
        Rule("attention_mask", "attention_mask", INTEGER, (2,), words=("mask",)),
        Rule("position_ids", "position_ids", INTEGER, (2,), words=("position",), optional=True),
        Rule("input_ids", "input_ids", INTEGER, (2,), words=("ids", "tokens"), optional=True),
    ),
}
OUTPUTS: Mapping[Component, tuple[Rule, ...]] = {
    Component.VISION: (Rule("image_features", "image_features", FLOAT, (2, 3), words=IMAGE_WORDS),),
    Component.SPEECH: (Rule("audio_features", "audio_features", FLOAT, (2, 3), ("speech_features",)),),
    Component.EMBEDDING: (Rule("inputs_embeds", "inputs_embeds", FLOAT, (3,)),),
    Component.DECODER: (Rule("logits", "logits", FLOAT, (3,), words=("logits",)),),
}
KEY_ORDER: Mapping[Component, tuple[str, ...]] = {
    Component.VISION: ("pixel_values", "attention_mask", "image_sizes"),
    Component.SPEECH: ("audio_embeds", "attention_mask", "audio_sizes", "audio_projection_mode"),
    Component.EMBEDDING: ("input_ids", "image_features", "audio_features"),
    Component.DECODER: ("inputs_embeds", "attention_mask", "position_ids", "input_ids"),
}
"""Order of the keys of `inputs` in the published config."""
