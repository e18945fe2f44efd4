"""A small package that breaks no rule, and ways to break one thing in it.

H = 16 features, 2 query heads and 1 KV head of 8, 2 layers, the real vocabulary size; the embedding table is the
decoder's head, one stretch of (sparse) bytes in the decoder's data file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from phi4mm_export.checks.report import Finding, Report
from phi4mm_export.spec.processors import ProcessorValues, speech_processor, vision_processor

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, LAYERS, VOCAB = 16, 2, 1, 8, 2, 200064
FILES = {
    "decoder": "phi-4-mm-text.onnx",
    "vision": "phi-4-mm-vision.onnx",
    "speech": "phi-4-mm-speech.onnx",
    "embedding": "phi-4-mm-embedding.onnx",
}
DATA_FILE = "phi-4-mm-text.onnx.data"
TABLE_NBYTES = VOCAB * HIDDEN * 4
SPECIAL = {"<|endoftext|>": 199999, "<|endoftext10|>": 200010, "<|endoftext11|>": 200011, "<|end|>": 200020}
_INT64, _BOOL = TensorProto.INT64, TensorProto.BOOL


def build_package(folder: Path, *, gated: bool = False, float_type: int = TensorProto.FLOAT) -> Path:
    """Write the package into a new folder and return it."""
    folder.mkdir(parents=True)
    save(folder / FILES["decoder"], decoder(gated=gated, float_type=float_type))
    save(folder / FILES["vision"], vision(float_type))
    save(folder / FILES["speech"], speech(float_type))
    save(folder / FILES["embedding"], embedding(float_type))
    with (folder / DATA_FILE).open("wb") as file:
        file.truncate(_data_nbytes(float_type))
    write_json(folder / "genai_config.json", genai_config())
    write_json(folder / "vision_processor.json", vision_processor(ProcessorValues()))
    write_json(folder / "speech_processor.json", speech_processor(ProcessorValues()))
    write_json(folder / "tokenizer.json", tokenizer())
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    return folder


def genai_config() -> dict[str, Any]:
    """The configuration that fits the graphs."""
    return {
        "model": {
            "bos_token_id": 199999,
            "context_length": 131072,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": FILES["decoder"],
                "head_size": HEAD_SIZE,
                "hidden_size": HIDDEN,
                "inputs": {
                    "inputs_embeds": "inputs_embeds",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": HEADS,
                "num_hidden_layers": LAYERS,
                "num_key_value_heads": KV_HEADS,
            },
            "vision": {
                "filename": FILES["vision"],
                "config_filename": "vision_processor.json",
                "inputs": {
                    "pixel_values": "pixel_values",
                    "attention_mask": "image_attention_mask",
                    "image_sizes": "image_sizes",
                },
                "outputs": {"image_features": "image_features"},
            },
            "speech": {
                "filename": FILES["speech"],
                "config_filename": "speech_processor.json",
                "inputs": {
                    "audio_embeds": "audio_embeds",
                    "attention_mask": "audio_attention_mask",
                    "audio_sizes": "audio_sizes",
                    "audio_projection_mode": "audio_projection_mode",
                },
                "outputs": {"audio_features": "audio_features"},
            },
            "embedding": {
                "filename": FILES["embedding"],
                "inputs": {
                    "input_ids": "input_ids",
                    "image_features": "image_features",
                    "audio_features": "audio_features",
                },
                "outputs": {"inputs_embeds": "inputs_embeds"},
            },
            "eos_token_id": [200020, 199999],
            "pad_token_id": 199999,
            "type": "phi4mm",
            "vocab_size": VOCAB,
        },
        "search": {"max_length": 131072, "num_beams": 1, "past_present_share_buffer": True, "top_k": 1},
    }


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: the special tokens that matter, and no vocabulary."""
    added = [{"id": number, "content": token, "special": True} for token, number in SPECIAL.items()]
    return {"version": "1.0", "added_tokens": added, "model": {"type": "BPE", "vocab": {}, "merges": []}}


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json with a class the runtime loads and a template."""
    decoder_entries = {str(number): {"content": token, "special": True} for token, number in SPECIAL.items()}
    return {
        "tokenizer_class": "GPT2TokenizerFast",
        "added_tokens_decoder": decoder_entries,
        "chat_template": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
    }


def decoder(*, gated: bool = False, float_type: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Last-token logits through attention with a shared cache; the gated form only carries its extra tensors."""
    cache = ["batch_size", KV_HEADS, "past_sequence_length", HEAD_SIZE]
    grown = ["batch_size", KV_HEADS, "total_sequence_length", HEAD_SIZE]
    inputs = [
        _value("inputs_embeds", float_type, ["batch_size", "sequence_length", HIDDEN]),
        _value("attention_mask", _INT64, ["batch_size", "total_sequence_length"]),
    ]
    outputs = [_value("logits", float_type, ["batch_size", 1, VOCAB])]
    nodes = [
        helper.make_node("ReduceSum", ["attention_mask", "one"], ["summed"], keepdims=0),
        helper.make_node("Sub", ["summed", "one"], ["last"]),
        helper.make_node("Cast", ["last"], ["seqlens_k"], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["total_1d"], start=1, end=2),
        helper.make_node("Squeeze", ["total_1d"], ["total_64"]),
        helper.make_node("Cast", ["total_64"], ["total"], to=TensorProto.INT32),
        helper.make_node("MatMul", ["inputs_embeds", "qkv"], ["packed"]),
    ]
    for layer in range(LAYERS):
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        present = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        inputs += [_value(name, float_type, cache) for name in past]
        outputs += [_value(name, float_type, grown) for name in present]
        nodes.append(attention(layer, past, present))
    nodes += [
        helper.make_node("ReduceMean", [f"attended.{LAYERS - 1}"], ["pooled"], axes=[1], keepdims=1),
        helper.make_node("FusedMatMul", ["pooled", "table"], ["logits"], domain="com.microsoft", transB=1),
    ]
    if gated:
        for kind, rank_dims in (("conv_state", [1, 2]), ("recurrent_state", [1, 1, 1])):
            inputs.append(_value(f"past_key_values.0.{kind}", float_type, ["batch_size", *rank_dims]))
            outputs.append(_value(f"present.0.{kind}", float_type, ["batch_size", *rank_dims]))
            nodes.append(helper.make_node("Identity", [f"past_key_values.0.{kind}"], [f"present.0.{kind}"]))
        inputs.append(_value("input_ids", _INT64, ["batch_size", "sequence_length"]))
    width = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
    weights = [
        external("table", float_type, [VOCAB, HIDDEN], 0),
        external("qkv", float_type, [HIDDEN, width], _itemsize(float_type) * VOCAB * HIDDEN),
        numpy_helper.from_array(np.array([1], np.int64), "one"),
    ]
    return _model(nodes, inputs, outputs, weights)


def attention(layer: int, past: list[str], present: list[str]) -> onnx.NodeProto:
    """Grouped-query attention on packed q, k, v without rotary embedding."""
    return helper.make_node(
        "GroupQueryAttention",
        ["packed", "", "", *past, "seqlens_k", "total"],
        [f"attended.{layer}", *present],
        name=f"attention.{layer}",
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
    )


def vision(float_type: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """One row per pixel row: the border is right, the arithmetic is not."""
    inputs = [
        _value("pixel_values", float_type, ["num_images", "max_num_crops", 3, "height", "width"]),
        _value("image_attention_mask", float_type, ["num_images", "max_num_crops", 32, 32]),
        _value("image_sizes", _INT64, ["num_images", 2]),
    ]
    nodes = [
        helper.make_node("Flatten", ["pixel_values"], ["flat"], axis=4),
        helper.make_node("MatMul", ["flat", "weight"], ["image_features"]),
    ]
    outputs = [_value("image_features", float_type, ["num_image_tokens", HIDDEN])]
    return _model(nodes, inputs, outputs, [_zeros("weight", float_type, [448, HIDDEN])])


def speech(float_type: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """One row per frame."""
    inputs = [
        _value("audio_embeds", float_type, ["num_audios", "num_frames", 80]),
        _value("audio_attention_mask", _BOOL, ["num_audios", "num_frames"]),
        _value("audio_sizes", _INT64, ["num_audios"]),
        _value("audio_projection_mode", _INT64, [1]),
    ]
    nodes = [
        helper.make_node("Flatten", ["audio_embeds"], ["flat"], axis=2),
        helper.make_node("MatMul", ["flat", "weight"], ["audio_features"]),
    ]
    outputs = [_value("audio_features", float_type, ["num_audio_tokens", HIDDEN])]
    return _model(nodes, inputs, outputs, [_zeros("weight", float_type, [80, HIDDEN])])


def embedding(float_type: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Rows of the table that the decoder's head shares; the features are not placed."""
    inputs = [
        _value("input_ids", _INT64, ["batch_size", "sequence_length"]),
        _value("image_features", float_type, ["num_image_tokens", HIDDEN]),
        _value("audio_features", float_type, ["num_audio_tokens", HIDDEN]),
    ]
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["inputs_embeds"])]
    outputs = [_value("inputs_embeds", float_type, ["batch_size", "sequence_length", HIDDEN])]
    return _model(nodes, inputs, outputs, [external("table", float_type, [VOCAB, HIDDEN], 0)])


def external(name: str, dtype: int, dims: list[int], offset: int, location: str = DATA_FILE) -> onnx.TensorProto:
    """A constant whose bytes lie in the decoder's data file."""
    tensor = TensorProto(name=name, data_type=dtype, dims=dims, data_location=TensorProto.EXTERNAL)
    length = _itemsize(dtype) * int(np.prod(dims))
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    """Apply a change to a JSON file in place."""
    document = json.loads(path.read_text("utf-8"))
    change(document)
    write_json(path, document)


def edit_config(package: Path, change: Callable[[Any], object]) -> None:
    """Apply a change to genai_config.json in place."""
    edit_json(package / "genai_config.json", change)


def edit_graph(package: Path, component: str, change: Callable[[onnx.ModelProto], object]) -> None:
    """Apply a change to one graph in place."""
    path = package / FILES[component]
    model = onnx.load(path, load_external_data=False)
    change(model)
    save(path, model)


def named(values: Any, name: str) -> Any:
    """The element of a protobuf list that has this name."""
    return next(value for value in values if value.name == name)


def drop(values: Any, name: str) -> None:
    """Remove the element of this name from a protobuf list."""
    values.remove(named(values, name))


def save(path: Path, model: onnx.ModelProto) -> None:
    """Write a graph without touching its data file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=4) + "\n", "utf-8")


def _model(
    nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any], weights: list[onnx.TensorProto]
) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _value(name: str, dtype: int, dims: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, dims)


def _zeros(name: str, dtype: int, dims: list[int]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.zeros(dims, helper.tensor_dtype_to_np_dtype(dtype)), name)


def _itemsize(dtype: int) -> int:
    return int(helper.tensor_dtype_to_np_dtype(dtype).itemsize)


def _data_nbytes(dtype: int) -> int:
    return _itemsize(dtype) * HIDDEN * (VOCAB + (HEADS + 2 * KV_HEADS) * HEAD_SIZE)


def only(report: Report, code: str) -> Finding:
    """The one finding with that code; a report with none or several fails the test."""
    found = [finding for finding in report.findings if finding.code == code]
    assert len(found) == 1, report.findings
    return found[0]
