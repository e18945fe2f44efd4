"""Other people's graphs: which file is which component, and which tensor answers to which key of genai_config.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from phi4mm_export.package.border_rules import INPUTS, KEY_ORDER, OUTPUTS, Rule
from phi4mm_export.package.cache_names import CacheNames, cache_names
from phi4mm_export.package.graph_io import GraphIo, TensorIo
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.phi4mm_config import OFFICIAL_NAMES, GraphNames

FED_RANK_OF_PIXELS = 5
"""onnxruntime-genai feeds pixel_values as [images, crops, 3, height, width]."""


@dataclass(frozen=True)
class Gap:
    """Something the config cannot bridge. `fatal`: with it the runtime cannot run the graph at all."""

    where: str
    what: str
    fatal: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class GraphMap:
    """How the config names one graph's tensors, and what it cannot name."""

    names: GraphNames
    gaps: tuple[Gap, ...] = ()
    cache: CacheNames | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Key path -> tensor, where the tensor has another name than in the official graphs."""


def component_of(io: GraphIo) -> Component | None:
    """What a graph is, by its borders: names first, shapes for graphs whose names say nothing; None if unclear."""
    inputs, outputs = set(io.input_names), set(io.output_names)
    by_name = {
        Component.DECODER: "logits" in outputs or cache_names(io) is not None,
        Component.VISION: "pixel_values" in inputs,
        Component.SPEECH: "audio_embeds" in inputs or "speech_features" in outputs,
        Component.EMBEDDING: "input_ids" in inputs and "inputs_embeds" in outputs,
    }
    named = [component for component, yes in by_name.items() if yes]
    if named:
        return named[0]
    signs = {
        Component.VISION: INPUTS[Component.VISION][0],
        Component.SPEECH: INPUTS[Component.SPEECH][0],
        Component.EMBEDDING: INPUTS[Component.EMBEDDING][0],
    }
    return next((part for part, rule in signs.items() if any(rule.fits(tensor) for tensor in io.inputs)), None)


def map_graph(component: Component, file: str, io: GraphIo) -> GraphMap:
    """The config's names for one graph; `file` is its path in the package, with `/`."""
    cache = cache_names(io) if component is Component.DECODER else None
    taken = cache.inputs if cache else frozenset()
    inputs = _match(INPUTS[component], [tensor for tensor in io.inputs if tensor.name not in taken])
    outputs = _match(OUTPUTS[component], io.outputs, spare=True)
    gaps = [*_missing(component, inputs, outputs), *_unfed(component, file, io, inputs, taken)]
    gaps += _odd_ranks(inputs)
    names_in, names_out = _named(component, inputs), {key: tensor.name for key, tensor in outputs.items()}
    if component is Component.DECODER:
        if names_in.get("input_ids") == "input_ids":
            del names_in["input_ids"]  # the runtime's default; a gated decoder needs no key
        if cache is None:
            text = "no pair of key and value cache tensors per layer was found among inputs and outputs"
            gaps.append(Gap("model.decoder.inputs.past_key_names", text, fatal=True))
        else:
            names_in |= {"past_key_names": cache.past_key, "past_value_names": cache.past_value}
            names_out |= {"present_key_names": cache.present_key, "present_value_names": cache.present_value}
    if component is Component.SPEECH and len(io.outputs) > 1 and outputs:
        chosen = names_out["audio_features"]
        unused = ", ".join(name for name in io.output_names if name != chosen)
        gaps.append(
            Gap(
                "model.speech.outputs.audio_features",
                f"the graph has several outputs; {chosen} serves every request, also image with audio, {unused} none",
            )
        )
    return GraphMap(GraphNames(file, names_in, names_out), tuple(gaps), cache, _renamed(component, names_in, names_out))


def stand_ins(maps: Mapping[Component, GraphMap]) -> dict[Component, GraphMap]:
    """The maps with a stand-in for each tensor whose element type the runtime looks up and the graph lacks.

    The processor refuses to start unless the config's vision mask and audio sizes name an input of some graph; an
    existing one satisfies the look-up and nothing is fed for the key.
    """
    result = dict(maps)
    pixels = maps[Component.VISION].names.inputs.get("pixel_values")
    mask = maps[Component.DECODER].names.inputs.get("attention_mask")
    for component, key, tensor in (
        (Component.VISION, "attention_mask", pixels),
        (Component.SPEECH, "audio_sizes", mask),
    ):
        if component in result and tensor and key not in result[component].names.inputs:
            old = result[component]
            inputs = {**old.names.inputs, key: tensor}
            ordered = {name: inputs[name] for name in KEY_ORDER[component] if name in inputs}
            names = GraphNames(old.names.filename, ordered, old.names.outputs)
            renamed = {**old.renamed, f"model.{component}.inputs.{key}": tensor}
            result[component] = GraphMap(names, old.gaps, old.cache, renamed)
    return result


def _match(rules: Iterable[Rule], tensors: Iterable[TensorIo], *, spare: bool = False) -> dict[str, TensorIo]:
    """Key -> tensor: official names, then names seen elsewhere, then a fitting shape with a telling word in the name,
    then a shape that fits one free tensor and one open rule only.

    `spare`: several tensors of the right shape are no doubt but a choice, and the first one is taken.
    """
    free = {tensor.name: tensor for tensor in tensors}
    found: dict[str, TensorIo] = {}
    for names_of in (lambda rule: (rule.name,), lambda rule: rule.others):
        for rule in rules:
            name = next((name for name in names_of(rule) if name in free), None)
            if rule.key not in found and name is not None and not (rule.fixed and name != rule.name):
                found[rule.key] = free.pop(name)
    for rule in rules:
        telling = [t for t in free.values() if rule.fits(t) and any(word in t.name.lower() for word in rule.words)]
        if rule.key not in found and not rule.fixed and len(telling) == 1:
            found[rule.key] = free.pop(telling[0].name)
    open_rules = [rule for rule in rules if rule.key not in found and not rule.fixed]
    for rule in open_rules:
        fitting = [tensor for tensor in free.values() if rule.fits(tensor)]
        rivals = [other for other in open_rules if other.key not in found and any(other.fits(t) for t in fitting)]
        if fitting and (spare or (len(fitting) == 1 and len(rivals) == 1)):
            found[rule.key] = free.pop(fitting[0].name)
    return found


def _named(component: Component, inputs: Mapping[str, TensorIo]) -> dict[str, str]:
    return {key: inputs[key].name for key in KEY_ORDER[component] if key in inputs}


def _missing(component: Component, inputs: Mapping[str, TensorIo], outputs: Mapping[str, TensorIo]) -> Iterator[Gap]:
    """Tensors that the runtime wants and the graph does not have."""
    for side, rules, found in (("inputs", INPUTS[component], inputs), ("outputs", OUTPUTS[component], outputs)):
        for rule in rules:
            if rule.key in found or rule.optional:
                continue
            where = f"model.{component}.{side}.{rule.key}"
            if component is Component.VISION and rule.key == "attention_mask":
                yield Gap(where, f"the graph has no {rule.name}: padded images give wrong features or fail")
            elif component is Component.SPEECH and rule.key == "audio_sizes":
                yield Gap(where, f"the graph has no {rule.name}: clips of unequal length give wrong token counts")
            else:
                yield Gap(where, f"no tensor of the graph can be told to be {rule.name}", fatal=True)


def _unfed(
    component: Component, file: str, io: GraphIo, inputs: Mapping[str, TensorIo], taken: frozenset[str]
) -> Iterator[Gap]:
    """Inputs that nothing would feed: the run would end in a null-input error."""
    bound = {tensor.name for tensor in inputs.values()} | taken
    lacking = [rule for rule in INPUTS[component] if rule.fixed and rule.key not in inputs]
    for tensor in io.inputs:
        if tensor.name in bound:
            continue
        meant = next((rule for rule in lacking if rule.fits(tensor)), None)
        if meant is not None:
            text = f"the runtime feeds this tensor only under the name {meant.name}, whatever the config says"
        else:
            text = "the runtime feeds nothing for this input"
        yield Gap(f"{file}: {tensor.name}", text, fatal=True)


def _odd_ranks(inputs: Mapping[str, TensorIo]) -> Iterator[Gap]:
    """Ranks with which the graph loads and its requests fail."""
    pixels = inputs.get("pixel_values")
    if pixels is not None and pixels.rank == FED_RANK_OF_PIXELS - 1:
        yield Gap(
            "model.vision.inputs.pixel_values",
            f"{pixels.name} has rank {pixels.rank}, the runtime feeds rank {FED_RANK_OF_PIXELS}: image requests fail",
        )


def _renamed(component: Component, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> dict[str, str]:
    """Key path -> tensor, for keys that the official graphs answer with another name, or not at all."""
    official_in, official_out = OFFICIAL_NAMES[component]
    sides = (("inputs", inputs, official_in), ("outputs", outputs, official_out))
    return {
        f"model.{component}.{side}.{key}": name
        for side, names, official in sides
        for key, name in names.items()
        if official.get(key) != name
    }
