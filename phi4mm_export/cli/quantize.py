"""Quantize one graph of a package, or a plain ONNX file, to 4 or 8 bits, calibrated on real inputs and judged.

Of a package folder the result is a whole new package; of a plain file every constant weight of MatMul and Gemm counts.
GPTQ calibrates on --calibration: pictures for the vision graph, clips for speech, prompts for the decoder, .npz files
(keys = graph inputs) for a plain file. Every 8th sample is left out first and must come out better than rounding.

Example: phi4mm quantize phi4mm-fp32 -o phi4mm-vision4 --method gptq --calibration pages/

Example: phi4mm quantize model.onnx -o model-int4.onnx --calibration feeds/ --block-size 128
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phi4mm_export.cli import quantize_options as opt
from phi4mm_export.cli import render
from phi4mm_export.cli.choices import QuantMethod
from phi4mm_export.cli.options import JsonFlag, Overwrite, Quiet, Verbose
from phi4mm_export.spec.quantization import Engine, Order

if TYPE_CHECKING:
    from phi4mm_export.pipeline.quantize import QuantizeReport
    from phi4mm_export.pipeline.quantize_gate import GateReport
    from phi4mm_export.pipeline.quantize_job import QuantizeProgress
    from phi4mm_export.quant.settings import LayerReport

NAME_WIDTH = 64
"""Longest name of a layer in the table."""


def command(
    source: opt.Source,
    output: opt.Output,
    method: opt.Method = QuantMethod.GPTQ,
    component: opt.WhichGraph = None,
    bits: opt.Bits = 4,
    block_size: opt.BlockSize = None,
    symmetric: opt.Symmetric = True,
    calibration: opt.Calibration = None,
    num_samples: opt.NumSamples = None,
    validation: opt.Validation = None,
    skip_unreadable: opt.SkipUnreadable = False,
    damp: opt.Damp = 0.01,
    order: opt.Order = Order.ACT,
    sequential: opt.Sequential = True,
    bias_correction: opt.BiasCorrection = True,
    rotate: opt.Rotate = None,
    pad_for_cuda: opt.PadForCuda = None,
    exclude: opt.Exclude = None,
    include: opt.Include = None,
    accuracy_level: opt.AccuracyLevel = None,
    budget: opt.Budget = None,
    seed: opt.Seed = 0,
    jobs: opt.Jobs = None,
    engine: opt.Engine = Engine.NATIVE,
    save_statistics: opt.SaveStatistics = None,
    statistics: opt.Statistics = None,
    quality_gate: opt.QualityGate = True,
    max_rel_l2: opt.MaxRelL2 = 0.5,
    torch_device: opt.TorchDevice = None,
    work_dir: opt.WorkDir = None,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    from phi4mm_export.pipeline.quantize import quantize
    from phi4mm_export.spec.sizes import parse_bytes

    report = quantize(
        source,
        output,
        method=method.value,
        component=component,
        bits=bits,
        block_size=block_size,
        symmetric=symmetric,
        calibration=calibration,
        num_samples=num_samples,
        validation=validation,
        skip_unreadable=skip_unreadable,
        damp=damp,
        order=order,
        sequential=sequential,
        bias_correction=bias_correction,
        rotate=rotate,
        pad_for_cuda=pad_for_cuda,
        exclude=exclude or (),
        include=include or (),
        accuracy_level=accuracy_level,
        budget=parse_bytes(budget, where="--budget") if budget else None,
        seed=seed,
        jobs=jobs,
        engine=engine,
        save_statistics=save_statistics,
        statistics=statistics,
        quality_gate=quality_gate,
        max_rel_l2=max_rel_l2,
        torch_device=torch_device,
        work_dir=work_dir,
        overwrite=overwrite,
        progress=None if quiet or json else layer_progress(),
    )
    render.warnings(report.warnings, quiet=quiet or json)
    if json:
        render.document(as_json(report))
    elif not quiet:
        show(report, verbose=verbose)


def as_json(report: QuantizeReport) -> dict[str, Any]:
    """The report as plain values."""
    from phi4mm_export.pipeline.quantize_write import manifest_entry

    return {
        "path": str(report.path),
        "graph": report.graph,
        **manifest_entry(report),
        "bytes_before": report.nbytes_before,
        "bytes_after": report.nbytes_after,
        "gate": None if report.gate is None else _gate_json(report.gate),
        "reused_layers": report.reused,
        "warnings": list(report.warnings),
        "per_layer": [_layer_json(layer) for layer in report.layers],
        "files": [{"name": file.name, "size": file.nbytes, "sha256": file.sha256} for file in report.files],
    }


def show(report: QuantizeReport, *, verbose: int) -> None:
    """The report for people: the layers, what the gate measured, and the sizes."""
    from phi4mm_export.spec.sizes import format_bytes

    for line in layer_table(report.layers, every=verbose > 0):
        render.text(line)
    counts = ", ".join(
        f"{report.count(method)} {method}"
        for method in ("gptq", "rtn", "k_quant", "hqq", "kept")
        if report.count(method)
    )
    settings = report.settings
    form = f", {settings.bits} bits, blocks of {settings.block_size}" if report.algorithm != QuantMethod.NONE else ""
    sizes = f"{format_bytes(report.nbytes_before)} -> {format_bytes(report.nbytes_after)}"
    render.text(f"{report.path}: {len(report.layers)} weights ({counts}){form}, {sizes}")
    if report.gate is not None:
        render.text(gate_line(report.gate))


def gate_line(gate: GateReport) -> str:
    """The judged error in one sentence."""
    ours, rounded = gate.quantized, gate.rounded
    against = f", rounding to nearest {rounded.mean_rel_l2:.4f}" if rounded is not None else ""
    return (
        f"{gate.output} on {gate.judged}: relative L2 {ours.mean_rel_l2:.4f} "
        f"(worst {ours.worst_rel_l2:.4f}, cosine {ours.mean_cosine:.4f}){against}, allowed {gate.max_rel_l2:g}"
    )


def layer_table(layers: tuple[LayerReport, ...], *, every: bool) -> list[str]:
    """One line a layer; without `every` only the layers that did not come out as asked, or are the worst."""
    shown = list(layers)
    if not every:
        worst = sorted(layers, key=lambda layer: -(layer.error_after or 0.0))[:5]
        shown = [layer for layer in layers if layer in worst or layer.reason]
    names = [_short(layer.name or layer.weight) for layer in shown]
    width = max([len(name) for name in names] + [5])
    lines = (
        [f"{'layer':{width}}  {'K x N':>13}  how   bits/block  error before -> after   damp      s"] if shown else []
    )
    for name, layer in zip(names, shown, strict=True):
        before, after = ("-" if e is None else f"{e:.4f}" for e in (layer.error_before, layer.error_after))
        line = (
            f"{name:{width}}  {f'{layer.K} x {layer.N}':>13}  {layer.method_used:4}  "
            f"{layer.bits:>4}/{layer.block_size:<5}  {before:>12} -> {after:<8} {layer.damp:6.3f} {layer.seconds:6.1f}"
        )
        lines.append(line + (f"  {layer.reason}" if layer.reason else ""))
    if len(shown) < len(layers):
        lines.append(f"({len(layers) - len(shown)} more layers: --verbose)")
    return lines


def _short(name: str) -> str:
    """The end of a long name, which tells layers apart."""
    return name if len(name) <= NAME_WIDTH else f"...{name[3 - NAME_WIDTH :]}"


def _gate_json(gate: GateReport) -> dict[str, Any]:
    def fidelity(value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        return {
            "mean_rel_l2": value.mean_rel_l2,
            "worst_rel_l2": value.worst_rel_l2,
            "mean_cosine": value.mean_cosine,
            "rel_l2": list(value.rel_l2),
            "cosine": list(value.cosine),
        }

    return {
        "output": gate.output,
        "judged_on": gate.judged_on,
        "samples": gate.samples,
        "max_rel_l2": gate.max_rel_l2,
        "quantized": fidelity(gate.quantized),
        "rounded": fidelity(gate.rounded),
    }


def _layer_json(layer: LayerReport) -> dict[str, Any]:
    return {
        "name": layer.name,
        "weight": layer.weight,
        "K": layer.K,
        "N": layer.N,
        "bits": layer.bits,
        "block_size": layer.block_size,
        "method": layer.method_used,
        "reason": layer.reason,
        "damp": layer.damp,
        "error_before": layer.error_before,
        "error_after": layer.error_after,
        "seconds": round(layer.seconds, 3),
        "bytes": layer.nbytes,
    }


def layer_progress() -> Callable[[QuantizeProgress], None]:
    """One line on stderr per ten seconds, and one at the end of each phase."""
    last = time.monotonic()

    def report(step: QuantizeProgress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= render.LINE_EVERY_S:
            last = now
            render.note(f"{step.phase}: {step.done} of {step.total} layers ({step.layer})")

    return report
