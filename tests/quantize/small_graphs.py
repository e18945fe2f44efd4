"""Small ONNX graphs with products of every kind, and calibration inputs whose channels are correlated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Feed = dict[str, NDArray[Any]]


def matrix(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Gaussian values with the scale of a trained layer."""
    values = np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[0])
    return values.astype(np.float32)


def feeds(count: int, channels: int, *, seed: int, rows: int = 64, mix_seed: int = 99) -> list[Feed]:
    """Inputs `x` [rows, channels] from 16 hidden factors: the case error compensation exists for."""
    mix = np.random.default_rng(mix_seed).standard_normal((16, channels)) * np.logspace(0, -1, 16)[:, None]
    rng = np.random.default_rng(seed)
    return [
        {
            "x": (rng.standard_normal((rows, 16)) @ mix + 0.05 * rng.standard_normal((rows, channels)) + 0.3).astype(
                np.float32
            )
        }
        for _ in range(count)
    ]


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, NDArray[Any]],
    *,
    channels: int,
    width: int,
    element: int = onnx.TensorProto.FLOAT,
) -> Path:
    """Write a graph from `x` [m, channels] to `y` [m, width]."""
    graph = helper.make_graph(
        list(nodes),
        "small",
        [helper.make_tensor_value_info("x", element, ["m", channels])],
        [helper.make_tensor_value_info("y", element, ["m", width])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def two_layers(path: Path, *, channels: int = 64, named: bool = True) -> Path:
    """y = relu(x w1 + b1) w2, with or without node names."""
    names = ("first", "second") if named else ("", "")
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["p"], name=names[0]),
        helper.make_node("Add", ["p", "b1"], ["s"]),
        helper.make_node("Relu", ["s"], ["h"]),
        helper.make_node("MatMul", ["h", "w2"], ["y"], name=names[1]),
    ]
    weights = {"w1": matrix(channels, 48, seed=1), "b1": matrix(48, seed=2), "w2": matrix(48, 40, seed=3)}
    return save(path, nodes, weights, channels=channels, width=40)


class Reader:
    """A calibration reader over a list."""

    def __init__(self, samples: Sequence[Feed]) -> None:
        self._samples = list(samples)
        self.rewind()

    def get_next(self) -> Feed | None:
        return next(self._next, None)

    def rewind(self) -> None:
        self._next = iter(self._samples)


def run(path: Path, samples: Sequence[Feed]) -> NDArray[np.float64]:
    """The outputs `y` of all samples, stacked."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.concatenate([np.asarray(session.run(["y"], sample)[0], np.float64) for sample in samples])


def relative(found: NDArray[Any], exact: NDArray[Any]) -> float:
    """|found - exact| / |exact|."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def nodes_of(path: Path) -> list[onnx.NodeProto]:
    """The nodes of the main graph."""
    return list(onnx.load(path, load_external_data=False).graph.node)
