"""A quantization carried out: staging, samples, the graph, the files around it, the manifest, and the publishing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phi4mm_export.package.claim import remove
from phi4mm_export.package.given_folders import WORK_DIR, made_folder
from phi4mm_export.package.manifest import MANIFEST_FILE, Manifest, write_manifest
from phi4mm_export.package.manifest_quantized import Quantized, digest_of, quantized_manifest
from phi4mm_export.package.manifest_read import read_manifest
from phi4mm_export.package.publish import KEPT, check_apart, kept_folder, left_folder, staged
from phi4mm_export.package.publish_model import staged_model
from phi4mm_export.package.replace_graph import copy_files, plan_copy
from phi4mm_export.package.room import check_room
from phi4mm_export.package.write import WrittenFile, hashed
from phi4mm_export.pipeline.export import SIDE_NBYTES
from phi4mm_export.pipeline.quantize_checks import check_graph, check_package, check_source
from phi4mm_export.pipeline.quantize_engines import Engine, check_engine
from phi4mm_export.pipeline.quantize_gate import GateReport, check_limit
from phi4mm_export.pipeline.quantize_job import Job, JobResult, QuantizeProgress, run_job
from phi4mm_export.pipeline.quantize_places import check_quantize_places
from phi4mm_export.pipeline.quantize_samples import check_sample_source, foreign_samples, open_samples, unseen_modes
from phi4mm_export.quant.settings import CalibrationReader, LayerReport, Method, QuantSettings
from phi4mm_export.quant.torch_device import open_device
from phi4mm_export.runtime.calibration_samples import Samples
from phi4mm_export.runtime.package import RunPackage
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.on_disk import exists, is_entry, is_file, is_folder, is_link

Progress = Callable[[QuantizeProgress], None]
WORK_NAME = "phi4mm-work"
"""Our folder inside the one that --work-dir names."""
IN_CLAIM = "quantize"
"""Our folder among what a killed run leaves beside the target."""


@dataclass(frozen=True)
class QuantizeReport:
    """What was written. `layers` in graph order; bytes count the weights of these layers; `gate` is None where nothing
    was judged; `digests` are those of the preprocessed calibration samples, sorted."""

    path: Path
    graph: str
    component: Component | None
    engine: Engine
    algorithm: str
    settings: QuantSettings
    layers: tuple[LayerReport, ...]
    nbytes_before: int
    nbytes_after: int
    samples: int
    digests: tuple[str, ...]
    gate: GateReport | None
    files: tuple[WrittenFile, ...]
    reused: int
    warnings: tuple[str, ...]

    def count(self, method: str) -> int:
        """How many layers ended as "gptq", "rtn", "kept" or by another engine's algorithm."""
        return sum(layer.method_used == method for layer in self.layers)


@dataclass(frozen=True)
class SampleChoice:
    """Where samples come from. `calibration` and `validation` are sources, `reader` an object with get_next()."""

    calibration: str | Path | None = None
    reader: CalibrationReader | None = None
    validation: str | Path | None = None
    num_samples: int | None = None
    skip_unreadable: bool = False


@dataclass(frozen=True)
class Request:
    """A call of `quantize` with everything resolved. `package` is None for a plain .onnx file."""

    graph: Path
    target: Path
    package: RunPackage | None
    component: Component | None
    settings: QuantSettings
    engine: Engine
    algorithm: str
    choice: SampleChoice
    quality_gate: bool
    max_rel_l2: float
    statistics: Path | None
    save_statistics: Path | None
    work_dir: Path | None
    overwrite: bool
    progress: Progress | None

    @property
    def name(self) -> str:
        """The graph's name in the result."""
        return self.graph.relative_to(self.package.path).as_posix() if self.package else self.target.name


def carry_out(request: Request) -> QuantizeReport:
    """Quantize, judge and publish. Raises as `quantize`; after an error nothing stands under the target's name."""
    check_engine(request.engine, request.algorithm, request.settings)
    if request.settings.torch_device is not None:
        open_device(request.settings.torch_device)
    check_limit(request.max_rel_l2)
    check_source(request.graph)
    target, package = request.target, request.package
    check_target_apart(request)
    check_quantize_places(
        request.graph,
        request.settings,
        request.engine,
        statistics=request.statistics,
        save_statistics=request.save_statistics,
        work_dir=request.work_dir,
    )
    for source, option in ((request.choice.calibration, "--calibration"), (request.choice.validation, "--validation")):
        if source is not None:
            check_sample_source(source, request.component, option=option)
    open_target = staged if package is not None else staged_model
    with (
        open_target(target, overwrite=request.overwrite, keep_left=True) as staging,
        work_folder(staging, request.work_dir) as work,
    ):
        samples = _samples(request, request.choice.calibration, request.choice.reader, fresh(work / "samples"))
        validation = _samples(request, request.choice.validation, None, fresh(work / "validation"))
        copied = _copy_around(request, staging)
        job = _job(request, staging, work, samples, validation)
        done = run_job(job)
        check_graph(request.graph, staging / request.name)
        names = {*copied, *(file.relative_to(staging).as_posix() for file in staging.rglob("*") if is_file(file))}
        files = [hashed(staging, name) for name in sorted(names)]
        report = report_of(job, done, files, path=target, package=package, component=request.component)
        if package is not None:
            manifest = requantized_manifest(package.path, report, request.statistics)
            report = replace(report, files=(*report.files, *write_manifest(staging, manifest)))
            check_package(package.path, staging)
    return report


def check_target_apart(request: Request) -> None:
    """Refuse a target that lies in the source, or holds what the run reads or keeps. Raises UsageError."""
    target, package, choice = request.target, request.package, request.choice
    check_apart(
        target,
        reads=(choice.calibration, choice.validation, request.statistics),
        writes=(request.work_dir, request.save_statistics),
        replaced=None if package is None else package.path,
    )


def requantized_manifest(package: Path, report: QuantizeReport, statistics: Path | None) -> Manifest:
    """The manifest of the new package. Raises PackageError when the old one cannot be trusted."""
    earlier = read_manifest(package) if is_entry(package / MANIFEST_FILE) else None
    ours = report.engine is Engine.NATIVE  # what others compute with is not ours to promise
    calibrated = report.settings.method is Method.GPTQ or not ours
    digest = None if statistics is None else digest_of(statistics)
    exact, device = report.settings.exact, report.settings.torch_device
    libraries = () if device is None else ("torch",)
    done = Quantized(report.graph, manifest_entry(report), calibrated, ours and exact, digest, libraries)
    return quantized_manifest(earlier, report.files, done)


def manifest_entry(report: QuantizeReport) -> dict[str, Any]:
    """What the manifest says of a quantization: every choice that decides bytes, and the samples' digests."""
    settings = report.settings
    return {
        "component": report.component.value if report.component else None,
        "engine": report.engine.value,
        "method": report.algorithm,
        "bits": settings.bits,
        "block_size": settings.block_size,
        "symmetric": settings.symmetric,
        "damp": settings.damp,
        "order": settings.order.value,
        "sequential": settings.sequential,
        "bias_correction": settings.bias_correction,
        "rotate": settings.rotate,
        "pad_for_cuda": settings.pad_for_cuda,
        "exclude": list(settings.exclude),
        "include": list(settings.include),
        "accuracy_level": settings.accuracy_level,
        "budget": settings.budget_nbytes,
        "seed": settings.seed,
        "exact": settings.exact,
        **({} if settings.device_kind is None else {"torch_device": settings.device_kind}),
        "layers": {
            method: report.count(method) for method in sorted({"gptq", "rtn", "kept", report.algorithm} - {"none"})
        },
        "calibration": {"samples": report.samples, "sha256": list(report.digests)},
    }


@contextlib.contextmanager
def work_folder(staging: Path, given: Path | None) -> Iterator[Path]:
    """Where finished layers are kept: the user's folder, or one in the target's claim that only a killed run leaves."""
    if given is not None:
        own = made_folder(given, WORK_DIR) / WORK_NAME  # below it folders are emptied: only ours may be
        own.mkdir(exist_ok=True)
        yield own
        return
    folder, left = kept_folder(staging) / IN_CLAIM, left_folder(staging)
    folder.parent.mkdir()
    earlier = left / KEPT / IN_CLAIM
    if is_folder(earlier) and not is_link(earlier):
        earlier.rename(folder)
    else:
        folder.mkdir()
    remove(left)
    yield folder


def fresh(folder: Path) -> Path:
    """An empty folder in place of what a killed run may have left."""
    if exists(folder):
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _samples(
    request: Request, source: str | Path | None, reader: CalibrationReader | None, spool: Path
) -> Samples | None:
    if reader is not None:
        return foreign_samples(reader, spool)
    choice = request.choice
    return open_samples(
        request.graph,
        request.package,
        request.component,
        source,
        spool,
        num_samples=choice.num_samples,
        seed=request.settings.seed,
        skip_unreadable=choice.skip_unreadable,
    )


def _copy_around(request: Request, staging: Path) -> tuple[str, ...]:
    """Everything of a package but the graph that is replaced; nothing for a plain file."""
    if request.package is None:
        check_room(staging.parent, request.graph.stat().st_size + SIDE_NBYTES)
        return ()
    plan = plan_copy(request.package.path, request.name)
    check_room(staging.parent, plan.nbytes + SIDE_NBYTES)
    return copy_files(plan, staging)


def _job(request: Request, staging: Path, work: Path, samples: Samples | None, validation: Samples | None) -> Job:
    return Job(
        source=request.graph,
        target=staging / request.name,
        settings=request.settings,
        engine=request.engine,
        algorithm=request.algorithm,
        samples=samples,
        validation=validation,
        quality_gate=request.quality_gate,
        max_rel_l2=request.max_rel_l2,
        work=work,
        statistics=request.statistics,
        save_statistics=request.save_statistics,
        progress=request.progress,
    )


def report_of(
    job: Job,
    done: JobResult,
    files: Sequence[WrittenFile],
    *,
    path: Path,
    package: RunPackage | None,
    component: Component | None,
) -> QuantizeReport:
    """The report of a job whose graph went into `path`; files: everything that was written with it."""
    samples = job.samples
    return QuantizeReport(
        path=path,
        graph=job.target.name if package is None else job.source.relative_to(package.path).as_posix(),
        component=component,
        engine=job.engine,
        algorithm=job.algorithm,
        settings=job.settings,
        layers=done.result.layers,
        nbytes_before=done.result.nbytes_before,
        nbytes_after=done.result.nbytes_after,
        samples=len(samples) if samples else 0,
        digests=tuple(sorted(samples.digests)) if samples else (),
        gate=done.gate,
        files=tuple(files),
        reused=done.result.reused,
        warnings=(*(samples.notes if samples else ()), *unseen_modes(samples, package), *done.warnings),
    )
