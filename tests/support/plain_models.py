"""Small ONNX models that nobody made for us, and feeds for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

WIDTH, HIDDEN, OUT = 64, 128, 32


def write_model(
    path: Path,
    *,
    names: bool = True,
    gemm: bool = False,
    dtype: type[np.floating] = np.float32,
    external: bool = False,
    seed: int = 0,
) -> Path:
    """x [b, 64] -> relu(x W1 + b1) W2 + b2 -> y [b, 32], opset 17, without com.microsoft."""
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.standard_normal((WIDTH, HIDDEN)) / 8,
        "b1": rng.standard_normal(HIDDEN) / 8,
        "w2": rng.standard_normal((OUT, HIDDEN) if gemm else (HIDDEN, OUT)) / 8,
        "b2": rng.standard_normal(OUT) / 8,
    }
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h0"], name="first" if names else ""),
        helper.make_node("Add", ["h0", "b1"], ["h1"], name="first_bias" if names else ""),
        helper.make_node("Relu", ["h1"], ["h2"], name="relu" if names else ""),
    ]
    if gemm:
        nodes.append(helper.make_node("Gemm", ["h2", "w2", "b2"], ["y"], transB=1, name="second" if names else ""))
    else:
        nodes.append(helper.make_node("MatMul", ["h2", "w2"], ["h3"], name="second" if names else ""))
        nodes.append(helper.make_node("Add", ["h3", "b2"], ["y"], name="second_bias" if names else ""))
    graph = helper.make_graph(
        nodes,
        "plain",
        [helper.make_tensor_value_info("x", kind, ["b", WIDTH])],
        [helper.make_tensor_value_info("y", kind, ["b", OUT])],
        [numpy_helper.from_array(value.astype(dtype), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    if external:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.stem}.weights", size_threshold=0)
    else:
        onnx.save(model, path)
    return path


def write_feeds(
    folder: Path, count: int, *, rows: int = 40, seed: int = 1, dtype: type[np.floating] = np.float32
) -> Path:
    """`count` .npz files of strongly correlated rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((8, WIDTH))
    for number in range(count):
        x = rng.standard_normal((rows, 8)) @ mix + 0.1 * rng.standard_normal((rows, WIDTH))
        np.savez(folder / f"{number:03d}.npz", x=x.astype(dtype))
    return folder
