"""Which tensor answers to which key of genai_config.json, for graphs with any names."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from phi4mm_export.errors import PackageError
from phi4mm_export.package.cache_names import CacheNames, cache_names, grows_by_concat
from phi4mm_export.package.graph_io import GraphIo, TensorIo
from phi4mm_export.package.manifest import FileEntry, make_manifest, manifest_documents
from phi4mm_export.package.manifest_read import parse_manifest
from phi4mm_export.package.map_graphs import component_of, map_graph, stand_ins
from phi4mm_export.package.replace import replace_files, with_manifest
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.phi4mm_config import OFFICIAL_NAMES

DECODER = GraphIo(
    (
        TensorIo("inputs_embeds", "float", ("b", "s", 16)),
        TensorIo("attention_mask", "int64", ("b", "t")),
        TensorIo("past_key_values.0.key", "float", ("b", 1, "p", 16)),
        TensorIo("past_key_values.0.value", "float", ("b", 1, "p", 16)),
    ),
    (
        TensorIo("logits", "float", ("b", "s", 100)),
        TensorIo("present.0.key", "float", ("b", 1, "t", 16)),
        TensorIo("present.0.value", "float", ("b", 1, "t", 16)),
    ),
)
VISION = GraphIo(
    (
        TensorIo("pixel_values", "float", ("n", "c", 3, "h", "w")),
        TensorIo("image_attention_mask", "float", ("n", "c", 32, 32)),
        TensorIo("image_sizes", "int64", ("n", 2)),
    ),
    (TensorIo("image_features", "float", ("t", 16)),),
)
SPEECH = GraphIo(
    (
        TensorIo("audio_embeds", "float", ("n", "f", 80)),
        TensorIo("audio_attention_mask", "bool", ("n", "f")),
        TensorIo("audio_sizes", "int64", ("n",)),
        TensorIo("audio_projection_mode", "int64", (1,)),
    ),
    (TensorIo("audio_features", "float", ("t", 16)),),
)
EMBEDDING = GraphIo(
    (
        TensorIo("input_ids", "int64", ("b", "s")),
        TensorIo("image_features", "float", ("i", 16)),
        TensorIo("audio_features", "float", ("a", 16)),
    ),
    (TensorIo("inputs_embeds", "float", ("b", "s", 16)),),
)
OFFICIAL = {
    Component.DECODER: DECODER,
    Component.VISION: VISION,
    Component.SPEECH: SPEECH,
    Component.EMBEDDING: EMBEDDING,
}


def renamed(io: GraphIo, **names: str) -> GraphIo:
    """The border with some tensors under other names."""

    def each(tensors: tuple[TensorIo, ...]) -> tuple[TensorIo, ...]:
        return tuple(TensorIo(names.get(t.name, t.name), t.dtype, t.dims) for t in tensors)

    return GraphIo(each(io.inputs), each(io.outputs), io.overridable)


def with_input(io: GraphIo, *tensors: TensorIo) -> GraphIo:
    return GraphIo((*io.inputs, *tensors), io.outputs)


@pytest.mark.parametrize("component", list(Component))
def test_official_graphs_are_recognised_and_mapped_to_the_published_names(component: Component) -> None:
    io = OFFICIAL[component]
    mapped = map_graph(component, "some.onnx", io)
    assert component_of(io) is component
    assert (dict(mapped.names.inputs), dict(mapped.names.outputs)) == OFFICIAL_NAMES[component]
    assert list(mapped.names.inputs) == list(OFFICIAL_NAMES[component][0])
    assert (mapped.gaps, mapped.renamed) == ((), {})


@pytest.mark.parametrize("component", list(Component))
def test_graphs_are_recognised_by_their_shapes_alone(component: Component) -> None:
    keep = {"past_key_values.0.key", "past_key_values.0.value", "present.0.key", "present.0.value"}
    tensors = (*OFFICIAL[component].inputs, *OFFICIAL[component].outputs)
    anonymous = {tensor.name: f"tensor_{i}" for i, tensor in enumerate(tensors) if tensor.name not in keep}
    assert component_of(renamed(OFFICIAL[component], **anonymous)) is component


def test_a_graph_of_another_kind_is_not_recognised() -> None:
    assert component_of(GraphIo((TensorIo("x", "float", ("n", 4)),), (TensorIo("y", "float", ("n", 4)),))) is None


def test_renamed_tensors_are_found_by_shape_and_reported_by_key() -> None:
    mapped = map_graph(Component.SPEECH, "s.onnx", renamed(SPEECH, audio_embeds="mel", audio_sizes="lens"))
    assert mapped.renamed == {"model.speech.inputs.audio_embeds": "mel", "model.speech.inputs.audio_sizes": "lens"}
    assert mapped.gaps == ()


def test_two_feature_inputs_are_told_apart_by_what_their_names_say() -> None:
    io = renamed(EMBEDDING, image_features="visual_rows", audio_features="speech_rows")
    names = map_graph(Component.EMBEDDING, "e.onnx", io).names.inputs
    assert (names["image_features"], names["audio_features"]) == ("visual_rows", "speech_rows")


def test_feature_inputs_that_nothing_tells_apart_are_a_fatal_gap() -> None:
    gaps = map_graph(Component.EMBEDDING, "e.onnx", renamed(EMBEDDING, image_features="a", audio_features="b")).gaps
    assert any(gap.fatal and gap.where == "model.embedding.inputs.image_features" for gap in gaps)


@pytest.mark.parametrize(
    ("component", "name"),
    [
        (Component.VISION, "image_attention_mask"),
        (Component.SPEECH, "audio_projection_mode"),
        (Component.EMBEDDING, "input_ids"),
    ],
)
def test_a_name_that_the_runtime_fixes_cannot_be_mapped(component: Component, name: str) -> None:
    gaps = map_graph(component, "g.onnx", renamed(OFFICIAL[component], **{name: "other"})).gaps
    fatal = [gap for gap in gaps if gap.where == "g.onnx: other"]
    assert fatal[0].fatal
    assert name in fatal[0].what


def test_an_input_that_nothing_feeds_is_a_fatal_gap() -> None:
    io = with_input(VISION, TensorIo("vision_gate", "float", (1,)))
    assert [str(gap) for gap in map_graph(Component.VISION, "v.onnx", io).gaps if gap.fatal] == [
        "v.onnx: vision_gate: the runtime feeds nothing for this input"
    ]


def test_positions_get_a_key_when_the_decoder_wants_them() -> None:
    io = with_input(DECODER, TensorIo("position_ids", "int64", ("b", "s")))
    names = map_graph(Component.DECODER, "d.onnx", io).names.inputs
    assert list(names)[:3] == ["inputs_embeds", "attention_mask", "position_ids"]


def test_a_gated_decoder_needs_no_further_key() -> None:
    io = with_input(
        DECODER,
        TensorIo("input_ids", "int64", ("b", "s")),
        TensorIo("past_key_values.0.conv_state", "float", ("b", 1, 2)),
        TensorIo("past_key_values.0.recurrent_state", "float", ("b", 1, 1, 1)),
    )
    mapped = map_graph(Component.DECODER, "d.onnx", io)
    assert (dict(mapped.names.inputs), mapped.gaps) == (OFFICIAL_NAMES[Component.DECODER][0], ())


def test_the_variant_of_another_team_gets_the_names_that_were_tried() -> None:
    maps = {
        Component.DECODER: map_graph(
            Component.DECODER, "d", with_input(DECODER, TensorIo("position_ids", "int64", ("b", "s")))
        ),
        Component.VISION: map_graph(
            Component.VISION, "v", GraphIo((TensorIo("pixel_values", "float", ("b", 3, 448, 448)),), VISION.outputs)
        ),
        Component.SPEECH: map_graph(
            Component.SPEECH,
            "s",
            GraphIo(
                (TensorIo("audio_features", "float", ("b", "f", 80)),),
                tuple(TensorIo(n, "float", ("t", 16)) for n in ("speech_features", "speech_features_for_vision")),
            ),
        ),
        Component.EMBEDDING: map_graph(Component.EMBEDDING, "e", renamed(EMBEDDING, audio_features="speech_features")),
    }
    result = stand_ins(maps)
    assert {key: name for mapped in result.values() for key, name in mapped.renamed.items()} == {
        "model.vision.inputs.attention_mask": "pixel_values",
        "model.speech.inputs.audio_embeds": "audio_features",
        "model.speech.inputs.audio_sizes": "attention_mask",
        "model.speech.outputs.audio_features": "speech_features",
        "model.embedding.inputs.audio_features": "speech_features",
        "model.decoder.inputs.position_ids": "position_ids",
    }
    gaps = [gap for mapped in result.values() for gap in mapped.gaps]
    assert not any(gap.fatal for gap in gaps)
    assert {gap.where for gap in gaps} == {
        "model.vision.inputs.attention_mask",
        "model.vision.inputs.pixel_values",
        "model.speech.inputs.audio_sizes",
        "model.speech.outputs.audio_features",
    }


def cached(*names: tuple[str, str]) -> GraphIo:
    """A border of only cache tensors: pairs of past and present names."""
    return GraphIo(
        tuple(TensorIo(past, "float", None) for past, _ in names),
        tuple(TensorIo(present, "float", None) for _, present in names),
    )


def test_cache_templates_are_found_whatever_they_are_called() -> None:
    io = cached(*((f"kv_in/{kind}/{i}/x1", f"layer{i}.new_{kind}") for kind in ("k", "v") for i in range(12)))
    assert cache_names(io) == CacheNames("kv_in/k/%d/x1", "kv_in/v/%d/x1", "layer%d.new_k", "layer%d.new_v", 12)


@pytest.mark.parametrize(
    "names",
    [
        [("past.0.a", "present.0.a"), ("past.0.b", "present.0.b")],
        [("past.1.key", "present.1.key"), ("past.1.value", "present.1.value")],
        [("past.0.key", "present.0.key")],
        [],
    ],
)
def test_caches_that_do_not_count_layers_by_key_and_value_are_not_guessed(names: list[tuple[str, str]]) -> None:
    assert cache_names(cached(*names)) is None


def cache_graph(*nodes: onnx.NodeProto) -> onnx.GraphProto:
    value = helper.make_tensor_value_info("present.0.key", TensorProto.FLOAT, None)
    return helper.make_graph(list(nodes), "g", [], [value])


def test_a_concatenated_cache_is_seen_through_casts_and_branches() -> None:
    grow = helper.make_node("Concat", ["past", "new"], ["grown"], axis=2)
    assert grows_by_concat(
        cache_graph(grow, helper.make_node("Cast", ["grown"], ["present.0.key"], to=10)), "present.0.key"
    )
    inner = helper.make_graph([helper.make_node("Concat", ["past", "new"], ["inside"], axis=2)], "i", [],
                              [helper.make_tensor_value_info("inside", TensorProto.FLOAT, None)])  # fmt: skip
    branch = helper.make_node("If", ["long"], ["present.0.key"], then_branch=inner, else_branch=inner)
    assert grows_by_concat(cache_graph(branch), "present.0.key")


def test_a_fused_attention_cache_can_be_shared() -> None:
    node = helper.make_node("GroupQueryAttention", ["q"], ["o", "present.0.key"], domain="com.microsoft")
    assert not grows_by_concat(cache_graph(node), "present.0.key")


def test_files_are_replaced_and_their_other_hard_links_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"old")
    (tmp_path / "snapshot").hardlink_to(tmp_path / "a.json")
    replace_files(tmp_path, {"a.json": b"new", "b.json": b"b"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "a.json": b"new", "b.json": b"b", "snapshot": b"old",
    }  # fmt: skip


def test_nothing_is_replaced_when_one_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"old")
    with pytest.raises(OSError, match="missing folder"):
        replace_files(tmp_path, {"a.json": b"new", "missing folder/b.json": b"b"})
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_the_manifest_and_its_sums_follow_the_files_that_they_list(tmp_path: Path) -> None:
    entries = [FileEntry(name=name, size=1, sha256="00" * 32) for name in ("a.json", "z.onnx")]
    for name, data in manifest_documents(make_manifest(entries)).items():
        (tmp_path / name).write_bytes(data)
    files = with_manifest(tmp_path, {"a.json": b""}, {"max_length": 7}, "cuda")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    manifest = parse_manifest(files["phi4mm.json"])
    assert [(entry.name, entry.size, entry.sha256) for entry in manifest.files] == [
        ("a.json", 0, empty), ("z.onnx", 1, "00" * 32),
    ]  # fmt: skip
    assert (manifest.settings, manifest.runtime.provider) == ({"max_length": 7}, "cuda")
    assert f"{empty}  a.json" in files["SHA256SUMS"].decode().splitlines()


def test_a_package_without_a_manifest_gets_none(tmp_path: Path) -> None:
    assert with_manifest(tmp_path, {"a.json": b"{}"}) == {"a.json": b"{}"}


def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "phi4mm.json").write_text('{"files": {}}', encoding="utf-8")
    with pytest.raises(PackageError, match=r"phi4mm\.json: "):
        with_manifest(tmp_path, {"a.json": b"{}"})
