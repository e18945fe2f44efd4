"""Measure the weight formats of the decoder on this CPU: error and speed by bits, block size and accuracy level.

    python scripts/bench_formats.py [--rounds N] [--width HIDDEN] [--threads N] [--json FILE] [--markdown]

One decoder layer's four products at the real model's sizes, random normal weights and inputs, through ONNX Runtime's
MatMulNBits. The formats take turns in every round, and the median is shown. `error` is the relative L2 of a product to
the float32 product of the unrounded weights; `kernel` is the part of it that the kernel itself adds (level 4 rounds the
inputs to 8 bits), measured against the product of the rounded weights in float32. `ms` are those of the four products
for one token and for a prompt of 256. About five minutes and 3 GiB of memory; nothing is written.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
from measuring import Record, add_report_options
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from phi4mm_export.runtime.ort import import_onnxruntime
from phi4mm_export.weights.packing import decode, quantize_rows, unpack

F32 = NDArray[np.float32]
FORMATS = [(bits, block, level) for bits in (8, 4) for block in (32, 64, 128) for level in (0, 4)]
PROMPT_TOKENS = 256
SEED = 1


@dataclass(frozen=True)
class Product:
    """One product of the layer: its session, and the relative L2 of its result to both float32 products."""

    session: Any
    error: float
    kernel_error: float


def layer_shapes(hidden: int) -> dict[str, tuple[int, int]]:
    """Rows and columns of the packed projections, in the real model's proportions."""
    return {
        "qkv": (hidden * 5 // 3, hidden),
        "o": (hidden, hidden),
        "gate_up": (hidden * 16 // 3, hidden),
        "down": (hidden, hidden * 8 // 3),
    }


def graph(weight: F32, bits: int, block: int, level: int) -> tuple[bytes, F32]:
    """A model of one MatMulNBits, and the weight [N, K] as it stands after rounding."""
    rows, width = weight.shape
    packed, scales = quantize_rows(weight, bits, block, np.dtype(np.float32))
    rounded = decode(unpack(packed, bits), scales, bits).reshape(rows, -1)[:, :width]
    node = helper.make_node(
        "MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft",
        K=width, N=rows, bits=bits, block_size=block, accuracy_level=level,
    )  # fmt: skip
    body = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["tokens", rows])],
        [numpy_helper.from_array(packed, "q"), numpy_helper.from_array(scales, "s")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model: onnx.ModelProto = helper.make_model(body, opset_imports=opsets, ir_version=10)
    return model.SerializeToString(), rounded


def relative(found: F32, expected: F32) -> float:
    """Relative L2 distance."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def layer(weights: dict[str, F32], inputs: dict[str, F32], form: tuple[int, int, int], threads: int) -> list[Product]:
    """The four products of one layer in one format."""
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    made = []
    for name, weight in weights.items():
        model, rounded = graph(weight, *form)
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        x = inputs[name]
        y = session.run(None, {"x": x})[0]
        made.append(Product(session, relative(y, x @ weight.T), relative(y, x @ rounded.T)))
    return made


def measure(products: list[Product], inputs: list[F32], tokens: int) -> float:
    """Milliseconds of the four products for so many tokens."""
    start = time.perf_counter()
    for product, x in zip(products, inputs, strict=True):
        product.session.run(None, {"x": x[:tokens]})
    return (time.perf_counter() - start) * 1000


def measured(rounds: int, hidden: int, threads: int) -> dict[tuple[int, int, int], dict[str, float]]:
    """Every format's errors, and milliseconds for one token and for a prompt."""
    random = np.random.default_rng(SEED)
    shapes = layer_shapes(hidden)
    weights = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    inputs = {name: random.standard_normal((PROMPT_TOKENS, width), np.float32) for name, (_, width) in shapes.items()}
    layers = {form: layer(weights, inputs, form, threads) for form in FORMATS}
    times: dict[tuple[tuple[int, int, int], int], list[float]] = {}
    for _ in range(rounds):
        for form, products in layers.items():
            for tokens in (1, PROMPT_TOKENS):
                times.setdefault((form, tokens), []).append(measure(products, list(inputs.values()), tokens))
    return {
        form: {
            "error": statistics.mean(product.error for product in products),
            "kernel": statistics.mean(product.kernel_error for product in products),
            "ms, 1 token": statistics.median(times[form, 1]),
            f"ms, {PROMPT_TOKENS} tokens": statistics.median(times[form, PROMPT_TOKENS]),
        }
        for form, products in layers.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="error and speed of the decoder's weight formats")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=3072, help="hidden size, a multiple of 96")
    parser.add_argument("--threads", type=int, default=2)
    add_report_options(parser)
    args = parser.parse_args()
    names = ("rounds", "width", "threads")
    record = Record({name: getattr(args, name) for name in names}, json_file=args.json, markdown=args.markdown)
    all_formats = cache(partial(measured, args.rounds, args.width, args.threads))
    for bits, block, level in FORMATS:

        def of_format(form: tuple[int, int, int] = (bits, block, level)) -> dict[str, float]:
            return all_formats()[form]

        record.row({"bits": bits, "block": block, "level": level}, of_format)


if __name__ == "__main__":
    main()
