"""What `evaluate` found, as data: one schema for JSON, the page and the gates.

Relative errors are fractions, divergences and likelihoods in nats, sizes in bytes. A figure that could not be measured
is None and its `fault` says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any

from phi4mm_export.checks.fidelity import Fidelity, TokenFigures
from phi4mm_export.checks.layers import LayerError, LayerImpact
from phi4mm_export.checks.text_probes import TextProbes
from phi4mm_export.errors import ExitCode, QualityError
from phi4mm_export.spec.contract import Component

SCHEMA_VERSION = 1
SIGNIFICANT_DIGITS = 6
"""Digits of every figure in JSON: more would be noise of the float arithmetic, and differ between machines."""


class Mode(StrEnum):
    """What a request holds: it decides which adapter the original activates."""

    NONE = "none"
    VISION = "vision"
    SPEECH = "speech"
    BOTH = "vision+speech"


@dataclass(frozen=True)
class ComponentSize:
    """One graph of both packages: bytes of graph and data, the coarsest number format, and a digest's verdict."""

    component: str
    nbytes: int
    nbytes_float: int
    format: str
    format_float: str


@dataclass(frozen=True)
class Sample:
    """One request through one component, both fed with the float model's values."""

    component: str
    request: str
    mode: str
    fidelity: Fidelity


@dataclass(frozen=True)
class ComponentSummary:
    """All samples of a component. Means over samples; the worst ones named."""

    component: str
    samples: int
    relative_l2_mean: float | None
    relative_l2_worst: float | None
    cosine_mean: float | None
    cosine_worst: float | None
    max_abs: float | None
    worst_request: str
    worst_position: int | None
    worst_position_l2: float | None
    fault: str = ""


@dataclass(frozen=True)
class ModeRow:
    """The decoder in one mode. `decoder`: fed with the float model's embeddings; `end_to_end`: with the package's own
    encoders. Both along the float model's greedy answers. agreement: share of the answers' tokens before the first
    difference; identical: answers without any."""

    mode: str
    requests: int
    decoder: TokenFigures
    end_to_end: TokenFigures
    agreement: float
    identical: int


@dataclass(frozen=True)
class TextRow:
    """A given text, token by token."""

    name: str
    tokens: int
    figures: TokenFigures


@dataclass(frozen=True)
class Answer:
    """One request answered by both, greedily. `agree_tokens`: tokens before the first difference."""

    request: str
    mode: str
    prompt_tokens: int
    end_to_end: TokenFigures
    tokens: int
    tokens_float: int
    agree_tokens: int
    text: str
    text_float: str
    probes: TextProbes
    probes_float: TextProbes


@dataclass(frozen=True)
class ComponentLayers:
    """Layer by layer, on the component's worst sample. `remark` says why there are none."""

    component: str
    request: str
    layers: tuple[LayerError, ...]
    remark: str = ""


@dataclass(frozen=True)
class Swap:
    """End-to-end figures of the request with one component in float; `component` is "none" for the package as it is."""

    component: str
    figures: TokenFigures


@dataclass(frozen=True)
class Blame:
    """Which component, and which layer in it, loses a request's answer. Empty names: nothing was lost, or no layer
    can be named."""

    request: str
    mode: str
    swaps: tuple[Swap, ...]
    component: str
    layer: str
    impacts: tuple[LayerImpact, ...]
    remark: str = ""


@dataclass(frozen=True)
class Gate:
    """A threshold, the figure it was compared with (the worst there is), and where that figure stands."""

    name: str
    threshold: float
    figure: float | None
    where: str
    passed: bool


@dataclass(frozen=True)
class Picture:
    """A picture of the worst ones: thumbnail and map of the error over its patches, both as PNG bytes. Not in JSON."""

    request: str
    relative_l2: float | None
    thumbnail: bytes
    error_map: bytes
    largest: float


@dataclass(frozen=True)
class Evaluation:
    """The whole result. `package` and `against` are names, without the path."""

    tool_version: str
    package: str
    against: str
    against_kind: str
    settings: Mapping[str, Any]
    inputs: str
    notes: tuple[str, ...]
    preprocessing: tuple[str, ...]
    sizes: tuple[ComponentSize, ...]
    components: tuple[ComponentSummary, ...]
    modes: tuple[ModeRow, ...]
    texts: tuple[TextRow, ...]
    answers: tuple[Answer, ...]
    samples: tuple[Sample, ...]
    layers: tuple[ComponentLayers, ...]
    blame: tuple[Blame, ...]
    gates: tuple[Gate, ...] = ()
    pictures: tuple[Picture, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every gate passed."""
        return all(gate.passed for gate in self.gates)

    @property
    def exit_code(self) -> ExitCode:
        """0, or 5 if a gate did not pass."""
        return ExitCode.OK if self.ok else ExitCode.QUALITY

    def raise_for_gates(self) -> None:
        """Raise QualityError naming every missed gate with its figure and threshold."""
        missed = [gate for gate in self.gates if not gate.passed]
        if missed:
            raise QualityError(
                "; ".join(_missed(gate) for gate in missed),
                where=self.package,
                fix="look at the report (--report DIR), or ask where the error comes from with --blame",
            )

    def as_json(self) -> dict[str, Any]:
        """The evaluation as plain data with a fixed key order (docs/evaluate.md describes it)."""
        body: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "ok": self.ok}
        for field in fields(self):
            if field.name != "pictures":
                body[field.name] = plain(getattr(self, field.name))
        return body


def plain(value: Any) -> Any:
    """Dataclasses as objects, tuples as lists, floats with SIGNIFICANT_DIGITS, NaN and infinity as null."""
    if is_dataclass(value):
        body = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        if isinstance(value, TokenFigures):
            fault = body.pop("fault")
            body |= {
                "perplexity": plain(value.perplexity),
                "perplexity_float": plain(value.perplexity_float),
                "fault": fault,
            }
        return body
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    return value


def summarize(component: str, samples: Iterable[Sample]) -> ComponentSummary:
    """The summary of a component's samples."""
    listed = [sample for sample in samples if sample.component == component]
    good = [sample for sample in listed if not sample.fidelity.fault]
    fault = next((f"{each.request}: {each.fidelity.fault}" for each in listed if each.fidelity.fault), "")
    if not good:
        return ComponentSummary(component, len(listed), None, None, None, None, None, "", None, None, fault)
    l2 = [sample.fidelity.relative_l2 or 0.0 for sample in good]
    cosine = [sample.fidelity.cosine or 0.0 for sample in good]
    worst = good[l2.index(max(l2))]
    return ComponentSummary(
        component=component,
        samples=len(listed),
        relative_l2_mean=sum(l2) / len(l2),
        relative_l2_worst=max(l2),
        cosine_mean=sum(cosine) / len(cosine),
        cosine_worst=min(cosine),
        max_abs=max(sample.fidelity.max_abs or 0.0 for sample in good),
        worst_request=worst.request,
        worst_position=worst.fidelity.worst_position,
        worst_position_l2=worst.fidelity.worst_position_l2,
        fault=fault,
    )


def summaries(samples: Iterable[Sample]) -> tuple[ComponentSummary, ...]:
    """The summary of every component that has samples."""
    listed = list(samples)
    present = {sample.component for sample in listed}
    return tuple(summarize(each.value, listed) for each in Component if each.value in present)


def judge(
    evaluation: Evaluation, *, min_cosine: float | None, max_rel_l2: float | None, max_kl: float | None
) -> tuple[Gate, ...]:
    """The asked gates: cosine and relative L2 against the worst sample of any component, KL against the mode with the
    largest mean end to end. What could not be measured does not pass."""
    gates: list[Gate] = []
    faults = [f"{summary.component}: {summary.fault}" for summary in evaluation.components if summary.fault]
    by_cosine = {c.component: c.cosine_worst for c in evaluation.components if c.samples}
    by_l2 = {c.component: c.relative_l2_worst for c in evaluation.components if c.samples}
    by_kl = {row.mode: row.end_to_end.kl_mean for row in evaluation.modes}
    if min_cosine is not None:
        gates.append(_gate("min_cosine", min_cosine, by_cosine, min, lambda figure: figure >= min_cosine, faults))
    if max_rel_l2 is not None:
        gates.append(_gate("max_rel_l2", max_rel_l2, by_l2, max, lambda figure: figure <= max_rel_l2, faults))
    if max_kl is not None:
        faults = [f"{row.mode}: {row.end_to_end.fault}" for row in evaluation.modes if row.end_to_end.fault]
        gates.append(_gate("max_kl", max_kl, by_kl, max, lambda figure: figure <= max_kl, faults))
    return tuple(gates)


def _gate(
    name: str,
    threshold: float,
    figures: Mapping[str, float | None],
    worst_of: Callable[[Iterable[float]], float],
    passes: Callable[[float], bool],
    faults: list[str],
) -> Gate:
    known = {place: figure for place, figure in figures.items() if figure is not None}
    if faults or not known:
        return Gate(name, threshold, None, faults[0] if faults else "nothing was measured", passed=False)
    figure = worst_of(known.values())
    place = next(place for place, value in known.items() if value == figure)
    return Gate(name, threshold, figure, place, passes(figure))


def _missed(gate: Gate) -> str:
    bound = "at least" if gate.name.startswith("min") else "at most"
    figure = "no figure" if gate.figure is None else f"{gate.figure:.6g}"
    flag = gate.name.replace("_", "-")
    return f"--{flag}: expected {bound} {gate.threshold:g}, found {figure} ({gate.where})"
