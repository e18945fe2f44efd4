"""From modules to ONNX models without weights: inputs, outputs, names, metadata.

Every name in a finished graph follows from the module tree, so that one more node does not rename the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder, nn

from phi4mm_export.graphs import gates
from phi4mm_export.graphs.decoder import Decoder, DecoderFormat, Ranks, cache_inputs
from phi4mm_export.graphs.embedding import Embedding
from phi4mm_export.graphs.fused import DOMAIN, DOMAIN_VERSION
from phi4mm_export.graphs.layers import ONNX_FLOAT, cast
from phi4mm_export.graphs.speech import AudioEmbed
from phi4mm_export.graphs.vision import ImageEmbed
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.model import IMAGE_SIZE, PATCHES_PER_SIDE, ModelConfig
from phi4mm_export.spec.recipe import Recipe

OPSET = 20
"""The lowest with Gelu; 21 and later are left to runtimes that must have them."""
IR_VERSION = 10
ROPE_SWITCH_KEY = "phi4mm.rope_switch"
"""Model metadata: the total length above which the long rotary divisors apply."""
LORA_FORM_KEY = "phi4mm.lora"


@dataclass(frozen=True)
class BuiltGraph:
    """A graph whose large initializers have no bytes yet, and the module tree that names them."""

    component: Component
    model: ir.Model
    module: nn.Module


def build(component: Component, config: ModelConfig, ranks: Ranks, recipe: Recipe) -> BuiltGraph:
    """One graph of the package, its parameters declared but empty."""
    graph = ir.Graph([], [], nodes=[], name=component.value, opset_imports={"": OPSET, DOMAIN: DOMAIN_VERSION})
    builder = GraphBuilder(graph)
    makers: dict[Component, Callable[[OpBuilder, ModelConfig, Ranks, Recipe], nn.Module]] = {
        Component.DECODER: _decoder,
        Component.VISION: _vision,
        Component.SPEECH: _speech,
        Component.EMBEDDING: _embedding,
    }
    module = makers[component](builder.op, config, ranks, recipe)
    _name_nodes(graph)
    model = ir.Model(graph, ir_version=IR_VERSION, producer_name="phi4mm")
    if component is Component.DECODER:
        model.metadata_props[ROPE_SWITCH_KEY] = str(config.rope.original_max_positions)
        model.metadata_props[LORA_FORM_KEY] = recipe.lora.value
    return BuiltGraph(component, model, module)


def _decoder(op: OpBuilder, config: ModelConfig, ranks: Ranks, recipe: Recipe) -> nn.Module:
    fmt = DecoderFormat(
        base=recipe.decoder_format,
        head=recipe.head_format,
        lora=recipe.lora_format,
        form=recipe.lora,
        compute=recipe.float_type,
        full_logits=recipe.full_logits,
    )
    module = Decoder(config, ranks, fmt)
    kind, give = ONNX_FLOAT[recipe.float_type], op.builder.input
    embeds = give("inputs_embeds", kind, ["batch_size", "sequence_length", config.hidden_size])
    mask = give("attention_mask", ir.DataType.INT64, ["batch_size", "total_sequence_length"])
    past = cache_inputs(op, config, recipe.float_type)
    ids = state = spare = None
    if module.choice is not None:
        ids = give("input_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
        names = gates.state_names(present=False)
        state = give(names[0], kind, ["batch_size", 1, 2])
        spare = give(names[1], kind, ["batch_size", 1, 1, 1])
    logits, present, new_state = module(op, embeds, mask, past, ids, state)
    logits_dims: list[int | str] = ["batch_size", "sequence_length" if recipe.full_logits else 1, config.vocab_size]
    _give(op, "logits", logits, kind, logits_dims)
    cache_dims: list[int | str] = ["batch_size", config.num_kv_heads, "total_sequence_length", config.head_dim]
    for i, pair in enumerate(present):
        for part, value in zip(("key", "value"), pair, strict=True):
            _give(op, f"present.{i}.{part}", value, kind, cache_dims)
    if new_state is not None and spare is not None:
        names = gates.state_names(present=True)
        _give(op, names[0], new_state, kind, ["batch_size", 1, 2])
        _give(op, names[1], gates.pass_through(op, spare), kind, ["batch_size", 1, 1, 1])
    return module


def _vision(op: OpBuilder, config: ModelConfig, ranks: Ranks, recipe: Recipe) -> nn.Module:
    del ranks
    module = ImageEmbed(config, recipe.encoder_float)
    kind, give = ONNX_FLOAT[recipe.float_type], op.builder.input
    pixels = give("pixel_values", kind, ["num_images", "max_num_crops", 3, IMAGE_SIZE, IMAGE_SIZE])
    side = PATCHES_PER_SIDE
    mask = give("image_attention_mask", kind, ["num_images", "max_num_crops", side, side])
    sizes = give("image_sizes", ir.DataType.INT64, ["num_images", 2])
    features = cast(op, module(op, pixels, mask, sizes), kind)
    _give(op, "image_features", features, kind, ["num_image_tokens", config.hidden_size])
    return module


def _speech(op: OpBuilder, config: ModelConfig, ranks: Ranks, recipe: Recipe) -> nn.Module:
    del ranks
    module = AudioEmbed(config, recipe.encoder_float)
    kind, give = ONNX_FLOAT[recipe.float_type], op.builder.input
    frames = give("audio_embeds", kind, ["num_audios", "num_frames", config.audio.num_mels])
    mask = give("audio_attention_mask", ir.DataType.BOOL, ["num_audios", "num_frames"])
    sizes = give("audio_sizes", ir.DataType.INT64, ["num_audios"])
    mode = give("audio_projection_mode", ir.DataType.INT64, [1])
    features = cast(op, module(op, frames, mask, sizes, mode), kind)
    _give(op, "audio_features", features, kind, ["num_audio_tokens", config.hidden_size])
    return module


def _embedding(op: OpBuilder, config: ModelConfig, ranks: Ranks, recipe: Recipe) -> nn.Module:
    del ranks
    module = Embedding(config, recipe.embedding_format, recipe.float_type)
    kind, give = ONNX_FLOAT[recipe.float_type], op.builder.input
    ids = give("input_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
    images = give("image_features", kind, ["num_image_tokens", config.hidden_size])
    audios = give("audio_features", kind, ["num_audio_tokens", config.hidden_size])
    rows = module(op, ids, images, audios)
    _give(op, "inputs_embeds", rows, kind, ["batch_size", "sequence_length", config.hidden_size])
    return module


def _give(op: OpBuilder, name: str, value: ir.Value, dtype: ir.DataType, dims: Sequence[int | str]) -> None:
    """Declare an output under its contract name, type and dimensions."""
    value.type, value.shape = ir.TensorType(dtype), ir.Shape(list(dims))
    op.builder.add_output(value, name)


def _name_nodes(graph: ir.Graph) -> None:
    """Name nodes and edges after their module and operator, and drop the builder's metadata."""
    fixed = {value.name for value in (*graph.inputs, *graph.outputs)}
    counts: Counter[str] = Counter()
    for node in _nodes(graph):
        scope = [part for part in _scopes(node) if part]
        node.metadata_props.clear()
        base = "/".join([*scope, node.op_type])
        counts[base] += 1
        node.name = base if counts[base] == 1 else f"{base}_{counts[base]}"
        for i, value in enumerate(node.outputs):
            if value.name and value.name not in fixed:
                value.name = f"{node.name}/out_{i}"


def _scopes(node: ir.Node) -> list[str]:
    return (node.name or "").split("/")[:-1]


def _nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    for node in graph:
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _nodes(attribute.as_graph())
