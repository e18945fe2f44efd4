"""Key-value cache tensors of a decoder whatever their names: one template such as `past_key_values.%d.key` per kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phi4mm_export.package.graph_io import GraphIo

if TYPE_CHECKING:
    import onnx

OFFICIAL_PAST = ("past_key_values.%d.key", "past_key_values.%d.value")
OFFICIAL_PRESENT = ("present.%d.key", "present.%d.value")
STATE_SUFFIXES = ("conv_state", "recurrent_state")
"""Recurrent state that the runtime keeps beside a layer's cache: the key template with what follows its last dot
replaced by one of these."""

_KEY_WORD = re.compile(r"(?:^|[^a-z])k(?:ey|eys)?(?:[^a-z]|$)")
_VALUE_WORD = re.compile(r"(?:^|[^a-z])v(?:alue|alues|al)?(?:[^a-z]|$)")
_PAST_WORDS = "past_key_values"
_PASS_THROUGH = ("Identity", "Cast")


@dataclass(frozen=True)
class CacheNames:
    """Templates of the cache's four kinds of tensors and the number of layers, all counted from 0."""

    past_key: str
    past_value: str
    present_key: str
    present_value: str
    layers: int

    @property
    def inputs(self) -> frozenset[str]:
        """Every cache input of the graph, recurrent state included."""
        stem = self.past_key.rpartition(".")[0]
        states = [f"{stem}.{suffix}" for suffix in STATE_SUFFIXES] if "%d" in stem else []
        templates = [self.past_key, self.past_value, *states]
        return frozenset(template % layer for template in templates for layer in range(self.layers))


def cache_names(io: GraphIo) -> CacheNames | None:
    """The cache's templates, None unless inputs and outputs show one key and one value template of equal length."""
    past = _pair(_templates(io.input_names), OFFICIAL_PAST)
    present = _pair(_templates(io.output_names), OFFICIAL_PRESENT)
    if past is None or present is None or past[2] != present[2]:
        return None
    return CacheNames(past[0], past[1], present[0], present[1], past[2])


def grows_by_concat(graph: onnx.GraphProto, output: str) -> bool:
    """Whether a present tensor is its past with new rows appended, so that both cannot be one buffer."""
    node = _maker(graph, output)
    while node is not None and node.op_type in _PASS_THROUGH:
        node = _maker(graph, node.input[0])
    if node is None or node.op_type != "If":
        return node is not None and node.op_type == "Concat"
    position = list(node.output).index(output) if output in node.output else 0
    branches = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return any(grows_by_concat(branch, branch.output[position].name) for branch in branches)


def _maker(graph: onnx.GraphProto, name: str) -> onnx.NodeProto | None:
    return next((node for node in graph.node if name in node.output), None)


def _templates(names: Iterable[str]) -> dict[str, int]:
    """Template -> number of layers, for every template whose numbers are exactly 0 .. layers - 1."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        for template, number in _readings(name):
            numbers.setdefault(template, set()).add(number)
    return {template: len(found) for template, found in numbers.items() if found == set(range(len(found)))}


def _readings(name: str) -> Iterator[tuple[str, int]]:
    """The name with each of its numbers in turn taken for the layer."""
    for match in re.finditer(r"\d{1,4}", name):
        if "%" not in name and str(int(match[0])) == match[0]:
            yield f"{name[: match.start()]}%d{name[match.end() :]}", int(match[0])


def _pair(templates: Mapping[str, int], official: tuple[str, str]) -> tuple[str, str, int] | None:
    """The key and the value template and their common number of layers."""
    if official[0] in templates and official[1] in templates:
        key, value = official
    else:
        states = [name for name in templates if name.endswith(STATE_SUFFIXES)]
        keys = [name for name in templates if _says(_KEY_WORD, name) and name not in states]
        values = [name for name in templates if _says(_VALUE_WORD, name) and name not in states]
        if len(keys) != 1 or len(values) != 1:
            return None
        (key,), (value,) = keys, values
    return (key, value, templates[key]) if templates[key] == templates[value] else None


def _says(word: re.Pattern[str], template: str) -> bool:
    """Whether the template says key, or value, apart from "past_key_values", which says both."""
    return word.search(template.lower().replace(_PAST_WORDS, "").replace("%d", ".")) is not None
