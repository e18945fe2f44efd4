"""The contract check: every status, on a package that differs in one thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from support.packages import build_package, drop, edit_config, edit_graph, named, only

from phi4mm_export.checks.report import Report, Severity
from phi4mm_export.errors import UsageError
from phi4mm_export.pipeline.validate import validate
from phi4mm_export.spec.contract_file import SHIPPED, load_contract


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return build_package(tmp_path / "package")


def _statuses(report: Report, name: str) -> set[str]:
    return {row.status for row in report.rows if row.name == name}


def test_a_clean_package_has_no_finding_at_all(package: Path) -> None:
    report = validate(package)
    assert report.findings == ()
    assert report.ok
    assert {row.status for row in report.rows} == {"match", "absent"}


def test_a_gated_package_is_recognized_and_states_its_runtime(tmp_path: Path) -> None:
    report = validate(build_package(tmp_path / "package", gated=True))
    assert report.contract == "gated"
    assert [finding.code for finding in report.findings] == ["C360"]
    assert "0.14" in report.findings[0].what


def test_a_float16_package_has_a_kernel_for_every_node_on_cuda(tmp_path: Path) -> None:
    report = validate(build_package(tmp_path / "package", float_type=TensorProto.FLOAT16), provider="cuda")
    assert report.findings == ()


def test_a_missing_required_input_is_an_error(package: Path) -> None:
    edit_graph(package, "vision", lambda model: drop(model.graph.input, "image_attention_mask"))
    finding = only(validate(package), "C101")
    assert finding.severity is Severity.ERROR
    assert finding.where == "phi-4-mm-vision.onnx: image_attention_mask"


def test_a_missing_optional_input_is_only_a_row(package: Path) -> None:
    edit_graph(package, "vision", lambda model: drop(model.graph.input, "image_sizes"))
    report = validate(package)
    assert _statuses(report, "image_sizes") == {"absent"}
    assert report.ok


def test_an_extra_input_is_an_error_because_nothing_feeds_it(package: Path) -> None:
    extra = helper.make_tensor_value_info("vision_gate", TensorProto.BOOL, [1])
    edit_graph(package, "decoder", lambda model: model.graph.input.append(extra))
    assert "vision_gate" in only(validate(package), "C102").where


def test_an_extra_output_is_only_a_note(package: Path) -> None:
    extra = helper.make_tensor_value_info("flat", TensorProto.FLOAT, ["n", 80])
    edit_graph(package, "speech", lambda model: model.graph.output.append(extra))
    report = validate(package)
    assert only(report, "C102").severity is Severity.NOTE
    assert report.ok


def test_an_overridable_input_is_allowed(package: Path) -> None:
    extra = helper.make_tensor_value_info("qkv", TensorProto.FLOAT, [16, 32])
    edit_graph(package, "decoder", lambda model: model.graph.input.append(extra))
    report = validate(package)
    assert _statuses(report, "qkv") == {"overridable"}
    assert report.ok


def test_an_overridable_input_under_another_name_than_the_adapters_is_noted(package: Path) -> None:
    extra = helper.make_tensor_value_info("qkv", TensorProto.FLOAT, [16, 32])
    edit_graph(package, "decoder", lambda model: model.graph.input.append(extra))
    assert only(validate(package), "C107").severity is Severity.NOTE


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("model.layers.31.attn.q_proj.lora_A.MatMul.weight", True),
        ("model.layers.0.mlp.down_proj.lora_B.MatMul.weight_Q4", True),
        ("model.layers.0.mlp.down_proj.lora_B.MatMul.weight_scales", True),
        ("model.layers.0.attn.qkv_proj.lora_A.MatMul.weight", False),
        ("model.layers.0.attn.q_proj.lora_C.MatMul.weight", False),
        ("model.layers.0.attn.q_proj.lora_A.MatMul.weight.more", False),
    ],
)
def test_the_adapter_names_of_the_official_package_are_known(name: str, fits: bool) -> None:
    form = load_contract("official").graphs["decoder"].overridable
    assert form is not None
    assert form.matches(name) is fits


def _rename_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "image_feature_rows"
    model.graph.node[-1].output[0] = "image_feature_rows"


def test_a_renamed_output_is_named_with_its_likely_counterpart(package: Path) -> None:
    edit_graph(package, "vision", _rename_output)
    finding = only(validate(package), "C103")
    assert finding.severity is Severity.ERROR
    assert finding.expected == "image_features"
    assert finding.found.startswith("image_feature_rows")


def test_a_renamed_output_that_the_config_maps_is_a_warning(package: Path) -> None:
    edit_graph(package, "vision", _rename_output)
    edit_config(package, lambda c: c["model"]["vision"]["outputs"].update(image_features="image_feature_rows"))
    report = validate(package)
    assert only(report, "C103").severity is Severity.WARNING
    assert report.ok


def test_a_renamed_fixed_name_stays_an_error_even_if_the_config_maps_it(package: Path) -> None:
    def rename(model: onnx.ModelProto) -> None:
        named(model.graph.input, "image_attention_mask").name = "image_mask"

    edit_graph(package, "vision", rename)
    edit_config(package, lambda c: c["model"]["vision"]["inputs"].update(attention_mask="image_mask"))
    report = validate(package)
    assert only(report, "C103").severity is Severity.ERROR
    assert only(report, "C346").expected == "image_attention_mask"


def _set_type(component: str, name: str, dtype: int) -> Callable[[Path], None]:
    def change(model: onnx.ModelProto) -> None:
        named(model.graph.input, name).type.tensor_type.elem_type = dtype

    return lambda package: edit_graph(package, component, change)


def test_a_wrong_element_type_names_both_types(package: Path) -> None:
    _set_type("speech", "audio_sizes", TensorProto.INT32)(package)
    finding = only(validate(package), "C104")
    assert (finding.expected, finding.found) == ("int64", "int32")


def test_a_wrong_rank_names_both_ranks(package: Path) -> None:
    def three(model: onnx.ModelProto) -> None:
        named(model.graph.output, "image_features").type.tensor_type.shape.dim.add().dim_value = 1

    edit_graph(package, "vision", three)
    finding = only(validate(package), "C105")
    assert (finding.expected, finding.found) == ("rank 2", "rank 3")


def test_audio_features_may_have_a_leading_one(package: Path) -> None:
    def wrap(model: onnx.ModelProto) -> None:
        dims = named(model.graph.output, "audio_features").type.tensor_type.shape.dim
        first, width = dims[0].dim_param, dims[1].dim_value
        del dims[:]
        dims.add().dim_value = 1
        dims.add().dim_param = first
        dims.add().dim_value = width

    edit_graph(package, "speech", wrap)
    assert validate(package).ok


def test_another_feature_width_is_a_dims_error(package: Path) -> None:
    def wide(model: onnx.ModelProto) -> None:
        named(model.graph.output, "audio_features").type.tensor_type.shape.dim[1].dim_value = 24

    edit_graph(package, "speech", wide)
    finding = only(validate(package), "C106")
    assert "24, expected 16 (hidden_size)" in finding.fix


def test_a_fixed_sequence_length_is_a_dims_error(package: Path) -> None:
    def fixed(model: onnx.ModelProto) -> None:
        named(model.graph.input, "inputs_embeds").type.tensor_type.shape.dim[1].dim_value = 7

    edit_graph(package, "decoder", fixed)
    assert only(validate(package), "C106").severity is Severity.ERROR


def test_a_symbolic_hidden_size_is_only_a_warning(package: Path) -> None:
    def open_width(model: onnx.ModelProto) -> None:
        named(model.graph.input, "image_features").type.tensor_type.shape.dim[1].dim_param = "h"

    edit_graph(package, "embedding", open_width)
    report = validate(package)
    assert only(report, "C106").severity is Severity.WARNING
    assert report.ok


def test_two_float_types_at_one_joint_are_an_error(package: Path) -> None:
    _set_type("embedding", "audio_features", TensorProto.FLOAT16)(package)
    finding = only(validate(package), "C110")
    assert "float16 in phi-4-mm-embedding.onnx: audio_features" in finding.found
    assert "float in phi-4-mm-speech.onnx: audio_features" in finding.found


def test_faults_of_all_layers_are_one_finding_with_a_count(package: Path) -> None:
    def rename(model: onnx.ModelProto) -> None:
        for value in model.graph.input:
            value.name = value.name.replace("past_key_values", "past")
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = name.replace("past_key_values", "past")

    edit_graph(package, "decoder", rename)
    edit_config(
        package,
        lambda c: c["model"]["decoder"]["inputs"].update(
            past_key_names="past.%d.key", past_value_names="past.%d.value"
        ),
    )
    report = validate(package)
    named_differently = [finding for finding in report.findings if finding.code == "C103"]
    assert len(named_differently) == 2
    assert all("(2 tensors)" in finding.what for finding in named_differently)
    assert report.ok


def test_a_mobius_package_fails_the_official_contract_and_is_recognized(package: Path) -> None:
    def rename(model: onnx.ModelProto) -> None:
        named(model.graph.input, "audio_features").name = "speech_features"

    edit_graph(package, "embedding", rename)
    assert validate(package).contract == "mobius"
    assert not validate(package, "official").ok


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_contract_reads(name: str) -> None:
    contract = load_contract(name)
    assert contract.variant == name
    assert set(contract.graphs) == {"decoder", "vision", "speech", "embedding"}


def test_a_users_contract_file_may_carry_the_real_models_numbers(package: Path, tmp_path: Path) -> None:
    contract = load_contract("official").model_dump()
    contract["graphs"]["embedding"]["outputs"][0]["dims"][2] = 3072
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(contract))
    assert validate(package, str(file)).ok


def test_an_unknown_contract_name_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="neither a shipped contract nor a file"):
        load_contract("oficial")


def test_a_contract_file_with_faults_names_them_together(tmp_path: Path) -> None:
    contract = load_contract("official").model_dump()
    contract["graphs"]["vision"]["inputs"][0]["rank"] = 4
    contract["grahps"] = {}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(contract))
    with pytest.raises(UsageError, match="2 faults"):
        load_contract(str(file))
