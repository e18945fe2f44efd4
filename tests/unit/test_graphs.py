"""What the four graphs look like before they have weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.graphs.bind import ranks_of
from phi4mm_export.graphs.build import BuiltGraph, build
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.model import ModelConfig, Role
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe

Facts = tuple[ModelConfig, dict[str, dict[Role, int]]]


@pytest.fixture(scope="module")
def facts(tiny_checkpoint: Path) -> Facts:
    with open_checkpoint(tiny_checkpoint) as checkpoint:
        return checkpoint.config, ranks_of(checkpoint, tuple(Role))


def _built(facts: Facts, component: Component, **choices: object) -> BuiltGraph:
    config, ranks = facts
    recipe = Recipe.resolve(**choices)  # type: ignore[arg-type]
    wanted = ranks if recipe.lora is LoraForm.GATED else {}
    return build(component, config, wanted, recipe)


def _nodes(graph: ir.Graph, depth: int = 0) -> Iterator[tuple[ir.Node, int]]:
    for node in graph:
        yield node, depth
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _nodes(attribute.as_graph(), depth + 1)


def _names(values: list[ir.Value]) -> list[str]:
    return [str(value.name) for value in values]


def test_every_fused_operator_exists_in_onnxruntime_with_these_inputs_outputs_and_attributes(facts: Facts) -> None:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    schemas = {s.name: s for s in state.get_all_operator_schema() if s.domain == "com.microsoft"}
    seen = set()
    for component in Component:
        for node, _ in _nodes(_built(facts, component, embedding_precision=Precision.INT8).model.graph):
            if node.domain == "com.microsoft":
                schema = schemas[node.op_type]
                seen.add(node.op_type)
                assert schema.min_input <= len(node.inputs) <= schema.max_input
                assert schema.min_output <= len(node.outputs) <= schema.max_output
                assert set(node.attributes) <= set(schema.attributes)
    assert {"GroupQueryAttention", "MultiHeadAttention", "MatMulNBits", "SkipSimplifiedLayerNormalization"} <= seen
    assert "GatherBlockQuantized" in seen


def test_the_official_decoder_border_is_met_exactly_when_merged(facts: Facts) -> None:
    config, _ = facts
    graph = _built(facts, Component.DECODER, lora=LoraForm.MERGED).model.graph
    caches = [f"past_key_values.{i}.{part}" for i in range(config.num_layers) for part in ("key", "value")]
    assert _names(list(graph.inputs)) == ["inputs_embeds", "attention_mask", *caches]
    assert _names(list(graph.outputs)) == ["logits", *(name.replace("past_key_values", "present") for name in caches)]


def test_a_gated_decoder_adds_only_the_ids_and_one_recurrent_state(facts: Facts) -> None:
    merged = _built(facts, Component.DECODER, lora=LoraForm.MERGED).model.graph
    gated = _built(facts, Component.DECODER).model.graph
    extra = set(_names(list(gated.inputs))) - set(_names(list(merged.inputs)))
    assert extra == {"input_ids", "past_key_values.0.conv_state", "past_key_values.0.recurrent_state"}
    state = next(value for value in gated.inputs if value.name == "past_key_values.0.conv_state")
    assert list(state.shape or [])[1:] == [1, 2]


def test_logits_are_those_of_one_position_unless_all_are_asked_for(facts: Facts) -> None:
    one = _built(facts, Component.DECODER).model.graph.outputs[0]
    every = _built(facts, Component.DECODER, full_logits=True).model.graph.outputs[0]
    assert (one.shape or [])[1] == 1
    assert str((every.shape or [])[1]) == "sequence_length"


def test_each_projection_has_one_if_per_adapter_and_none_is_nested(facts: Facts) -> None:
    config, _ = facts
    conditions = [(n, depth) for n, depth in _nodes(_built(facts, Component.DECODER).model.graph) if n.op_type == "If"]
    lora = [n for n, _ in conditions if "rope" not in str(n.name)]
    assert len(lora) == config.num_layers * 4 * len(Role)
    assert {depth for _, depth in conditions} == {0}


def test_adapter_weights_of_a_gated_decoder_lie_outside_the_branches(facts: Facts) -> None:
    graph = _built(facts, Component.DECODER).model.graph
    names = set(graph.initializers)
    assert "model.layers.1.mlp.down_proj.lora_B.speech.qweight" in names
    assert not any(
        a.as_graph().initializers for n, _ in _nodes(graph) for a in n.attributes.values() if a.name.endswith("branch")
    )


def test_merged_decoders_hold_no_adapter(facts: Facts) -> None:
    assert not [
        n for n in _built(facts, Component.DECODER, lora=LoraForm.MERGED).model.graph.initializers if "lora" in n
    ]


def test_adapters_are_overridable_inputs_with_the_official_names(facts: Facts) -> None:
    config, _ = facts
    graph = _built(facts, Component.DECODER, lora=LoraForm.ADAPTERS).model.graph
    overridable = [n for n in _names(list(graph.inputs)) if n in graph.initializers]
    assert len(overridable) == config.num_layers * 7 * 2
    assert "model.layers.0.attn.q_proj.lora_A.MatMul.weight" in overridable
    assert "model.layers.1.mlp.up_proj.lora_B.MatMul.weight" in overridable


@pytest.mark.parametrize("component", [Component.VISION, Component.SPEECH])
def test_encoder_weights_are_plain_products_that_any_quantizer_knows(facts: Facts, component: Component) -> None:
    graph = _built(facts, component).model.graph
    assert not [n for n, _ in _nodes(graph) if n.op_type in {"FusedMatMul", "Gemm"}]
    weights = {n.inputs[1].name for n, _ in _nodes(graph) if n.op_type == "MatMul" and n.inputs[1] is not None}
    assert len(weights) > 10


def test_the_last_siglip_layer_is_not_in_the_graph(facts: Facts) -> None:
    config, _ = facts
    names = _built(facts, Component.VISION).model.graph.initializers
    layers = {n.split("encoder.layers.")[1].split(".")[0] for n in names if "encoder.layers." in n}
    assert layers == {str(i) for i in range(config.vision.num_layers - 1)}


def test_node_names_follow_the_module_tree_and_occur_once(facts: Facts) -> None:
    for component in Component:
        names = [str(n.name) for n, _ in _nodes(_built(facts, component).model.graph)]
        assert len(names) == len(set(names))
    decoder = [str(n.name) for n, _ in _nodes(_built(facts, Component.DECODER).model.graph)]
    assert "model/layers.0/self_attn/GroupQueryAttention" in decoder


def test_building_twice_gives_the_same_graph(facts: Facts) -> None:
    first, second = (_proto(_built(facts, Component.VISION)) for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


def _proto(built: BuiltGraph) -> onnx.ModelProto:
    """The model with references to a data file that nobody opens."""
    for name, value in built.model.graph.initializers.items():
        if value.const_value is None:
            assert value.dtype is not None
            value.const_value = ir.ExternalTensor(
                "data", 0, 1, value.dtype, shape=ir.Shape(value.shape or []), name=name
            )
    return ir.to_proto(built.model)


def test_one_rotated_input_serves_a_projection_and_the_adapters_on_it(facts: Facts) -> None:
    config, _ = facts
    nodes = [n for n, _ in _nodes(_built(facts, Component.DECODER).model.graph)]
    fed = {str(n.inputs[1].name): n.inputs[0] for n in nodes if n.op_type == "MatMulNBits" and n.inputs[1]}
    module = "model.layers.0.mlp.down_proj"
    turned = fed[f"{module}.qweight"]
    assert turned is fed[f"{module}.lora_A.vision.qweight"] is fed[f"{module}.lora_A.speech.qweight"]
    assert turned is not None
    assert [str(turned.producer().inputs[0].producer().inputs[1].name)[:9]] == ["rotation."]  # type: ignore[union-attr]
    assert sum(n.op_type == "MatMul" for n in nodes) == 4 * config.num_layers


def test_nothing_is_rotated_where_inputs_stay_float_and_the_head_never_is(facts: Facts) -> None:
    head = next(
        n for n, _ in _nodes(_built(facts, Component.DECODER).model.graph) if "lm_head.qweight" in _inputs_of(n)
    )
    assert head.inputs[0].producer().op_type == "SkipSimplifiedLayerNormalization"  # type: ignore[union-attr]
    for choices in ({"accuracy_level": 0}, {"precision": Precision.FP32}, {"rotate": False}):
        names = set(_built(facts, Component.DECODER, **choices).model.graph.initializers)
        assert not [name for name in names if name.startswith("rotation")]


def _inputs_of(node: ir.Node) -> list[str]:
    return [str(value.name) for value in node.inputs if value is not None]
