"""`phi4mm quantize`: the constant weights of one graph become integers, judged before they are published.

Works on one component of a package (the result is a whole new package) and on any plain .onnx file.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from phi4mm_export.errors import PackageError, UsageError
from phi4mm_export.pipeline.export import default_jobs
from phi4mm_export.pipeline.quantize_engines import Engine
from phi4mm_export.pipeline.quantize_gate import DEFAULT_MAX_REL_L2
from phi4mm_export.pipeline.quantize_samples import WHAT_GPTQ_NEEDS
from phi4mm_export.pipeline.quantize_write import Progress, QuantizeReport, Request, SampleChoice, carry_out
from phi4mm_export.quant.settings import DEFAULT_DAMP, CalibrationReader, Method, Order, QuantSettings
from phi4mm_export.runtime.generate import configured_providers
from phi4mm_export.runtime.package import RunPackage, open_package
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.on_disk import exists, home_expanded, is_folder
from phi4mm_export.spec.recipe import CPU_ACCURACY_LEVEL, INT4_BLOCK, INT8_BLOCK
from phi4mm_export.weights.self_test import check_arithmetic

__all__ = ["QuantizeReport", "default_accuracy_level", "default_padding", "default_rotation", "quantize"]

_Choice = TypeVar("_Choice", bound=StrEnum)

DEFAULT_COMPONENT = Component.VISION
"""The graph that rounding to nearest ruins."""
FOREIGN_METHODS = ("k_quant", "hqq")
"""What --engine onnxruntime offers beside gptq and rtn; both choose codes by the weights alone."""


def quantize(
    source: str | Path,
    output: str | Path,
    *,
    method: Method | str = Method.GPTQ,
    component: Component | str | None = None,
    bits: int = 4,
    block_size: int | None = None,
    symmetric: bool = True,
    calibration: str | Path | None = None,
    reader: CalibrationReader | None = None,
    num_samples: int | None = None,
    validation: str | Path | None = None,
    skip_unreadable: bool = False,
    damp: float = DEFAULT_DAMP,
    order: Order | str = Order.ACT,
    sequential: bool = True,
    bias_correction: bool = True,
    rotate: bool | None = None,
    pad_for_cuda: bool | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    accuracy_level: int | None = None,
    budget: int | None = None,
    seed: int = 0,
    jobs: int | None = None,
    engine: Engine | str = Engine.NATIVE,
    save_statistics: str | Path | None = None,
    statistics: str | Path | None = None,
    quality_gate: bool = True,
    max_rel_l2: float = DEFAULT_MAX_REL_L2,
    torch_device: str | None = None,
    work_dir: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantize one graph of a package (`source` a folder, `output` a new package) or a plain .onnx file.

    reader: any object with `get_next()`. budget: bytes for all quantized weights. torch_device: where torch does gptq's
    algebra. Raises UsageError for options and samples, QualityError by the gate, and others; then `output` stays.
    """
    check_arithmetic()
    kind, machine = _kind_of(method), _choice(Engine, engine, "engine")
    samples = _enough(kind, SampleChoice(calibration, reader, validation, num_samples, skip_unreadable), statistics)
    package, graph, part = _open(home_expanded(source), component)
    request = Request(
        graph=graph,
        target=home_expanded(output).absolute(),
        package=package,
        component=part,
        settings=QuantSettings(
            method=kind,
            bits=bits,
            block_size=block_size or (INT4_BLOCK if bits == 4 else INT8_BLOCK),
            symmetric=symmetric,
            damp=damp,
            order=_choice(Order, order, "order"),
            sequential=sequential,
            bias_correction=bias_correction,
            rotate=default_rotation(part, kind, machine) if rotate is None else rotate,
            pad_for_cuda=default_padding(package, machine) if pad_for_cuda is None else pad_for_cuda,
            exclude=tuple(exclude),
            include=tuple(include),
            accuracy_level=default_accuracy_level(package, part) if accuracy_level is None else accuracy_level,
            budget_nbytes=budget,
            seed=seed,
            jobs=jobs or default_jobs(),
            exact=torch_device is None,
            torch_device=torch_device,
        ),
        engine=machine,
        algorithm=str(getattr(method, "value", method)),
        choice=samples,
        quality_gate=quality_gate,
        max_rel_l2=max_rel_l2,
        overwrite=overwrite,
        progress=progress,
        **_paths(statistics=statistics, save_statistics=save_statistics, work_dir=work_dir),
    )
    return carry_out(request)


def default_accuracy_level(package: RunPackage | None, component: Component | None) -> int:
    """4 (products in int8: faster by far at one token) for the decoder of a package for the CPU, else 0."""
    on_cpu = package is not None and Provider.CUDA not in configured_providers(package)
    return CPU_ACCURACY_LEVEL if on_cpu and component is Component.DECODER else 0


def default_padding(package: RunPackage | None, engine: Engine = Engine.NATIVE) -> bool:
    """Whether hidden layers get the widths of CUDA's fast kernel: in packages that are served on CUDA."""
    return engine is Engine.NATIVE and package is not None and Provider.CUDA in configured_providers(package)


def default_rotation(component: Component | None, method: Method, engine: Engine = Engine.NATIVE) -> bool:
    """Whether inputs are rotated before calibrated products: not in a decoder, whose steps are of one token."""
    return method is Method.GPTQ and engine is Engine.NATIVE and component is not Component.DECODER


def _paths(**given: str | Path | None) -> dict[str, Path | None]:
    """Paths by name, whichever way they were given."""
    return {name: None if path is None else home_expanded(path) for name, path in given.items()}


def _kind_of(method: Method | str) -> Method:
    """The settings' method; what only onnxruntime's quantizer has works without samples, as rounding does."""
    return Method.RTN if str(method) in FOREIGN_METHODS else _choice(Method, method, "method")


def _choice(kind: type[_Choice], given: str, option: str) -> _Choice:
    """A choice by its name, which the command line has checked and a Python caller may have misspelt."""
    try:
        return kind(given)
    except ValueError as err:
        raise UsageError(f"expected {' or '.join(kind)}, found {given!r}", where=f"--{option}") from err


def _open(path: Path, component: Component | str | None) -> tuple[RunPackage | None, Path, Component | None]:
    """The package (None for a plain .onnx file), the graph to work on, and which component it is."""
    if not exists(path):
        raise UsageError("expected a package folder or an .onnx file, found nothing", where=str(path))
    if not is_folder(path):
        if component is not None:
            raise UsageError(
                f"--component {component} names a graph of a package, and the source is a file", where=str(path)
            )
        return None, path, None
    part = _choice(Component, component or DEFAULT_COMPONENT, "component")
    if part is Component.EMBEDDING:
        raise UsageError(
            "the embedding graph has no linear layers: it looks rows up in a table",
            where="--component embedding",
            fix="store the table in integers with phi4mm export --embedding-precision int8",
        )
    package = open_package(path)
    graph = package.graph(part)
    if graph is None:
        raise PackageError(f"the package has no {part} graph", where="genai_config.json")
    return package, graph, part


def _enough(method: Method, choice: SampleChoice, statistics: str | Path | None) -> SampleChoice:
    """The samples, if the method has what it needs. Raises UsageError."""
    if choice.calibration is not None and choice.reader is not None:
        raise UsageError("samples were given twice, as a source and as a reader", where="--calibration", fix="give one")
    if choice.num_samples is not None and choice.num_samples < 1:
        raise UsageError(f"expected at least 1 sample, found {choice.num_samples}", where="--num-samples")
    given = choice.calibration is not None or choice.reader is not None or statistics is not None
    if method is Method.GPTQ and not given:
        raise UsageError("gptq was asked for without calibration samples", where="--method gptq", fix=WHAT_GPTQ_NEEDS)
    return choice
