"""The sizes of the model inside a package, as its graphs show them.

onnxruntime-genai counts layers by matching `past_key_names` and takes heads and head size from the static dims 1 and 3
of the past tensors; the config's numbers serve only where a graph says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from phi4mm_export.checks.opened import OpenedPackage
from phi4mm_export.package.graph_io import Dim, TensorIo
from phi4mm_export.spec.contract import Component

PAST_KEYS = ("model.decoder.inputs.past_key_names", "past_key_values.%d.key")
PAST_VALUES = ("model.decoder.inputs.past_value_names", "past_key_values.%d.value")
PRESENT_KEYS = ("model.decoder.outputs.present_key_names", "present.%d.key")
PRESENT_VALUES = ("model.decoder.outputs.present_value_names", "present.%d.value")
EMBEDS_IN = ("model.decoder.inputs.inputs_embeds", "inputs_embeds")
EMBEDS_OUT = ("model.embedding.outputs.inputs_embeds", "inputs_embeds")
LOGITS = ("model.decoder.outputs.logits", "logits")
_MOST_LAYERS = 1000
"""More layers than any such model has; a larger index in a name is no layer count."""


@dataclass(frozen=True)
class Sizes:
    """What the graphs show; None where they do not."""

    hidden_size: int | None
    vocab_size: int | None
    num_hidden_layers: int | None
    num_key_value_heads: int | None
    head_size: int | None

    def known(self, fallback: Mapping[str, int], package: OpenedPackage) -> dict[str, int]:
        """The sizes by name; what the graphs do not show comes from the config, else from `fallback`."""
        model = package.config.get("model")
        stated = {**package.section("decoder"), **(model if isinstance(model, dict) else {})}
        found = {name: value for name, value in vars(self).items() if value is not None}
        written = {name: value for name, value in stated.items() if name in vars(self) and type(value) is int}
        return {**fallback, **written, **found}


def graph_sizes(package: OpenedPackage) -> Sizes:
    """The sizes that the decoder's border shows, the embedding's where the decoder is missing."""
    decoder = package.graphs.get(Component.DECODER)
    embedding = package.graphs.get(Component.EMBEDDING)
    hidden = vocab = layers = heads = head_size = None
    if embedding is not None:
        hidden = _static(embedding.io.output(package.mapped(*EMBEDS_OUT)), 2)
    if decoder is not None:
        hidden = _static(decoder.io.input(package.mapped(*EMBEDS_IN)), 2) or hidden
        vocab = _static(decoder.io.output(package.mapped(*LOGITS)), 2)
        template = package.mapped(*PAST_KEYS)
        layers = layer_count(template, decoder.io.input_names) or None
        first = decoder.io.input(template.replace("%d", "0"))
        heads, head_size = _static(first, 1), _static(first, 3)
    return Sizes(hidden, vocab, layers, heads, head_size)


def layer_count(template: str, names: Iterable[str]) -> int:
    """One more than the largest index that `template` ("past_key_values.%d.key") matches in `names`."""
    if "%d" not in template:
        return 0
    pattern = re.compile(re.escape(template).replace("%d", r"(\d{1,4})"))
    indices = [int(match[1]) for name in names if (match := pattern.fullmatch(name))]
    return max((index for index in indices if index < _MOST_LAYERS), default=-1) + 1


def _static(tensor: TensorIo | None, axis: int) -> int | None:
    dim: Dim = tensor.dim(axis) if tensor is not None else None
    return dim if isinstance(dim, int) else None
