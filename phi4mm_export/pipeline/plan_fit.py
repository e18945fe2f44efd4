"""`phi4mm plan --fit SIZE`: the recipes of one checkpoint whose package runs within a budget, best first.

The four graphs are planned once per way of storing them; a recipe is a choice of one way for each.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from phi4mm_export.checkpoint.open import Checkpoint
from phi4mm_export.errors import SystemLimitError, UsageError, some
from phi4mm_export.package.footprint import GraphWeights, graph_weights
from phi4mm_export.pipeline.export_plan import PlannedGraph, plan_export, share_table
from phi4mm_export.pipeline.plan import PlanSettings, largest_length, run_dims
from phi4mm_export.pipeline.plan_memory import RunDims, run_memory
from phi4mm_export.pipeline.plan_source import open_for_plan
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.phi4mm_config import checked_max_length
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe
from phi4mm_export.spec.sizes import format_bytes

DECODERS = (Precision.INT8, Precision.INT4, Precision.FP16)
TABLES = (Precision.FP32, Precision.FP16, Precision.INT8, Precision.INT4)
ENCODERS = (Precision.FP32, Precision.FP16)
FORMS = (LoraForm.GATED, LoraForm.MERGED)
BITS = {Precision.FP32: 32, Precision.FP16: 16, Precision.INT8: 8, Precision.INT4: 4}


@dataclass(frozen=True)
class Candidate:
    """One recipe. needed: bytes that the request takes; max_length: the largest that the budget holds; error: what the
    user's figures say of it, else None."""

    precision: str
    embedding_precision: str
    encoder_precision: str
    lora: str
    data_nbytes: int
    needed: int
    max_length: int
    error: float | None
    on_frontier: bool = False

    @property
    def label(self) -> str:
        """The recipe in one word: int8/int8/fp16/gated (decoder, table, encoders, adapters)."""
        return f"{self.precision}/{self.embedding_precision}/{self.encoder_precision}/{self.lora}"


def fit(
    path: str | Path,
    budget: int,
    *,
    provider: Provider = Provider.CPU,
    given: Mapping[str, Any] | None = None,
    adapter_paths: Mapping[Role, Path] | None = None,
    errors: Mapping[str, float] | None = None,
    settings: PlanSettings | None = None,
) -> tuple[Candidate, ...]:
    """Every recipe that runs in `budget` bytes with room for the request (or settings.max_length), smallest first.

    given: what is fixed, as keyword arguments of `Recipe.resolve`; only the rest is searched. errors: figures of
    `phi4mm evaluate` by label, or by decoder precision alone. A candidate is on the frontier when no other is at least
    as good in size, context, modes that are right and accuracy, and better in one of them. Accuracy is the bits of each
    part; between two candidates with figures it is those.

    Raises as `plan`; UsageError for a label that no recipe has, SystemLimitError when nothing runs in the budget.
    """
    how, fixed = settings or PlanSettings(), given or {}
    check_labels(errors or {})
    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_for_plan(path, adapter_paths or {}, how.revision, how.head)).checkpoint
        length = checked_max_length(checkpoint.config, max(how.workload.prompt_tokens, how.max_length or 1))
        listed = list(_candidates(checkpoint, budget, length, _recipes(checkpoint, provider, fixed), errors or {}, how))
    found = [one for one in listed if one.needed <= budget]
    if not found:
        least = min(listed, key=lambda one: (one.needed, one.label))
        raise SystemLimitError(
            f"none of {len(listed)} recipes runs in {format_bytes(budget)} with {length:,} tokens; the least of them, "
            f"{least.label}, needs {format_bytes(least.needed)}",
            where="--fit",
            fix="allow more, or plan for fewer --prompt-tokens, --crops and --seconds",
        )
    found.sort(key=lambda one: (one.data_nbytes, -one.max_length, one.label))
    return tuple(
        replace(one, on_frontier=not any(_beats(other, one) for other in found if other is not one)) for one in found
    )


def check_labels(errors: Mapping[str, float], *, where: str = "errors") -> None:
    """Raise UsageError for a label that no recipe has, with the nearest that one has."""
    parts = (
        [p.value for p in Precision],
        [p.value for p in TABLES],
        [p.value for p in ENCODERS],
        [*map(str, LoraForm)],
    )
    known = [*parts[0], *("/".join(names) for names in product(*parts))]
    unknown = [label for label in errors if label not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1, cutoff=0.0)
        raise UsageError(
            f"expected recipes such as int4 or int4/int8/fp16/gated, found {some(map(repr, unknown))}",
            where=where,
            fix=f"did you mean {near[0]}?",
        )


def _candidates(
    checkpoint: Checkpoint,
    budget: int,
    length: int,
    recipes: Iterable[Recipe],
    errors: Mapping[str, float],
    how: PlanSettings,
) -> Iterator[Candidate]:
    graphs: dict[tuple[Component, str], tuple[PlannedGraph, GraphWeights]] = {}
    for recipe in recipes:
        parts = []
        for component in Component:
            key = (component, _storage(component, recipe))
            if key not in graphs:
                alone = plan_export(checkpoint, replace(recipe, components=(component,)), adapter_named=False)
                planned = alone.graphs[0]
                graphs[key] = planned, graph_weights(component, planned.built.model, recipe.provider)
            parts.append(graphs[key])
        shared = share_table(checkpoint, recipe).table_is_shared
        nbytes = sum(g.data_nbytes for g, _ in parts if not (shared and g.built.component is Component.EMBEDDING))
        need = _need(recipe, [w for _, w in parts], run_dims(checkpoint, recipe), how)
        made = Candidate(
            recipe.precision.value,
            recipe.embedding_precision.value,
            recipe.encoder_precision.value,
            recipe.lora.value,
            nbytes,
            need(length),
            largest_length(budget, need, checkpoint.config.rope.max_positions),
            None,
        )
        yield replace(made, error=errors.get(made.label, errors.get(made.precision)))


def _need(recipe: Recipe, weights: list[GraphWeights], dims: RunDims, how: PlanSettings) -> Callable[[int], int]:
    """Bytes that the workload takes on the recipe's provider, by max_length."""

    def need(length: int) -> int:
        run = run_memory(weights, dims, how.workload, length)
        return run.peak if recipe.provider is Provider.CPU else run.device_peak

    return need


def _recipes(checkpoint: Checkpoint, provider: Provider, given: Mapping[str, Any]) -> list[Recipe]:
    """Every recipe that what is given leaves open; without merges of an adapter that the checkpoint lacks."""
    forms = [form for form in FORMS if form is not LoraForm.MERGED or _can_merge(checkpoint, given)]
    axes = {"precision": DECODERS, "embedding_precision": TABLES, "encoder_precision": ENCODERS, "lora": forms}
    choices = [(given[name],) if given.get(name) is not None else values for name, values in axes.items()]
    fixed = {name: value for name, value in given.items() if name not in axes}
    return [
        Recipe.resolve(provider=provider, **fixed, **dict(zip(axes, choice, strict=True)))
        for choice in product(*choices)
    ]


def _can_merge(checkpoint: Checkpoint, given: Mapping[str, Any]) -> bool:
    wanted = given.get("adapter", Role.VISION)
    return wanted is None or wanted in checkpoint.adapters or not checkpoint.adapters


def _storage(component: Component, recipe: Recipe) -> str:
    """What of a recipe decides how a graph is stored."""
    base = recipe.float_type.value
    if component is Component.DECODER:
        return f"{base}/{recipe.precision}/{recipe.lora_precision}/{recipe.lora}"
    if component is Component.EMBEDDING:
        return f"{base}/{recipe.embedding_precision}/{recipe.block_size}"
    return f"{base}/{recipe.encoder_precision}"


def _beats(other: Candidate, one: Candidate) -> bool:
    """Whether `other` is nowhere worse and somewhere better."""
    known = other.error is not None and one.error is not None
    ours, theirs = _merits(one, with_bits=not known), _merits(other, with_bits=not known)
    return all(a >= b for a, b in zip(theirs, ours, strict=True)) and theirs != ours


def _merits(candidate: Candidate, *, with_bits: bool) -> tuple[float, ...]:
    """Size, context, modes that are right and accuracy as numbers of which more is better."""
    size = (-float(candidate.data_nbytes), float(candidate.max_length), float(candidate.lora == LoraForm.GATED))
    if not with_bits:
        return (*size, -float(candidate.error or 0.0))
    parts = (candidate.precision, candidate.embedding_precision, candidate.encoder_precision)
    return (*size, *(float(BITS[Precision(part)]) for part in parts))
