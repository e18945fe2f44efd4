"""What the weights of one graph take at run time, and the model's sizes, read off the graph itself.

Works on a graph about to be written as on one that lies on disk: only names, types and shapes are looked at.
On the CPU ONNX Runtime maps the data file, packs every weight of a product into memory of its own and lets the mapped
bytes go; tables that are only gathered from stay mapped, and only rows that were used are resident. Float16 weights
become float32 first: most CPU kernels know no float16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.footprint import DecoderDims
from phi4mm_export.spec.json_fields import Fields
from phi4mm_export.spec.model import AudioDims, VisionDims

PACKED_OPERATORS = frozenset({"MatMulNBits", "MatMul", "FusedMatMul", "Gemm", "Conv"})
PUBLISHED_INTERMEDIATE = 8192
PUBLISHED_VISION = VisionDims(1152, 4304, 27)
PUBLISHED_AUDIO = AudioDims(1024, 16, 1536, 24, 3, 1024, 500)
"""The real model's towers, for graphs in which the sizes cannot be told."""


@dataclass(frozen=True)
class GraphWeights:
    """Bytes of one graph's weights: in its files, in memory of their own, mapped from the file, on the device.

    largest: the largest tensor that is packed; its mapped bytes are resident too while the session loads.
    """

    component: Component
    stored: int
    anonymous: int
    mapped: int
    device: int
    largest: int


def graph_weights(component: Component, model: ir.Model, provider: Provider) -> GraphWeights:
    """What the initializers of a graph take on a provider."""
    used_by: dict[str, set[str]] = defaultdict(set)
    for node in all_nodes(model.graph):
        for value in node.inputs:
            if value is not None and value.name:
                used_by[value.name].add(node.op_type)
    stored = anonymous = mapped = largest = 0
    for name, value in model.graph.initializers.items():
        nbytes = value_nbytes(value)
        stored += nbytes
        operators = used_by[name]
        if operators & PACKED_OPERATORS or (value.dtype is ir.DataType.FLOAT16 and "Cast" in operators):
            anonymous += 2 * nbytes if value.dtype is ir.DataType.FLOAT16 else nbytes
            largest = max(largest, nbytes)
        else:
            mapped += nbytes
    if provider is Provider.CUDA:
        return GraphWeights(component, stored, 0, 0, stored, largest)
    return GraphWeights(component, stored, anonymous, mapped, 0, largest)


def value_nbytes(value: ir.Value) -> int:
    """Bytes of an initializer, from its type and shape."""
    count = 1
    for dim in value.shape or ():
        count *= int(dim) if isinstance(dim, int) else 1
    return 0 if value.dtype is None else count * value.dtype.bitwidth // 8


def has_full_logits(model: ir.Model) -> bool:
    """Whether the decoder gives logits of every position: dim 1 of its logits is not literally 1."""
    for value in model.graph.outputs:
        if value.name == "logits" and value.shape is not None and len(value.shape) == 3:
            return value.shape[1] != 1
    return True


def decoder_dims(config: Fields, model: ir.Model) -> DecoderDims:
    """The decoder's sizes: those that genai_config.json states, and the MLP's width from the graph.

    Raises as `Fields.integer` for a size that is missing or none.
    """
    whole = config.section("model")
    section = whole.section("decoder")
    return DecoderDims(
        hidden_size=section.integer("hidden_size"),
        intermediate_size=_intermediate(model),
        num_layers=section.integer("num_hidden_layers"),
        num_heads=section.integer("num_attention_heads"),
        num_kv_heads=section.integer("num_key_value_heads"),
        head_dim=section.integer("head_size"),
        vocab_size=whole.integer("vocab_size"),
        context_length=whole.integer("context_length"),
    )


def vision_dims(model: ir.Model) -> VisionDims:
    """Width, MLP width and heads of a vision graph; the published ones where it does not show them."""
    shapes = [
        tuple(int(d) for d in v.shape if isinstance(d, int)) for v in model.graph.initializers.values() if v.shape
    ]
    width = next((s[0] for s in shapes if len(s) == 4 and s[1] == 3), PUBLISHED_VISION.hidden_size)
    wider = [s[1] for s in shapes if len(s) == 2 and s[0] == width and width < s[1] < 8 * width]
    mlp = max(set(wider), key=wider.count) if wider else PUBLISHED_VISION.intermediate_size
    layers = sum(1 for s in shapes if s == (mlp, width)) + 1
    return VisionDims(width, mlp, layers, num_heads=_heads(model, PUBLISHED_VISION.num_heads))


def audio_dims(model: ir.Model) -> AudioDims:
    """Channels and heads of a speech graph, which decide its activations; the published ones where it hides them."""
    shapes = [
        tuple(int(d) for d in v.shape if isinstance(d, int)) for v in model.graph.initializers.values() if v.shape
    ]
    channels = next((s[0] for s in shapes if len(s) == 4 and s[1:] == (1, 3, 3)), PUBLISHED_AUDIO.conv_channels)
    heads = _heads(model, PUBLISHED_AUDIO.num_heads)
    p = PUBLISHED_AUDIO
    return AudioDims(p.hidden_size, heads, p.linear_units, p.num_blocks, p.kernel_size, channels, p.bias_max_distance)


def all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every node of a graph and of the branches in it."""
    for node in graph:
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from all_nodes(attribute.as_graph())


def _heads(model: ir.Model, default: int) -> int:
    for node in all_nodes(model.graph):
        if node.op_type == "MultiHeadAttention" and "num_heads" in node.attributes:
            return node.attributes["num_heads"].as_int()
    return default


def _intermediate(model: ir.Model) -> int:
    """Rows of the gate projection: half of a packed one, whatever integer or float form it is stored in."""
    for name, value in model.graph.initializers.items():
        if ".lora_" in name or value.shape is None or len(value.shape) < 2:
            continue
        sizes = [int(dim) for dim in value.shape if isinstance(dim, int)]
        if "gate_up_proj" in name:
            return (max(sizes) if value.dtype in _FLOATS else sizes[0]) // 2
        if "gate_proj" in name:
            return max(sizes) if value.dtype in _FLOATS else sizes[0]
    return PUBLISHED_INTERMEDIATE


_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
