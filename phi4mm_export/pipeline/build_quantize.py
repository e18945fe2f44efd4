"""One graph of a build quantized: as `phi4mm quantize` does it, but in the build's own folders and without a copy of
the package. Files that stay are moved from the stage before; the float graph stays behind until the build is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from phi4mm_export.errors import PackageError, UsageError, some
from phi4mm_export.package.manifest import write_manifest
from phi4mm_export.package.manifest_quantized import digest_of
from phi4mm_export.package.replace_graph import detach, plan_copy
from phi4mm_export.package.room import check_room
from phi4mm_export.package.write import hashed
from phi4mm_export.pipeline.build_stages import Stage, Stages, stage_key
from phi4mm_export.pipeline.export import SIDE_NBYTES, default_jobs
from phi4mm_export.pipeline.quantize import default_accuracy_level, default_padding, default_rotation
from phi4mm_export.pipeline.quantize_checks import check_graph
from phi4mm_export.pipeline.quantize_engines import Engine
from phi4mm_export.pipeline.quantize_gate import Fidelity, GateReport
from phi4mm_export.pipeline.quantize_job import Job, QuantizeProgress, run_job
from phi4mm_export.pipeline.quantize_samples import open_samples
from phi4mm_export.pipeline.quantize_write import QuantizeReport, fresh, report_of, requantized_manifest
from phi4mm_export.quant.settings import QuantSettings
from phi4mm_export.runtime.calibration_samples import Samples
from phi4mm_export.runtime.package import RunPackage, open_package
from phi4mm_export.spec.build_recipe import QuantizeChoices
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.on_disk import is_file

OnLayer = Callable[[QuantizeProgress], None]
"""Called after each layer."""


@dataclass(frozen=True)
class QuantizeStep:
    """A graph to quantize. source: where its samples come from; statistics, save_statistics: folders of Hessians to use
    or to keep; expected: digests that the samples must have in a rebuild."""

    component: Component
    choices: QuantizeChoices
    source: str | None
    jobs: int | None
    expected: Sequence[str] | None = None
    statistics: Path | None = None
    save_statistics: Path | None = None
    on_layer: OnLayer | None = None

    @property
    def name(self) -> str:
        """The stage's name."""
        return f"quantize-{self.component}"

    def key(self, *, after: str) -> str:
        """The stage's key, samples left out: they are told by their digests."""
        facts = {each.name: _plain(getattr(self.choices, each.name)) for each in fields(self.choices)}
        facts["calibration"] = None if self.statistics is None else digest_of(self.statistics)
        return stage_key(self.name, facts, after=after)


def quantized(step: QuantizeStep, before: Stage, stages: Stages) -> Stage:
    """Quantize, judge, and put the package of `before` around the result.

    Raises QualityError when the gate says no, UsageError for samples that cannot be used or are not the expected ones.
    """
    package = open_package(before.folder)
    graph = _graph(package, step.component)
    name = graph.relative_to(package.path).as_posix()
    work = stages.place(f"{step.name}.work")
    work.mkdir(exist_ok=True)
    samples = _samples(step, package, graph, work)
    _check_expected(step, samples)
    plan = plan_copy(before.folder, name)
    check_room(stages.folder, graph.stat().st_size + _data_nbytes(before, graph) + SIDE_NBYTES)
    folder = fresh(stages.place(step.name))
    job = Job(
        source=graph,
        target=folder / name,
        settings=_settings(step, package),
        engine=Engine.NATIVE,
        algorithm=step.choices.method.value,
        samples=samples,
        validation=None,
        quality_gate=True,
        max_rel_l2=step.choices.max_rel_l2,
        work=work,
        statistics=step.statistics,
        save_statistics=step.save_statistics,
        progress=step.on_layer,
    )
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    done = run_job(job)
    check_graph(graph, folder / name)
    for other in plan.detached:
        detach(plan.package, other, folder)
    made = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if is_file(file)]
    files = [hashed(folder, each) for each in made]
    known = {file.name: file for file in before.files}
    for each in plan.copied:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        (before.folder / each).rename(folder / each)
        files.append(known[each])
    report = report_of(job, done, files, path=package.path, package=package, component=step.component)
    files += write_manifest(folder, requantized_manifest(before.folder, report, step.statistics))
    return stages.finish(step.name, step.key(after=before.key), files, _facts(step, report, before))


def same_samples(step: QuantizeStep, stage: Stage, stages: Stages) -> bool:
    """Whether an earlier run calibrated on the samples that are given now."""
    package = open_package(stage.folder)
    work = stages.place(f"{step.name}.work")
    work.mkdir(exist_ok=True)
    samples = _samples(step, package, _graph(package, step.component), work)
    _check_expected(step, samples)
    return sorted(samples.digests if samples else ()) == stage.facts.get("samples")


def _graph(package: RunPackage, component: Component) -> Path:
    graph = package.graph(component)
    if graph is None:
        raise PackageError(f"the package has no {component} graph", where="genai_config.json")
    return graph


def _samples(step: QuantizeStep, package: RunPackage, graph: Path, work: Path) -> Samples | None:
    choices = step.choices
    return open_samples(
        graph,
        package,
        step.component,
        step.source,
        fresh(work / "samples"),
        num_samples=choices.num_samples,
        seed=choices.seed,
    )


def _check_expected(step: QuantizeStep, samples: Samples | None) -> None:
    """Raise UsageError for calibration samples that are not the recorded ones."""
    if step.expected is None:
        return
    found = sorted(samples.digests) if samples else []
    wanted = sorted(step.expected)
    if found == wanted:
        return
    named = zip(samples.names, samples.digests, strict=True) if samples else ()
    strange = [name for name, digest in named if digest not in set(wanted)]
    lacking = len(set(wanted) - set(found))
    others = f": {some(strange, 3)}" if strange else ""
    raise UsageError(
        f"expected the {len(wanted)} recorded calibration samples of the {step.component} graph, found {len(found)}, "
        f"{len(strange)} of them others{others}; {lacking} recorded ones are missing",
        where=f"--calibration {step.source or 'none'}",
        fix="give the samples that the package was built with, under any names",
    )


def _settings(step: QuantizeStep, package: RunPackage) -> QuantSettings:
    choices = step.choices
    level, rotate, method = choices.accuracy_level, choices.rotate, choices.method
    return QuantSettings(
        method=method,
        bits=choices.bits,
        block_size=choices.block,
        symmetric=choices.symmetric,
        damp=choices.damp,
        order=choices.order,
        sequential=choices.sequential,
        bias_correction=choices.bias_correction,
        rotate=default_rotation(step.component, method) if rotate is None else rotate,
        pad_for_cuda=default_padding(package),
        exclude=choices.exclude,
        include=choices.include,
        accuracy_level=default_accuracy_level(package, step.component) if level is None else level,
        seed=choices.seed,
        jobs=step.jobs or default_jobs(),
        exact=choices.torch_device is None,
        torch_device=choices.torch_device,
    )


def _facts(step: QuantizeStep, report: QuantizeReport, before: Stage) -> dict[str, Any]:
    """What later stages and a resumed build need to know; those of the stages before are carried along."""
    gates = dict(before.facts.get("gates", {}))
    if report.gate is not None:
        gates[step.component.value] = gate_figures(report.gate)
    warnings = [*before.facts.get("warnings", ()), *report.warnings]
    return {"samples": list(report.digests), "gates": gates, "warnings": warnings}


def gate_figures(gate: GateReport) -> dict[str, Any]:
    """What the gate measured, as plain values."""
    rounded = None if gate.rounded is None else gate.rounded.mean_rel_l2
    return {"output": gate.output, "judged_on": gate.judged_on, "samples": gate.samples,
            "mean_rel_l2": gate.quantized.mean_rel_l2, "worst_rel_l2": gate.quantized.worst_rel_l2,
            "mean_cosine": gate.quantized.mean_cosine, "worst_cosine": _worst_cosine(gate.quantized),
            "rounded_mean_rel_l2": rounded, "allowed": gate.max_rel_l2}  # fmt: skip


def _worst_cosine(fidelity: Fidelity) -> float:
    return min(fidelity.cosine)


def _data_nbytes(stage: Stage, graph: Path) -> int:
    return sum(file.nbytes for file in stage.files if file.name.endswith(f"{graph.name}.data"))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
