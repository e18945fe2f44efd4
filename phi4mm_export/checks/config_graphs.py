"""genai_config.json against the graphs: mapped names, sizes, cache style, recurrent state, the long-context switch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phi4mm_export.checks.contract import STATE_NAMES
from phi4mm_export.checks.decoder_facts import DecoderFacts, decoder_facts
from phi4mm_export.checks.opened import CONFIG_FILE, OpenedGraph, OpenedPackage
from phi4mm_export.checks.report import Finding, error, note, warning
from phi4mm_export.checks.sizes import (
    EMBEDS_IN,
    EMBEDS_OUT,
    LOGITS,
    PAST_KEYS,
    PAST_VALUES,
    PRESENT_KEYS,
    PRESENT_VALUES,
    graph_sizes,
)
from phi4mm_export.package.graph_io import TensorIo
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.on_disk import is_file, is_inside_name

GATED_MIN_RUNTIME = "0.14.1"
"""First onnxruntime-genai that feeds input_ids to this model type's decoder (0.13.2 does not)."""
_MAPPED = {
    Component.VISION: (
        ("input", "model.vision.inputs.pixel_values", "pixel_values", True),
        ("input", "model.vision.inputs.attention_mask", "image_attention_mask", True),
        ("input", "model.vision.inputs.image_sizes", "image_sizes", False),
        ("output", "model.vision.outputs.image_features", "image_features", True),
    ),
    Component.SPEECH: (
        ("input", "model.speech.inputs.audio_embeds", "audio_embeds", True),
        ("input", "model.speech.inputs.attention_mask", "audio_attention_mask", False),
        ("input", "model.speech.inputs.audio_sizes", "audio_sizes", True),
        ("input", "model.speech.inputs.audio_projection_mode", "audio_projection_mode", False),
        ("output", "model.speech.outputs.audio_features", "audio_features", True),
    ),
    Component.EMBEDDING: (
        ("input", "model.embedding.inputs.input_ids", "input_ids", True),
        ("input", "model.embedding.inputs.image_features", "image_features", True),
        ("input", "model.embedding.inputs.audio_features", "audio_features", False),
        ("output", *EMBEDS_OUT, True),
    ),
    Component.DECODER: (
        ("input", *EMBEDS_IN, True),
        ("input", "model.decoder.inputs.attention_mask", "attention_mask", True),
        ("output", *LOGITS, True),
    ),
}
"""(side, config key, default name, required) of every tensor that og binds by name."""
_FIXED_INPUTS = {Component.VISION: "image_attention_mask", Component.EMBEDDING: "input_ids"}
"""Names that og binds literally, whatever the config says."""


_DEFAULT_PROCESSORS = {"vision": "processor_config.json", "speech": "speech_processor.json"}
"""What the runtime opens where config_filename is left out."""


def check_config_against_graphs(package: OpenedPackage) -> Iterator[Finding]:
    """Findings that need both the config and the graphs' borders."""
    if not package.config:
        return
    yield from _files(package)
    for component, graph in package.graphs.items():
        yield from _names(package, component, graph)
    yield from _same_name_two_types(package)
    yield from _sizes(package)
    decoder = package.graphs.get(Component.DECODER)
    if decoder is not None:
        facts = decoder_facts(decoder.model, package.mapped(*PRESENT_KEYS).replace("%d", "0"))
        yield from _cache(package, decoder, facts)
        yield from _recurrent_state(package, decoder)
        yield from _lengths(package, decoder, facts)


def _files(package: OpenedPackage) -> Iterator[Finding]:
    """Every file name of the config: relative, without `..`, and there."""
    for section in ("decoder", "vision", "speech", "embedding"):
        values = package.section(section)
        for key in ("filename", "config_filename", "adapter_filename"):
            file = values.get(key)
            where = f"{CONFIG_FILE}: model.{section}.{key}"
            if key == "filename" and values and (file is None or (file == "" and section != "speech")):
                yield error(
                    "C340", where, "the runtime needs a file name here", expected="the graph's file", found=file
                )
            if key == "config_filename" and values.get("filename"):
                yield from _default_processor(package, section, where)
            if not isinstance(file, str) or not file:
                continue
            if not is_inside_name(file):
                yield error(
                    "C341",
                    where,
                    "the runtime refuses a path that leaves the package",
                    expected="a relative path without ..",
                    found=repr(file),
                )
            elif key == "config_filename" and not is_file(package.folder / file):
                yield error("C342", where, "the file is missing", expected=file, fix="write it with: phi4mm config")
            elif "\\" in file:
                yield warning("C343", where, "a backslash works on Windows only", expected="/", found=repr(file))
    model = package.config.get("model")
    folder = model.get("tokenizer_dir") if isinstance(model, dict) else None
    if isinstance(folder, str) and folder and not is_inside_name(folder):
        yield error("C341", f"{CONFIG_FILE}: model.tokenizer_dir", "the folder leaves the package", found=repr(folder))


def _default_processor(package: OpenedPackage, section: str, where: str) -> Iterator[Finding]:
    """A tower's processor file without a name in the config: the runtime opens the one it has built in."""
    file = package.section(section).get("config_filename")
    taken = "" if file == "" else _DEFAULT_PROCESSORS.get(section)
    if file or taken is None or (taken and is_file(package.folder / taken)):
        return
    yield error(
        "C349",
        where,
        f"the runtime opens {taken}, which is not there" if taken else "the runtime needs a file name here",
        expected=f"the name of the {section} processor's file",
        found="no key" if file is None else repr(file),
        fix="name the file (phi4mm config does)",
    )


def _names(package: OpenedPackage, component: Component, graph: OpenedGraph) -> Iterator[Finding]:
    for side, key, default, required in _MAPPED[component]:
        name = package.mapped(key, default)
        tensor = graph.io.input(name) if side == "input" else graph.io.output(name)
        if tensor is not None:
            continue
        known = graph.io.input_names if side == "input" else graph.io.output_names
        if required:
            yield error(
                "C344",
                f"{CONFIG_FILE}: {key}",
                f"the {side} {name!r} is not in {graph.file}",
                expected=f"one of {', '.join(known[:8])}",
                found=repr(name),
                fix="map the name that the graph has (phi4mm config does)",
            )
        elif package.mapped(key, "") not in ("", default):
            yield warning("C345", f"{CONFIG_FILE}: {key}", f"{graph.file} has no {side} {name!r}: it is never fed")
    fixed = _FIXED_INPUTS.get(component)
    if fixed is not None and graph.io.input(fixed) is None:
        yield error(
            "C346",
            f"{graph.file}: {fixed}",
            "the runtime binds this input under its literal name, whatever the config says",
            expected=fixed,
            found=f"inputs {', '.join(graph.io.input_names[:8])}",
            fix="rename the input in the graph",
        )
    if component is Component.DECODER:
        yield from _layer_names(package, graph)


def _layer_names(package: OpenedPackage, graph: OpenedGraph) -> Iterator[Finding]:
    layers = graph_sizes(package).num_hidden_layers or 0
    for side, (key, default) in (
        ("input", PAST_KEYS),
        ("input", PAST_VALUES),
        ("output", PRESENT_KEYS),
        ("output", PRESENT_VALUES),
    ):
        template = package.mapped(key, default)
        if "%d" not in template:
            yield error("C347", f"{CONFIG_FILE}: {key}", "the name has no %d", expected=default, found=template)
            continue
        names = graph.io.input_names if side == "input" else graph.io.output_names
        missing = [template.replace("%d", str(layer)) for layer in range(max(layers, 1))]
        missing = [name for name in missing if name not in names]
        if missing:
            yield error(
                "C347",
                f"{CONFIG_FILE}: {key}",
                f"{len(missing)} cache {side}s are not in {graph.file}, the first is {missing[0]!r}",
                expected=f"{side}s named {template} for layers 0 to {max(layers, 1) - 1}",
                fix="map the names that the graph has",
            )


def _same_name_two_types(package: OpenedPackage) -> Iterator[Finding]:
    """og merges the graphs' inputs by name, and refuses one name with two element types."""
    seen: dict[str, tuple[str, TensorIo]] = {}
    for graph in package.graphs.values():
        for tensor in graph.io.inputs:
            first = seen.setdefault(tensor.name, (graph.file, tensor))
            if first[1].dtype != tensor.dtype:
                yield error(
                    "C348",
                    f"{graph.file}: {tensor.name}",
                    f"{first[0]} has an input of the same name and another type, which the runtime refuses",
                    expected=first[1].dtype,
                    found=tensor.dtype,
                    fix="give both inputs one element type, or one of them another name",
                )


def _sizes(package: OpenedPackage) -> Iterator[Finding]:
    """Sizes the config states against those the graphs show."""
    decoder = package.section("decoder")
    found = graph_sizes(package)
    model = package.config.get("model")
    stated: dict[str, tuple[str, Any]] = {
        name: (f"model.decoder.{name}", decoder.get(name))
        for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_size")
    }
    stated["vocab_size"] = ("model.vocab_size", model.get("vocab_size") if isinstance(model, dict) else None)
    for name, (key, value) in stated.items():
        real = getattr(found, name)
        if real is None:
            if value is None and package.graphs.get(Component.DECODER) is not None:
                yield error("C350", f"{CONFIG_FILE}: {key}", "neither the config nor the graph tells this size")
        elif value is None and name in ("hidden_size", "vocab_size"):
            yield error("C350", f"{CONFIG_FILE}: {key}", "the size is missing", expected=real, fix=f"write {real}")
        elif isinstance(value, int | float) and value != real:
            yield error(
                "C351",
                f"{CONFIG_FILE}: {key}",
                "the config does not fit the graphs",
                expected=f"{real}, as the graphs have it",
                found=value,
                fix=f"write {real}",
            )


def _cache(package: OpenedPackage, graph: OpenedGraph, facts: DecoderFacts) -> Iterator[Finding]:
    search = package.config.get("search")
    shared = search.get("past_present_share_buffer", False) if isinstance(search, dict) else False
    where = f"{CONFIG_FILE}: search.past_present_share_buffer"
    if facts.cache_operator == "Concat" and shared is True:
        yield error(
            "C352",
            where,
            f"{graph.file} grows its cache by Concat, which cannot share one buffer",
            expected="false",
            found="true",
        )
    past = graph.io.input(package.mapped(*PAST_KEYS).replace("%d", "0"))
    if past is not None and isinstance(past.dim(2), int):
        yield warning(
            "C353",
            f"{graph.file}: {past.name}",
            f"the cache length is fixed at {past.dim(2)}: the runtime shares buffers of that size regardless",
            expected="a dynamic past_sequence_length",
            found=past.dim(2),
        )
    heads = package.section("decoder").get("num_attention_heads")
    if facts.num_heads is not None and isinstance(heads, int) and heads != facts.num_heads:
        yield error(
            "C351",
            f"{CONFIG_FILE}: model.decoder.num_attention_heads",
            "the config does not fit the attention nodes",
            expected=facts.num_heads,
            found=heads,
            fix=f"write {facts.num_heads}",
        )


def _recurrent_state(package: OpenedPackage, graph: OpenedGraph) -> Iterator[Finding]:
    """Pairs of conv_state and recurrent_state: names derived from past_key_names, all dims but the batch static."""
    past_stem = package.mapped(*PAST_KEYS).rpartition(".")[0]
    present_stem = package.mapped(*PRESENT_KEYS).rpartition(".")[0]
    state_inputs = [name for name in graph.io.input_names if name.endswith(STATE_NAMES)]
    if not state_inputs:
        return
    if graph.io.input(package.mapped("model.decoder.inputs.input_ids", "input_ids")) is not None:
        text = f"the decoder chooses its adapter itself: needs onnxruntime-genai {GATED_MIN_RUNTIME} or later"
        yield note("C360", graph.file, text)
    for layer in sorted({name.split(".")[-2] for name in state_inputs if name.count(".") >= 2}):
        for kind, rank in zip(STATE_NAMES, (3, 4), strict=True):
            name = f"{past_stem.replace('%d', layer)}.{kind}"
            other = f"{present_stem.replace('%d', layer)}.{kind}"
            past, present = graph.io.input(name), graph.io.output(other)
            missing = [text for text, tensor in ((name, past), (other, present)) if tensor is None]
            if past is None or present is None:
                yield error(
                    "C361",
                    f"{graph.file}: {missing[0]}",
                    "a recurrent state needs conv_state and recurrent_state, each as input and as output",
                    expected=f"{name} and {other}",
                    found=f"no {' and no '.join(missing)}",
                )
                continue
            yield from _state_shape(graph, past, present, rank)


def _state_shape(graph: OpenedGraph, past: TensorIo, present: TensorIo, rank: int) -> Iterator[Finding]:
    where = f"{graph.file}: {past.name}"
    if past.rank != rank:
        yield error("C362", where, "the rank of the recurrent state", expected=rank, found=past.rank)
    elif not all(isinstance(dim, int) and dim > 0 for dim in (past.dims or ())[1:]):
        yield error("C363", where, "every dim but the batch must be static", expected="numbers", found=str(past))
    elif (present.dims or ())[1:] != (past.dims or ())[1:] or present.dtype != past.dtype:
        yield error(
            "C364", where, "input and output share one buffer and differ", expected=str(past), found=str(present)
        )


def _lengths(package: OpenedPackage, graph: OpenedGraph, facts: DecoderFacts) -> Iterator[Finding]:
    model = package.config.get("model")
    context = model.get("context_length") if isinstance(model, dict) else None
    if not isinstance(context, int):
        return
    where = f"{CONFIG_FILE}: model.context_length"
    if facts.longest is not None and context > facts.longest:
        yield error(
            "C370",
            where,
            f"the rotary tables of {graph.file} end earlier",
            expected=f"at most {facts.longest}",
            found=context,
        )
    if facts.switch is not None and context > facts.switch:
        yield note(
            "C371",
            where,
            f"beyond {facts.switch} tokens the rotary tables change to the long factors, while keys cached before keep "
            "the short ones; an exact answer across that length needs a new Generator fed the whole sequence "
            "(phi4mm run does so)",
            found=context,
        )
