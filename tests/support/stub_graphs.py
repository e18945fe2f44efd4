"""Four tiny ONNX graphs with the package contract's names, for tests that need borders and not arithmetic.

H = 16 features, 1 layer, 1 KV head of 16, vocabulary 200064; onnxruntime-genai loads them and runs text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HIDDEN, KV_HEADS, HEAD_DIM, VOCAB = 16, 1, 16, 200064
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Border = tuple[str, int, Sequence[int | str]]

NESTED = {
    "decoder": "model/model.onnx",
    "vision": "vision/model.onnx",
    "speech": "speech/model.onnx",
    "embedding": "embedding/model.onnx",
}
FLAT = {
    "decoder": "phi-4-mm-text.onnx",
    "vision": "phi-4-mm-vision.onnx",
    "speech": "phi-4-mm-speech.onnx",
    "embedding": "phi-4-mm-embedding.onnx",
}


RAMP = {"zero": 0, "vocab": VOCAB, "step": 1}
"""Logits are a multiple of 0 .. VOCAB - 1: a small file for a large vocabulary."""


def save(
    path: Path,
    inputs: Sequence[Border],
    outputs: Sequence[Border],
    nodes: Sequence[onnx.NodeProto] = (),
    initializers: Sequence[onnx.TensorProto] = (),
) -> None:
    """A graph of these borders; an output that no node makes is a constant of zeros, one per row."""
    nodes = list(nodes)
    made = {name for node in nodes for name in node.output}
    for name, dtype, dims in outputs:
        if name not in made:
            shape = [dim if isinstance(dim, int) else 0 for dim in dims]
            zeros = numpy_helper.from_array(np.zeros(shape, helper.tensor_dtype_to_np_dtype(dtype)))
            nodes.append(helper.make_node("Constant", [], [name], value=zeros))
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info(name, dtype, dims) for name, dtype, dims in inputs],
        [helper.make_tensor_value_info(name, dtype, dims) for name, dtype, dims in outputs],
        list(initializers),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path))


def decoder(
    path: Path,
    *,
    names: Mapping[str, str] | None = None,
    extra: Sequence[Border] = (),
    attention: str = "GroupQueryAttention",
    layers: int = 1,
    gated: bool = False,
) -> None:
    """inputs_embeds, attention_mask and past -> logits [B, S, V] and present; `attention` makes the caches.

    `gated` adds input_ids and a recurrent state that is handed on unchanged.
    """
    call = dict(names or {})

    def name(official: str) -> str:
        return call.get(official, official)

    past_dims = ["batch_size", KV_HEADS, "past_sequence_length", HEAD_DIM]
    present_dims = ["batch_size", KV_HEADS, "total_sequence_length", HEAD_DIM]
    inputs: list[Border] = [
        (name("inputs_embeds"), FLOAT, ["batch_size", "sequence_length", HIDDEN]),
        (name("attention_mask"), INT64, ["batch_size", "total_sequence_length"]),
    ]
    outputs: list[Border] = [(name("logits"), FLOAT, ["batch_size", "sequence_length", VOCAB])]
    nodes = [
        helper.make_node("ReduceSum", [name("inputs_embeds"), "minus_one"], ["level"], keepdims=1),
        helper.make_node("Range", ["zero", "vocab", "step"], ["ramp"]),
        helper.make_node("Mul", ["level", "ramp"], [name("logits")]),
    ]
    for layer in range(layers):
        pair = [
            (name("past_key_values.%d." + kind) % layer, name("present.%d." + kind) % layer)
            for kind in ("key", "value")
        ]
        inputs += [(past, FLOAT, past_dims) for past, _ in pair]
        outputs += [(present, FLOAT, present_dims) for _, present in pair]
        if attention == "GroupQueryAttention":
            nodes += [_attention_inputs(layer, name), _grouped_query(layer, pair)]
        else:
            nodes += [helper.make_node(attention, [past], [present]) for past, present in pair]
    if gated:
        inputs.append((name("input_ids"), INT64, ["batch_size", "sequence_length"]))
        for state, dims in (("conv_state", [1, 2]), ("recurrent_state", [1, 1, 1])):
            past, present = (name(f"{stem}.0.{state}") for stem in ("past_key_values", "present"))
            inputs.append((past, FLOAT, ["batch_size", *dims]))
            outputs.append((present, FLOAT, ["batch_size", *dims]))
            nodes.append(helper.make_node("Identity", [past], [present]))
    if attention == "GroupQueryAttention":
        nodes = [*_lengths(name("attention_mask")), *nodes]
    weights = [
        *(numpy_helper.from_array(np.float32(value), name) for name, value in RAMP.items()),
        numpy_helper.from_array(np.array([-1], np.int64), "minus_one"),
        numpy_helper.from_array(np.ones((HIDDEN, 3 * HEAD_DIM), np.float32), "qkv"),
        numpy_helper.from_array(np.array([1], np.int64), "one"),
    ]
    save(path, [*inputs, *extra], outputs, nodes, weights)


def _lengths(mask: str) -> list[onnx.NodeProto]:
    """seqlens_k int32 [B] and total_sequence_length int32 scalar from attention_mask."""
    return [
        helper.make_node("ReduceSum", [mask, "one"], ["summed"], keepdims=0),
        helper.make_node("Sub", ["summed", "one"], ["last"]),
        helper.make_node("Cast", ["last"], ["seqlens_k"], to=TensorProto.INT32),
        helper.make_node("Shape", [mask], ["total_1d"], start=1, end=2),
        helper.make_node("Squeeze", ["total_1d"], ["total_64"]),
        helper.make_node("Cast", ["total_64"], ["total"], to=TensorProto.INT32),
    ]


def _attention_inputs(layer: int, name: object) -> onnx.NodeProto:
    embeds = name("inputs_embeds")  # type: ignore[operator]
    return helper.make_node("MatMul", [embeds, "qkv"], [f"qkv.{layer}"])


def _grouped_query(layer: int, pair: Sequence[tuple[str, str]]) -> onnx.NodeProto:
    (past_key, key), (past_value, value) = pair
    feeds = [f"qkv.{layer}", "", "", past_key, past_value, "seqlens_k", "total"]
    return helper.make_node(
        "GroupQueryAttention",
        feeds,
        [f"attended.{layer}", key, value],
        domain="com.microsoft",
        num_heads=1,
        kv_num_heads=1,
    )


def vision(path: Path, *, names: Mapping[str, str] | None = None, inputs: Sequence[Border] | None = None) -> None:
    """pixel_values, image_attention_mask, image_sizes -> image_features."""
    call = dict(names or {})
    official: Sequence[Border] = inputs or [
        ("pixel_values", FLOAT, ["num_images", "max_num_crops", 3, 448, 448]),
        ("image_attention_mask", FLOAT, ["num_images", "max_num_crops", 32, 32]),
        ("image_sizes", INT64, ["num_images", 2]),
    ]
    renamed = [(call.get(name, name), dtype, dims) for name, dtype, dims in official]
    save(path, renamed, [(call.get("image_features", "image_features"), FLOAT, ["num_image_tokens", HIDDEN])])


def speech(
    path: Path,
    *,
    names: Mapping[str, str] | None = None,
    inputs: Sequence[Border] | None = None,
    outputs: Sequence[str] = ("audio_features",),
) -> None:
    """audio_embeds, audio_attention_mask, audio_sizes, audio_projection_mode -> audio_features."""
    call = dict(names or {})
    official: Sequence[Border] = inputs or [
        ("audio_embeds", FLOAT, ["num_audios", "num_frames", 80]),
        ("audio_attention_mask", BOOL, ["num_audios", "num_frames"]),
        ("audio_sizes", INT64, ["num_audios"]),
        ("audio_projection_mode", INT64, [1]),
    ]
    renamed = [(call.get(name, name), dtype, dims) for name, dtype, dims in official]
    save(path, renamed, [(call.get(name, name), FLOAT, ["num_audio_tokens", HIDDEN]) for name in outputs])


def embedding(path: Path, *, names: Mapping[str, str] | None = None) -> None:
    """input_ids, image_features, audio_features -> inputs_embeds (a function of the ids alone)."""
    call = dict(names or {})

    def name(official: str) -> str:
        return call.get(official, official)

    inputs: list[Border] = [
        (name("input_ids"), INT64, ["batch_size", "sequence_length"]),
        (name("image_features"), FLOAT, ["num_image_tokens", HIDDEN]),
        (name("audio_features"), FLOAT, ["num_audio_tokens", HIDDEN]),
    ]
    outputs: list[Border] = [(name("inputs_embeds"), FLOAT, ["batch_size", "sequence_length", HIDDEN])]
    nodes = [
        helper.make_node("Cast", [name("input_ids")], ["levels"], to=FLOAT),
        helper.make_node("Unsqueeze", ["levels", "last_axis"], ["column"]),
        helper.make_node("Mul", ["column", "row"], [name("inputs_embeds")]),
    ]
    row = np.linspace(-1, 2, HIDDEN, dtype=np.float32)
    weights = [numpy_helper.from_array(row, "row"), numpy_helper.from_array(np.array([-1], np.int64), "last_axis")]
    save(path, inputs, outputs, nodes, weights)


def four_graphs(folder: Path, *, files: Mapping[str, str] = NESTED) -> Path:
    """The four graphs with the official names."""
    decoder(folder / files["decoder"])
    vision(folder / files["vision"])
    speech(folder / files["speech"])
    embedding(folder / files["embedding"])
    return folder
