"""`phi4mm plan --fit SIZE`: the recipes of one checkpoint whose package runs within a budget, best first.

The four graphs are planned once per way of storing them; a recipe is a choice of one way for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from phi4mm_export.checkpoint.open import Checkpoint
from phi4mm_export.package.footprint import GraphWeights, graph_weights
from phi4mm_export.pipeline.export_plan import PlannedGraph, plan_export, share_table
from phi4mm_export.pipeline.plan import PlanSettings, largest_length, run_dims
from phi4mm_export.pipeline.plan_memory import RunDims, run_memory
from phi4mm_export.pipeline.plan_source import open_for_plan
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe

DECODERS = (Precision.INT8, Precision.INT4, Precision.FP16)
TABLES = (Precision.FP32, Precision.FP16, Precision.INT8, Precision.INT4)
ENCODERS = (Precision.FP32, Precision.FP16)
FORMS = (LoraForm.GATED, LoraForm.MERGED)
BITS = {Precision.FP32: 32, Precision.FP16: 16, Precision.INT8: 8, Precision.INT4: 4}


@dataclass(frozen=True)
class Candidate:
    """One recipe. max_length is the largest that fits the budget; `error` is what the user's figures say, else None."""

    precision: str
    embedding_precision: str
    encoder_precision: str
    lora: str
    data_nbytes: int
    max_length: int
    error: float | None
    on_frontier: bool

    @property
    def label(self) -> str:
        """The recipe in one word: int8/int8/fp16/gated (decoder, table, encoders, adapters)."""
        return f"{self.precision}/{self.embedding_precision}/{self.encoder_precision}/{self.lora}"


def fit(
    path: str | Path,
    budget: int,
    *,
    provider: Provider = Provider.CPU,
    adapter_paths: Mapping[Role, Path] | None = None,
    errors: Mapping[str, float] | None = None,
    settings: PlanSettings | None = None,
) -> tuple[Candidate, ...]:
    """Every recipe that runs in `budget` bytes with at least the workload's prompt as max_length, smallest first.

    errors: figures of `phi4mm evaluate` by label, or by decoder precision alone. A candidate is on the frontier when
    no other is as good or better in size, context and accuracy; without a figure, accuracy is the bits of each part
    and the modes that are right. Raises as `plan`.
    """
    how = settings or PlanSettings()
    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_for_plan(path, adapter_paths or {}, how.revision)).checkpoint
        found = list(_candidates(checkpoint, budget, provider, errors or {}, how))
    found.sort(key=lambda candidate: (candidate.data_nbytes, -candidate.max_length, candidate.label))
    return tuple(
        replace(one, on_frontier=not any(_beats(other, one) for other in found if other is not one)) for one in found
    )


def _candidates(
    checkpoint: Checkpoint, budget: int, provider: Provider, errors: Mapping[str, float], how: PlanSettings
) -> Iterator[Candidate]:
    graphs: dict[tuple[Component, str], tuple[PlannedGraph, GraphWeights]] = {}
    for recipe in _recipes(provider):
        parts = []
        for component in Component:
            key = (component, _storage(component, recipe))
            if key not in graphs:
                alone = plan_export(checkpoint, replace(recipe, components=(component,)), adapter_named=False)
                planned = alone.graphs[0]
                graphs[key] = planned, graph_weights(component, planned.built.model, provider)
            parts.append(graphs[key])
        shared = share_table(checkpoint, recipe).table_is_shared
        nbytes = sum(g.data_nbytes for g, _ in parts if not (shared and g.built.component is Component.EMBEDDING))
        yield from _candidate(recipe, [w for _, w in parts], nbytes, run_dims(checkpoint, recipe), budget, errors, how)


def _candidate(
    recipe: Recipe,
    weights: list[GraphWeights],
    nbytes: int,
    dims: RunDims,
    budget: int,
    errors: Mapping[str, float],
    how: PlanSettings,
) -> Iterator[Candidate]:
    def need(length: int) -> int:
        run = run_memory(weights, dims, how.workload, length)
        return run.peak if dims.provider is Provider.CPU else run.device_peak

    length = largest_length(budget, need, dims.decoder.context_length)
    if length < how.workload.prompt_tokens:
        return
    made = Candidate(
        recipe.precision.value,
        recipe.embedding_precision.value,
        recipe.encoder_precision.value,
        recipe.lora.value,
        nbytes,
        length,
        None,
        on_frontier=False,
    )
    yield replace(made, error=errors.get(made.label, errors.get(made.precision)))


def _recipes(provider: Provider) -> Iterator[Recipe]:
    for precision in DECODERS:
        for table in TABLES:
            for encoder in ENCODERS:
                for form in FORMS:
                    yield Recipe.resolve(
                        provider=provider,
                        precision=precision,
                        embedding_precision=table,
                        encoder_precision=encoder,
                        lora=form,
                    )


def _storage(component: Component, recipe: Recipe) -> str:
    """What of a recipe decides how a graph is stored."""
    base = recipe.float_type.value
    if component is Component.DECODER:
        return f"{base}/{recipe.precision}/{recipe.lora}"
    if component is Component.EMBEDDING:
        return f"{base}/{recipe.embedding_precision}/{recipe.block_size}"
    return f"{base}/{recipe.encoder_precision}"


def _beats(other: Candidate, one: Candidate) -> bool:
    """Whether `other` is nowhere worse and somewhere better."""
    known = other.error is not None and one.error is not None
    ours, theirs = _merits(one, with_bits=not known), _merits(other, with_bits=not known)
    return all(a >= b for a, b in zip(theirs, ours, strict=True)) and theirs != ours


def _merits(candidate: Candidate, *, with_bits: bool) -> tuple[float, ...]:
    """Size, context and accuracy as numbers of which more is better."""
    size = (-float(candidate.data_nbytes), float(candidate.max_length), float(candidate.lora == LoraForm.GATED))
    if not with_bits:
        return (*size, -float(candidate.error or 0.0))
    parts = (candidate.precision, candidate.embedding_precision, candidate.encoder_precision)
    return (*size, *(float(BITS[Precision(part)]) for part in parts))
