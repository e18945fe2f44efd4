"""Kernels: element types are inferred through every kind of node, and judged as onnxruntime would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.packages import build_package

from phi4mm_export.checks.element_types import typed_nodes
from phi4mm_export.checks.kernels import check_graph_kernels, check_kernels
from phi4mm_export.checks.opened import open_file, open_package
from phi4mm_export.checks.report import Finding, Severity
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.kernel_table import kernel_table

FLOAT, HALF, BFLOAT, INT64, BOOL = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.INT64,
    TensorProto.BOOL,
)
MS = "com.microsoft"


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, int],
    output: tuple[str, int],
    constants: Sequence[onnx.TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    opset: int = 17,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in inputs.items()],
        [helper.make_tensor_value_info(output[0], output[1], None)],
        list(constants),
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MS, 1), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=9)


def _judge(tmp_path: Path, model: onnx.ModelProto, provider: Provider) -> list[Finding]:
    path = tmp_path / "graph.onnx"
    path.write_bytes(model.SerializeToString())
    return list(check_graph_kernels(open_file(path).others[0], provider))


def _codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


@pytest.mark.parametrize("provider", Provider)
def test_a_plain_float_graph_has_all_its_kernels(tmp_path: Path, provider: Provider) -> None:
    model = _model([helper.make_node("MatMul", ["a", "b"], ["y"])], {"a": FLOAT, "b": FLOAT}, ("y", FLOAT))
    assert _judge(tmp_path, model, provider) == []


def test_bfloat16_has_no_add_on_the_cpu(tmp_path: Path) -> None:
    model = _model([helper.make_node("Add", ["a", "b"], ["y"])], {"a": BFLOAT, "b": BFLOAT}, ("y", BFLOAT))
    findings = _judge(tmp_path, model, Provider.CPU)
    assert _codes(findings) == ["C601"]
    assert findings[0].found == "T bfloat16"
    assert "the load fails" in findings[0].what
    assert "judged by the kernels of onnxruntime 1." in findings[0].what
    assert "a newer one may have more" in findings[0].what


def test_float16_on_the_cpu_runs_between_casts_and_is_noted(tmp_path: Path) -> None:
    model = _model([helper.make_node("MatMul", ["a", "b"], ["y"])], {"a": HALF, "b": HALF}, ("y", HALF))
    findings = _judge(tmp_path, model, Provider.CPU)
    assert _codes(findings) == ["C610"]
    assert findings[0].severity is Severity.NOTE
    assert "MatMul x 1" in findings[0].what


def test_clip_of_whole_numbers_has_a_kernel_on_the_cpu_only(tmp_path: Path) -> None:
    node = helper.make_node("Clip", ["a"], ["y"], name="limit")
    model = _model([node], {"a": TensorProto.INT32}, ("y", TensorProto.INT32))
    findings = _judge(tmp_path, model, Provider.CUDA)
    assert _codes(findings) == ["C601"]
    assert findings[0].where == "graph.onnx: limit"
    assert findings[0].found == "T int32"
    assert _judge(tmp_path, model, Provider.CPU) == []


def test_float32_attention_has_no_kernel_on_cuda_and_the_fix_says_how_to_export(tmp_path: Path) -> None:
    package = open_package(build_package(tmp_path / "package"))
    findings = list(check_kernels(package, Provider.CUDA))
    assert _codes(findings) == ["C601"]
    assert "(2 nodes" in findings[0].what
    assert "--ep cuda" in findings[0].fix


def test_a_float16_node_inside_a_branch_is_judged_with_the_outer_types(tmp_path: Path) -> None:
    def branch(name: str) -> onnx.GraphProto:
        node = helper.make_node("Add", ["x", "x"], [name], name=f"add_{name}")
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, BFLOAT, None)])

    choice = helper.make_node("If", ["c"], ["y"], name="choice", then_branch=branch("t"), else_branch=branch("e"))
    model = _model([choice], {"c": BOOL, "x": BFLOAT}, ("y", BFLOAT))
    findings = _judge(tmp_path, model, Provider.CPU)
    assert _codes(findings) == ["C601"]
    assert findings[0].where == "graph.onnx: choice/else_branch/add_e"
    assert "(2 nodes" in findings[0].what


def test_types_pass_through_a_loop() -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["carried", "carried"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("go", BOOL, []),
            helper.make_tensor_value_info("carried", FLOAT, None),
        ],
        [helper.make_tensor_value_info("on", BOOL, []), helper.make_tensor_value_info("next", FLOAT, None)],
    )
    model = _model([helper.make_node("Loop", ["", "", "x"], ["y"], body=body)], {"x": FLOAT}, ("y", FLOAT))
    types = {node.node.op_type: node.outputs for node in typed_nodes(model)}
    assert types["Add"] == ("float",)
    assert types["Loop"] == ("float",)


def test_types_pass_through_a_local_function(tmp_path: Path) -> None:
    function = helper.make_function(
        "local", "twice", ["p"], ["q"], [helper.make_node("Add", ["p", "p"], ["q"])], [helper.make_opsetid("", 17)]
    )
    call = helper.make_node("twice", ["x"], ["y"], name="call", domain="local")
    model = _model([call], {"x": BFLOAT}, ("y", BFLOAT), functions=[function])
    findings = _judge(tmp_path, model, Provider.CPU)
    assert findings[0].where == "graph.onnx: call/Add -> q"


def test_functions_that_call_each_other_twice_do_not_explode() -> None:
    functions = []
    for level in range(40):
        inner = f"f{level + 1}"
        calls = [helper.make_node(inner, ["p"], [name], domain="local") for name in ("q", "r")]
        body = calls if level < 39 else [helper.make_node("Identity", ["p"], ["q"])]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
        functions.append(helper.make_function("local", f"f{level}", ["p"], ["q"], body, opsets))
    call = helper.make_node("f0", ["x"], ["y"], domain="local")
    model = _model([call], {"x": FLOAT}, ("y", FLOAT), functions=functions)
    assert sum(1 for _ in typed_nodes(model)) < 100_000


INFERRED = {
    "Cast": (helper.make_node("Cast", ["x"], ["y"], to=HALF), "float16"),
    "Shape": (helper.make_node("Shape", ["x"], ["y"]), "int64"),
    "Equal": (helper.make_node("Equal", ["x", "x"], ["y"]), "bool"),
    "ConstantOfShape": (helper.make_node("ConstantOfShape", ["n"], ["y"]), "float"),
    "Constant": (helper.make_node("Constant", [], ["y"], value_ints=[1]), "int64"),
    "ArgMax": (helper.make_node("ArgMax", ["x"], ["y"]), "int64"),
    "MatMulNBits": (
        helper.make_node("MatMulNBits", ["x", "q", "s"], ["y"], domain=MS, K=32, N=8, bits=8, block_size=32),
        "float",
    ),
    "GatherBlockQuantized": (
        helper.make_node("GatherBlockQuantized", ["q", "n", "h"], ["y"], domain=MS, bits=8, block_size=32),
        "float16",
    ),
    "CastLike": (helper.make_node("CastLike", ["x", "n"], ["y"]), "int64"),
    "QuickGelu": (helper.make_node("QuickGelu", ["x"], ["y"], domain=MS), "float"),
    "Hardmax, of which CUDA has no kernel": (helper.make_node("Hardmax", ["x"], ["y"]), "float"),
}


@pytest.mark.parametrize("kind", INFERRED)
def test_the_type_of_an_unlabelled_edge_is_inferred(kind: str) -> None:
    node, wanted = INFERRED[kind]
    constants = [
        numpy_helper.from_array(np.zeros((8, 32), np.uint8), "q"),
        numpy_helper.from_array(np.ones((8, 1), np.float32), "s"),
        numpy_helper.from_array(np.ones((8, 1), np.float16), "h"),
    ]
    after = helper.make_node("Identity", ["y"], ["out"])
    model = _model([node, after], {"x": FLOAT, "n": INT64}, ("out", 0), constants)
    model.graph.output[0].type.Clear()
    assert {typed.node.op_type: typed.outputs for typed in typed_nodes(model)}["Identity"] == (wanted,)


def test_two_types_at_one_node_are_refused(tmp_path: Path) -> None:
    model = _model([helper.make_node("Add", ["a", "b"], ["y"])], {"a": FLOAT, "b": HALF}, ("y", FLOAT))
    findings = _judge(tmp_path, model, Provider.CPU)
    assert _codes(findings) == ["C602"]
    assert findings[0].found == "T: float and float16"


def test_an_output_declared_with_another_type_is_refused(tmp_path: Path) -> None:
    model = _model([helper.make_node("Add", ["a", "a"], ["y"])], {"a": FLOAT}, ("y", HALF))
    assert _codes(_judge(tmp_path, model, Provider.CPU)) == ["C602"]


@pytest.mark.parametrize("domain", ["", MS, "somebody.else"])
def test_an_operator_that_does_not_exist_is_named(tmp_path: Path, domain: str) -> None:
    model = _model([helper.make_node("MatMull", ["a"], ["y"], domain=domain)], {"a": FLOAT}, ("y", FLOAT))
    assert _codes(_judge(tmp_path, model, Provider.CPU)) == ["C603"]


def test_an_operator_newer_than_the_opset_is_named(tmp_path: Path) -> None:
    node = helper.make_node("RMSNormalization", ["a", "a"], ["y"])
    model = _model([node], {"a": FLOAT}, ("y", FLOAT), opset=17)
    assert _codes(_judge(tmp_path, model, Provider.CPU)) == ["C603"]


def _quantized(**attributes: int) -> onnx.ModelProto:
    given = {"K": 64, "N": 8, "bits": 4, "block_size": 32} | attributes
    blocks = -(-64 // max(given["block_size"], 1))
    nbytes = max(given["block_size"] * given["bits"] // 8, 1)
    constants = [
        numpy_helper.from_array(np.zeros((8, blocks, nbytes), np.uint8), "q"),
        numpy_helper.from_array(np.ones((8, blocks), np.float32), "s"),
    ]
    node = helper.make_node("MatMulNBits", ["x", "q", "s"], ["y"], name="packed", domain=MS, **given)
    return _model([node], {"x": FLOAT}, ("y", FLOAT), constants)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bits_that_have_a_kernel_are_fine(tmp_path: Path, bits: int) -> None:
    assert _judge(tmp_path, _quantized(bits=bits, accuracy_level=4), Provider.CPU) == []


@pytest.mark.parametrize(("attributes", "words"), [({"bits": 3}, "3 bits"), ({"block_size": 8}, "blocks of 8")])
def test_bits_and_blocks_without_a_kernel_are_refused(tmp_path: Path, attributes: dict[str, int], words: str) -> None:
    findings = _judge(tmp_path, _quantized(**attributes), Provider.CPU)
    assert _codes(findings) == ["C604"]
    assert words in findings[0].what


def test_a_packed_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    findings = _judge(tmp_path, _quantized(N=16), Provider.CPU)
    assert _codes(findings) == ["C604", "C604"]
    assert "expected 512 elements" in findings[0].what


def test_int8_without_the_fast_path_is_noted_on_the_cpu_only(tmp_path: Path) -> None:
    assert _codes(_judge(tmp_path, _quantized(bits=8), Provider.CPU)) == ["C611"]
    assert _judge(tmp_path, _quantized(bits=8), Provider.CUDA) == []


def test_a_head_size_that_is_no_multiple_of_eight_is_refused(tmp_path: Path) -> None:
    node = helper.make_node(
        "GroupQueryAttention",
        ["x", "", "", "k", "v", "n", "t"],
        ["y", "k2", "v2"],
        domain=MS,
        num_heads=3,
        kv_num_heads=2,
    )
    model = _model([node], {"x": FLOAT, "n": TensorProto.INT32, "t": TensorProto.INT32}, ("y", FLOAT))
    for name in ("k", "v"):
        model.graph.input.append(helper.make_tensor_value_info(name, FLOAT, ["b", 2, "p", 12]))
    findings = _judge(tmp_path, model, Provider.CPU)
    assert _codes(findings) == ["C604", "C604"]
    assert "no multiple of its 2" in findings[0].what
    assert "found 12" in findings[1].what


@pytest.mark.parametrize("provider", Provider)
def test_a_table_holds_the_operators_an_export_uses(provider: Provider) -> None:
    needed = {"GroupQueryAttention", "MatMulNBits", "MultiHeadAttention", "SkipSimplifiedLayerNormalization"}
    assert {f"{MS}::{name}" for name in needed} <= set(kernel_table(provider))
