"""Who quantizes: the native engine, or a foreign one behind the same readers, judged and published all the same."""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.errors import UsageError
from phi4mm_export.graphs.fused import DOMAIN, DOMAIN_VERSION
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.package.write import WrittenFile, hashed
from phi4mm_export.quant.engine import QuantProgress, quantize_graph
from phi4mm_export.quant.engines.neural_compressor import quantize_with_neural_compressor
from phi4mm_export.quant.engines.onnxruntime import OrtAlgorithm, quantize_with_onnxruntime
from phi4mm_export.quant.settings import DEFAULT_DAMP, LayerReport, Method, QuantResult, QuantSettings
from phi4mm_export.runtime.calibration_samples import Samples
from phi4mm_export.spec.quantization import Engine as Engine

FOREIGN_BITS = 4
"""What the foreign quantizers write, whatever they are asked for."""


@dataclass(frozen=True)
class EngineCall:
    """One graph to quantize. `algorithm`: the settings' method, or one that only the foreign engine has."""

    engine: Engine
    algorithm: str
    source: Path
    target: Path
    settings: QuantSettings
    samples: Samples | None
    work: Path | None = None
    statistics: Path | None = None
    save_statistics: Path | None = None
    progress: Callable[[QuantProgress], None] | None = None


def check_engine(engine: Engine, algorithm: str, settings: QuantSettings) -> None:
    """Refuse, before any work, what an engine would get wrong in silence. Raises UsageError."""
    own = algorithm == settings.method.value
    if (engine is Engine.NATIVE and not own) or (engine is Engine.NEURAL_COMPRESSOR and algorithm != Method.GPTQ):
        raise UsageError(
            f"the engine {engine} has no method {algorithm}", where="--method", fix="choose another engine"
        )
    if engine is Engine.NATIVE:
        return
    if settings.bits != FOREIGN_BITS:
        raise UsageError(
            f"{engine} writes {FOREIGN_BITS} bits whatever it is asked for, found --bits {settings.bits}",
            where="--engine",
            fix="use --engine native",
        )
    unheeded: dict[str, object] = {"--budget": settings.budget_nbytes, "--rotate": settings.rotate}
    unheeded |= {"--pad-for-cuda": settings.pad_for_cuda, "--torch-device": settings.torch_device}
    if engine is Engine.ONNXRUNTIME:
        damped = settings.damp != DEFAULT_DAMP
        unheeded |= {"--exclude": settings.exclude, "--include": settings.include, "--damp": damped}
    given = [option for option, value in unheeded.items() if value]
    if given:
        raise UsageError(
            f"{engine} does not heed {', '.join(given)}", where="--engine", fix="leave it out, or use --engine native"
        )


def call_engine(call: EngineCall) -> tuple[QuantResult, tuple[str, ...]]:
    """Quantize: the engine's account, and what should be known about the engine. Raises as the engines do."""
    if call.engine is Engine.NATIVE:
        result = quantize_graph(
            call.source,
            call.target,
            reader=call.samples,
            settings=call.settings,
            work_dir=call.work,
            statistics=call.statistics,
            save_statistics=call.save_statistics,
            progress=call.progress,
        )
        return result, ()
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):  # foreign quantizers print their progress among our results
        files, warnings = _foreign(call)
    _import_domain(call.target)
    files = tuple(hashed(call.target.parent, file.name) for file in files)
    layers = _layers(call.target, call.algorithm, time.perf_counter() - began)
    before = sum(layer.K * layer.N * size for layer, size in layers)
    after = sum(layer.nbytes for layer, _ in layers)
    samples = len(call.samples) if call.samples else 0
    result = QuantResult(tuple(layer for layer, _ in layers), files, before, after, samples)
    return result, warnings


def _foreign(call: EngineCall) -> tuple[tuple[WrittenFile, ...], tuple[str, ...]]:
    if call.engine is Engine.NEURAL_COMPRESSOR:
        if call.samples is None:
            raise UsageError("neural-compressor's GPTQ was asked for without samples", fix="give --calibration")
        files = quantize_with_neural_compressor(call.source, call.target, reader=call.samples, settings=call.settings)
        return files, ()
    files, warning = quantize_with_onnxruntime(
        call.source,
        call.target,
        algorithm=OrtAlgorithm(call.algorithm),
        reader=call.samples,
        block_size=call.settings.block_size,
        symmetric=call.settings.symmetric,
        accuracy_level=call.settings.accuracy_level,
    )
    return files, (warning,) if warning else ()


def _import_domain(path: Path) -> None:
    """State the domain of MatMulNBits, which onnxruntime's quantizer forgets for some of its algorithms."""
    model = load_graph(path)
    if DOMAIN not in {entry.domain for entry in model.opset_import}:
        model.opset_import.add(domain=DOMAIN, version=DOMAIN_VERSION)
        path.write_bytes(model.SerializeToString(deterministic=True))


def _layers(path: Path, algorithm: str, seconds: float) -> list[tuple[LayerReport, int]]:
    """What a foreign engine quantized, read from its graph, each with the bytes of one of its float weights."""
    import onnx

    graph = load_graph(path).graph
    sizes = {tensor.name: tensor for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "MatMulNBits"]
    found: list[tuple[LayerReport, int]] = []
    for node in nodes:
        numbers = {attribute.name: attribute.i for attribute in node.attribute}
        tensors = [sizes[name] for name in node.input[1:] if name in sizes]
        widths = [onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize for tensor in tensors]
        nbytes = sum(math.prod(tensor.dims) * width for tensor, width in zip(tensors, widths, strict=True))
        layer = LayerReport(
            name=node.name or node.output[0],
            weight=node.input[1],
            K=numbers["K"],
            N=numbers["N"],
            bits=numbers.get("bits", FOREIGN_BITS),
            block_size=numbers["block_size"],
            method_used=algorithm,
            reason="",
            damp=0.0,
            error_before=None,
            error_after=None,
            seconds=seconds / len(nodes),
            nbytes=nbytes,
        )
        found.append((layer, widths[1]))
    return found
