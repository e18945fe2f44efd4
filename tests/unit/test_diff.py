"""Differences of graphs and packages: each level found by name, values counted exactly, memory bounded."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.packages import build_package, edit_config, edit_graph, named

from phi4mm_export.package.diff import Difference, Level, compare_json
from phi4mm_export.package.diff_values import value_distance
from phi4mm_export.package.tensor_bytes import TensorBytes, tensor_bytes
from phi4mm_export.pipeline.diff import canonical_text, diff


def _model(
    weights: list[TensorProto], nodes: list[onnx.NodeProto] | None = None, opset: int = 17, width: int = 4
) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", width])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    made = nodes or [helper.make_node("MatMul", ["x", "w"], ["y"], name="linear")]
    graph = helper.make_graph(made, "g", [x], [y], weights)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _weight(values: np.ndarray, name: str = "w") -> TensorProto:
    return numpy_helper.from_array(values, name)


def _pair(tmp_path: Path, a: onnx.ModelProto, b: onnx.ModelProto) -> tuple[Difference, ...]:
    for folder, model in (("a", a), ("b", b)):
        (tmp_path / folder).mkdir()
        onnx.save(model, tmp_path / folder / "m.onnx")
    found = diff(tmp_path / "a" / "m.onnx", tmp_path / "b" / "m.onnx").differences
    return tuple(item for item in found if item.level is not Level.FILE)


W = np.arange(12, dtype=np.float32).reshape(4, 3)


def test_a_graph_does_not_differ_from_itself(tmp_path: Path) -> None:
    assert _pair(tmp_path, _model([_weight(W)]), _model([_weight(W)])) == ()


def test_how_a_constant_is_stored_makes_no_difference(tmp_path: Path) -> None:
    fields = helper.make_tensor("w", TensorProto.FLOAT, W.shape, W.flatten().tolist())
    assert _pair(tmp_path, _model([_weight(W)]), _model([fields])) == ()


def test_values_are_counted_with_the_largest_and_the_relative_distance(tmp_path: Path) -> None:
    other = W.copy()
    other[1, 2] += 0.5
    other[3, 0] -= 2
    (found,) = _pair(tmp_path, _model([_weight(W)]), _model([_weight(other)]))
    assert (found.level, found.where) == (Level.VALUE, "m.onnx: w")
    rel = math.sqrt(0.25 + 4) / np.linalg.norm(W)
    assert dict(found.figures) == {"count": 12, "differing": 2, "max_abs": 2.0, "rel_l2": pytest.approx(rel)}


def test_nan_against_a_number_has_no_finite_distance(tmp_path: Path) -> None:
    other = W.copy()
    other[0, 0] = np.nan
    (found,) = _pair(tmp_path, _model([_weight(W)]), _model([_weight(other)]))
    assert (found.figures["differing"], found.figures["max_abs"], found.figures["rel_l2"]) == (1, None, None)


def test_the_same_nan_on_both_sides_is_equal(tmp_path: Path) -> None:
    nan = np.full_like(W, np.nan)
    assert _pair(tmp_path, _model([_weight(nan)]), _model([_weight(nan)])) == ()


def test_another_type_is_said_and_the_values_compared(tmp_path: Path) -> None:
    half = (W + 0.0003).astype(np.float16)
    first, second = _pair(tmp_path, _model([_weight(W)]), _model([_weight(half)]))
    assert (first.level, first.a, first.b) == (Level.INITIALIZER, "float [4, 3]", "float16 [4, 3]")
    assert second.level is Level.VALUE


def test_another_shape_is_said_and_nothing_compared(tmp_path: Path) -> None:
    (found,) = _pair(tmp_path, _model([_weight(W)]), _model([_weight(W[:, :2])]))
    assert (found.level, found.b) == (Level.INITIALIZER, "float [4, 2]")


def test_constants_on_one_side_only_are_named(tmp_path: Path) -> None:
    found = _pair(tmp_path, _model([_weight(W), _weight(W, "old")]), _model([_weight(W), _weight(W, "new")]))
    assert [(item.where, item.what) for item in found] == [
        ("m.onnx: old", "constant only in A"), ("m.onnx: new", "constant only in B"),
    ]  # fmt: skip


def _softmax(axis: int, name: str = "s", operator: str = "Softmax") -> list[onnx.NodeProto]:
    return [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="linear"),
        helper.make_node(operator, ["h"], ["y"], name=name, axis=axis),
    ]


@pytest.mark.parametrize(
    ("nodes", "level", "where"),
    [
        (_softmax(0), Level.ATTRIBUTE, "m.onnx: s.axis"),
        (_softmax(-1, operator="LogSoftmax"), Level.NODE, "m.onnx: s"),
        ([helper.make_node("MatMul", ["x", "w"], ["y"], name="linear")], Level.NODE, "m.onnx: linear"),
    ],
)
def test_nodes_and_attributes_differ_by_name(
    tmp_path: Path, nodes: list[onnx.NodeProto], level: Level, where: str
) -> None:
    found = _pair(tmp_path, _model([_weight(W)], _softmax(-1)), _model([_weight(W)], nodes))
    assert (level, where) in {(item.level, item.where) for item in found}


def test_a_node_whose_output_was_renamed_is_the_same_node(tmp_path: Path) -> None:
    renamed = _softmax(-1)
    renamed[0].output[0] = renamed[1].input[0] = "hidden"
    found = _pair(tmp_path, _model([_weight(W)], _softmax(-1)), _model([_weight(W)], renamed))
    assert {(item.where, item.what) for item in found} == {
        ("m.onnx: linear", "other outputs"),
        ("m.onnx: s", "other inputs"),
    }


def test_a_constant_inside_a_branch_is_compared_in_its_scope(tmp_path: Path) -> None:
    def branching(value: float) -> onnx.ModelProto:
        inner = helper.make_node("Constant", [], ["c"], name="c", value=_weight(np.array([value], np.float32), ""))
        out = [helper.make_tensor_value_info("c", TensorProto.FLOAT, [1])]
        branch = helper.make_graph([inner], "branch", [], out)
        condition = _weight(np.array(True), "condition")
        node = helper.make_node("If", ["condition"], ["y"], name="choose", then_branch=branch, else_branch=branch)
        return _model([condition], [node])

    found = _pair(tmp_path, branching(1), branching(2))
    assert {item.where for item in found} == {f"m.onnx: y > {b} > c.value" for b in ("then_branch", "else_branch")}


@pytest.mark.parametrize(
    ("change", "level", "what"),
    [
        (lambda m: setattr(m, "ir_version", 10), Level.GRAPH, "ir_version"),
        (lambda m: setattr(m, "producer_name", "other"), Level.GRAPH, "producer_name"),
        (lambda m: setattr(m.opset_import[0], "version", 18), Level.GRAPH, "opset ai.onnx"),
        (lambda m: m.metadata_props.add(key="k", value="v"), Level.GRAPH, "metadata k"),
        (lambda m: setattr(m.graph.input[0], "name", "z"), Level.CONTRACT, "input only in A"),
        (lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 9),
         Level.CONTRACT, "input of another type or shape"),
    ],
)  # fmt: skip
def test_what_crosses_the_border_and_what_describes_the_model_is_compared(
    tmp_path: Path, change: Callable[[onnx.ModelProto], object], level: Level, what: str
) -> None:
    other = _model([_weight(W)])
    change(other)
    assert (level, what) in {(item.level, item.what) for item in _pair(tmp_path, _model([_weight(W)]), other)}


# ------------------------------------------------------------------ quantized weights

N, K, BLOCK = 3, 40, 16


def _quantized(
    codes: np.ndarray, scales: np.ndarray, bits: int = 4, zeros: np.ndarray | None = None
) -> onnx.ModelProto:
    """A MatMulNBits node from codes [N, blocks, BLOCK] and scales [N, blocks]; low nibble first."""
    packed = codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)
    weights = [_weight(packed.astype(np.uint8), "q"), _weight(scales.astype(np.float32), "s")]
    names = ["x", "q", "s"]
    if zeros is not None:
        weights.append(_weight(zeros.astype(np.uint8), "z"))
        names.append("z")
    node = helper.make_node(
        "MatMulNBits", names, ["y"], name="linear", domain="com.microsoft", K=K, N=N, bits=bits, block_size=BLOCK
    )
    return _model(weights, [node], width=K)


def _codes(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 16, (N, 3, BLOCK)).astype(np.uint8)


def test_codes_are_counted_and_their_difference_told_in_values(tmp_path: Path) -> None:
    codes, scales = _codes(), np.full((N, 3), 0.5)
    other = codes.copy()
    other[0, 0, 0], other[2, 1, 5] = (codes[0, 0, 0] + 3) % 16, (codes[2, 1, 5] + 1) % 16
    (found,) = _pair(tmp_path, _quantized(codes, scales), _quantized(other, scales))
    steps = np.abs(codes.astype(int) - other.astype(int))
    assert found.level is Level.VALUE
    assert found.figures["codes"] == N * K
    assert found.figures["codes_differing"] == 2
    assert found.figures["largest_code_step"] == steps.max()
    values = [((c.astype(np.float64) - 8) * 0.5).reshape(N, -1)[:, :K] for c in (codes, other)]
    wanted = np.linalg.norm(values[0] - values[1]) / np.linalg.norm(values[0])
    assert found.figures["dequantized_rel_l2"] == pytest.approx(wanted)
    assert found.figures["dequantized_max_abs"] == pytest.approx(steps.max() * 0.5)


def test_padding_codes_beyond_the_row_do_not_count(tmp_path: Path) -> None:
    codes = _codes()
    other = codes.copy()
    other[:, 2, 8:] ^= 15
    (found,) = _pair(tmp_path, _quantized(codes, np.ones((N, 3))), _quantized(other, np.ones((N, 3))))
    assert (found.figures["codes_differing"], found.figures["dequantized_differing"]) == (0, 0)


def test_other_scales_differ_in_values_and_not_in_codes(tmp_path: Path) -> None:
    (found,) = _pair(tmp_path, _quantized(_codes(), np.ones((N, 3))), _quantized(_codes(), np.full((N, 3), 1.25)))
    assert found.figures["codes_differing"] == 0
    assert found.figures["dequantized_rel_l2"] == pytest.approx(0.25)


def test_zero_points_take_part(tmp_path: Path) -> None:
    eights, nines = np.full((N, 2), 0x88), np.full((N, 2), 0x99)
    a, b = (_quantized(_codes(), np.ones((N, 3)), zeros=zeros) for zeros in (eights, nines))
    (found,) = _pair(tmp_path, a, b)
    assert (found.figures["codes_differing"], found.figures["dequantized_max_abs"]) == (0, 1.0)


def test_explicit_zero_points_of_eight_are_the_default(tmp_path: Path) -> None:
    a, b = _quantized(_codes(), np.ones((N, 3))), _quantized(_codes(), np.ones((N, 3)), zeros=np.full((N, 2), 0x88))
    values = [item for item in _pair(tmp_path, a, b) if item.level is Level.VALUE]
    assert [item.figures["dequantized_differing"] for item in values] == [0]


def test_formats_that_differ_are_compared_by_what_they_stand_for(tmp_path: Path) -> None:
    codes = _codes()
    eight = codes.astype(np.int16) - 8 + 128
    found = _pair(tmp_path, _quantized(codes, np.ones((N, 3))), _quantized(eight, np.ones((N, 3)), bits=8))
    value = next(item for item in found if item.level is Level.VALUE)
    assert (value.figures["codes"], value.figures["dequantized_differing"]) == (None, 0)
    assert [item.where for item in found if item.level is Level.ATTRIBUTE] == ["m.onnx: linear.bits"]


@pytest.mark.parametrize("as_rows", [True, False])
def test_a_float_weight_that_was_quantized_is_compared_with_what_its_codes_stand_for(
    tmp_path: Path, as_rows: bool
) -> None:
    codes, scales = _codes(), np.full((N, 3), 0.25)
    values = ((codes.astype(np.float32) - 8) * np.float32(0.25)).reshape(N, -1)[:, :K]
    values[0, 0] += 0.125
    stored = _weight(np.ascontiguousarray(values if as_rows else values.T))
    if as_rows:
        node = helper.make_node("FusedMatMul", ["x", "w"], ["y"], name="linear", domain="com.microsoft", transB=1)
    else:
        node = helper.make_node("MatMul", ["x", "w"], ["y"], name="linear")
    found = _pair(tmp_path, _model([stored], [node], width=K), _quantized(codes, scales))
    assert [item.level for item in found] == [Level.NODE, Level.VALUE]
    assert (found[1].figures["dequantized_differing"], found[1].figures["dequantized_max_abs"]) == (1, 0.125)
    assert found[1].what.startswith("float against 4 bits in blocks of 16")


# ------------------------------------------------------------------ packages, JSON, files


@pytest.fixture
def packages(tmp_path: Path) -> tuple[Path, Path]:
    return build_package(tmp_path / "a"), build_package(tmp_path / "b")


def test_two_equal_packages_do_not_differ(packages: tuple[Path, Path]) -> None:
    assert diff(*packages).equal
    assert diff(*packages).differences == ()


def test_files_keys_and_values_of_a_package_are_found_together(packages: tuple[Path, Path]) -> None:
    edit_config(packages[1], lambda c: c["search"].update(top_k=7))
    (packages[1] / "extra.txt").write_bytes(b"x")
    (packages[1] / "tokenizer.json").unlink()
    with (packages[1] / "phi-4-mm-text.onnx.data").open("r+b") as file:
        file.write(b"\0\0\x80\x3f")
    found = {(item.level, item.where) for item in diff(*packages).differences}
    assert found >= {
        (Level.FILE, "extra.txt"), (Level.FILE, "tokenizer.json"), (Level.FILE, "phi-4-mm-text.onnx.data"),
        (Level.CONFIG, "genai_config.json: search.top_k"),
        (Level.VALUE, "phi-4-mm-text.onnx: table"), (Level.VALUE, "phi-4-mm-embedding.onnx: table"),
    }  # fmt: skip


def test_graphs_are_paired_by_component_under_any_file_name(packages: tuple[Path, Path]) -> None:
    (packages[1] / "phi-4-mm-vision.onnx").rename(packages[1] / "v.onnx")
    edit_config(packages[1], lambda c: c["model"]["vision"].update(filename="v.onnx"))
    edit_levels = {item.level for item in diff(*packages).differences}
    assert edit_levels == {Level.FILE, Level.CONFIG}


def test_missing_data_is_a_difference_and_no_crash(packages: tuple[Path, Path]) -> None:
    (packages[1] / "phi-4-mm-text.onnx.data").unlink()
    found = [item for item in diff(*packages).differences if item.level is Level.VALUE]
    assert found
    assert all("is missing" in item.what for item in found)


@pytest.mark.parametrize("location", ["../x.data", "/etc/passwd", "C:\\x"])
def test_data_outside_the_package_is_not_read(packages: tuple[Path, Path], location: str) -> None:
    def lead_out(model: onnx.ModelProto) -> None:
        entry = next(e for e in named(model.graph.initializer, "qkv").external_data if e.key == "location")
        entry.value = location

    edit_graph(packages[1], "decoder", lead_out)
    found = [item.what for item in diff(*packages).differences if item.where.endswith(": qkv")]
    assert ["cannot be compared: expected a data file inside the package" in what for what in found] == [True]


def test_values_within_the_tolerance_are_equal_and_still_listed(tmp_path: Path) -> None:
    for name, scale in (("a", 1.0), ("b", 1.001)):
        (tmp_path / name).mkdir()
        onnx.save(_model([_weight(W * np.float32(scale))]), tmp_path / name / "m.onnx")
    files = tmp_path / "a" / "m.onnx", tmp_path / "b" / "m.onnx"
    assert not diff(*files).equal
    assert not diff(*files, tolerance=1e-4).equal
    report = diff(*files, tolerance=2e-3)
    assert report.equal
    assert [item.within for item in report.differences if item.level is Level.VALUE] == [True]


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 1.0}, ["f: a"]),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, ["f: a[1].b"]),
        ({"a": [1]}, {"a": [1, 2]}, ["f: a"]),
        ({"a": 1}, {"b": 1}, ["f: a", "f: b"]),
        ([1], {"b": 1}, ["f"]),
    ],
)
def test_json_documents_differ_by_key_path(a: object, b: object, found: list[str]) -> None:
    assert [item.where for item in compare_json(a, b, "f")] == found


def test_a_gigabyte_is_compared_in_a_few_megabytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(256 << 20)
            file.seek((256 << 20) - 4)
            file.write(b"\0\0\x80\x3f" if name == "a" else b"\0\0\0\x40")
    sides = [TensorBytes("w", "w", "FLOAT", (64 << 20,), tmp_path / name, 0, 256 << 20) for name in ("a", "b")]
    tracemalloc.start()
    distance = value_distance(*sides)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (distance.differing, distance.max_abs, distance.rel_l2) == (1, 1.0, 1.0)
    assert peak < 64 << 20


# ------------------------------------------------------------------ canonical text


def test_the_text_of_a_graph_does_not_depend_on_its_name_or_storage(tmp_path: Path) -> None:
    fields = helper.make_tensor("w", TensorProto.FLOAT, W.shape, W.flatten().tolist())
    onnx.save(_model([_weight(W)]), tmp_path / "one.onnx")
    onnx.save(_model([fields]), tmp_path / "two.onnx")
    first, second = (list(canonical_text(tmp_path / name)) for name in ("one.onnx", "two.onnx"))
    assert first == second
    assert "node linear: y = MatMul(x, w)" in first
    assert any(line.startswith("constant w: float [4, 3] [0.0, 1.0, ") for line in first)


def test_the_text_of_a_large_constant_is_its_digest_and_of_absent_data_its_place(tmp_path: Path) -> None:
    import hashlib

    values = np.arange(100, dtype=np.float32)
    onnx.save(_model([_weight(values)]), tmp_path / "m.onnx")
    assert any(
        f"sha256 {hashlib.sha256(values.tobytes()).hexdigest()}" in line for line in canonical_text(tmp_path / "m.onnx")
    )
    outside = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[8, 4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "far.data"), ("offset", "64"), ("length", "128")):
        outside.external_data.add(key=key, value=value)
    onnx.save(_model([outside]), tmp_path / "o.onnx")
    assert "constant w: float [8, 4] in far.data at 64, 128 bytes" in list(canonical_text(tmp_path / "o.onnx"))


def test_sub_byte_tensors_have_the_bytes_that_their_type_takes(tmp_path: Path) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.INT4, dims=[3, 3], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="d")
    assert tensor_bytes(tensor, tmp_path, "w").nbytes == 5
