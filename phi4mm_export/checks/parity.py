"""A package against the original model, live: every graph, every mode, prompt and decode steps, with PyTorch.

Inputs are made of seeded numbers, so that any checkpoint can be judged: no pictures, no clips, no tokenizer. Each graph
is fed what the original's graph before it gives, so that an error shows where it is made; the chain then runs the
package's own graphs one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from phi4mm_export.checks.cases import (
    ASSISTANT,
    END,
    SHORT_STEPS,
    SPEECH_INPUTS,
    USER,
    VISION_INPUTS,
    Array,
    Case,
    Graphs,
    Group,
    InputMode,
    chain_case,
    greedy,
    made_clips,
    made_images,
    speech_case,
    text_case,
    text_ids,
    vision_case,
)
from phi4mm_export.checks.numerics import (
    Errors,
    Measure,
    Precision,
    Tolerance,
    clear_margin,
    errors,
    tolerance_of,
    worst,
)
from phi4mm_export.checks.package_graphs import PackageGraphs, case_precision, precisions
from phi4mm_export.checks.parity_table import ParityRow, ParityTable
from phi4mm_export.checks.report import Finding
from phi4mm_export.checks.sampling import logit_samples, margins
from phi4mm_export.errors import MissingExtraError
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.model import AUDIO_TOKEN_ID, IMAGE_TOKEN_ID, Role

if TYPE_CHECKING:
    from phi4mm_export.oracle.reference import Reference

OnCase = Callable[[str], None]
"""Called with the name of each comparison before it is made."""

IMAGES = [((1, 2), (31, 64)), ((1, 1), (32, 25))]
"""Two images of different size: crop rows and columns, real patch rows and columns (odd ones mix padding in)."""
CLIPS, LONG_CLIP = (300, 61), (4104,)
"""Log-mel frames: two clips of different length, and one that the conformer takes in two chunks."""
PROBE_TOKENS, TEXT_TOKENS = 16, 21
LONGEST_SWITCH = 8192
"""LongRoPE switches beyond this many tokens are not crossed: the prompt would take too long."""
SHALLOW_LAYERS, DEEP_FACTOR = 6, 1.5
"""Deeper decoders gather more float16 noise than the fixed tolerance allows: there the original itself, computed in
float16, sets the measure, and a package may have 1.5 times its error."""


@dataclass(frozen=True)
class _Judge:
    """One package beside the original."""

    reference: Reference
    graphs: PackageGraphs
    formats: Mapping[Component, Precision]
    held: frozenset[Role | None]
    half: Callable[[], Reference]

    def rows(self, case: Case, want: Mapping[str, Array] | None = None) -> Iterator[ParityRow]:
        """One row, or one for the prompt and one for the steps. `want`: the outputs of the original, if known."""
        if want is None:
            want = case.run(self.reference, None)
        got = case.run(self.graphs, want.get("tokens"))
        precision = case_precision(case.group, self.formats)
        for part in ("prefill", "step") if "step_logits" in want else ("",):
            names = [name for name in want if name.startswith(part) and name != "tokens"]
            wrong, clear = _wrong_tokens(got, want, precision) if part == "step" else (0, 0)
            yield ParityRow(
                graph=case.group.value,
                mode=case.mode,
                case=PART_NAMES.get(part, case.name.partition(".")[0]),
                precision=precision,
                errors=_errors(got, want, names),
                tolerance=self._tolerance(case, precision, want, names),
                held=set(case.adapters) <= self.held,
                wrong_tokens=wrong,
                clear_tokens=clear,
            )

    def _tolerance(self, case: Case, precision: Precision, want: Mapping[str, Array], names: list[str]) -> Tolerance:
        fixed = tolerance_of(precision, case.group.value, long=case.long)
        deep = self.reference.config.num_layers > SHALLOW_LAYERS
        if precision is not Precision.FP16 or not deep or case.group not in (Group.DECODER, Group.CHAIN):
            return fixed
        noise = _errors(case.run(self.half(), want.get("tokens")), want, names).relative_l2
        return Tolerance(Measure.RELATIVE_L2, max(fixed.limit, DEEP_FACTOR * noise))


PART_NAMES = {"prefill": "prompt", "step": f"{SHORT_STEPS} steps"}


def parity_table(
    package: Path | str,
    model: Path | str,
    *,
    adapter_paths: Mapping[Role, Path] | None = None,
    provider: Provider = Provider.CPU,
    threads: int | None = None,
    on_case: OnCase | None = None,
) -> ParityTable:
    """Compare a package with the checkpoint folder `model`, computed by PyTorch in float32.

    Raises MissingExtraError without torch, CheckpointError for a checkpoint that cannot be used, PackageError for a
    graph that onnxruntime refuses.
    """
    opener = _reference_opener()
    graphs = PackageGraphs(Path(package), provider=provider, threads=threads)
    reference = opener(Path(model), "float32", adapter_paths=adapter_paths)
    halves: list[Reference] = []

    def half() -> Reference:
        if not halves:
            halves.append(opener(Path(model), "float16", adapter_paths=adapter_paths))
        return halves[0]

    judge = _Judge(reference, graphs, precisions(Path(package)), _held(graphs, reference), half)
    rows = []
    for name, made in _comparisons(reference, judge):
        if on_case:
            on_case(name)
        rows += list(made)
    return ParityTable(tuple(rows), "the PyTorch original")


def parity_findings(
    package: Path | str, model: Path | str, *, adapter_paths: Mapping[Role, Path] | None = None
) -> list[Finding]:
    """`parity_table` as findings: errors where the package differs, and every figure as a note."""
    return parity_table(package, model, adapter_paths=adapter_paths).findings()


def _reference_opener() -> Callable[..., Reference]:
    try:
        from phi4mm_export.oracle.reference import Reference
    except ModuleNotFoundError as err:
        raise MissingExtraError("torch", "reference", "comparing with the original model") from err
    return Reference.open


def _comparisons(reference: Reference, judge: _Judge) -> Iterator[tuple[str, Iterator[ParityRow]]]:
    images, clips = made_images("parity", IMAGES), made_clips("parity", CLIPS)
    towers = [
        vision_case("two images", images),
        speech_case("two clips", clips, (InputMode.AUDIO.projection, InputMode.BOTH.projection)),
        speech_case("41 s clip", made_clips("parity/long", LONG_CLIP), (InputMode.AUDIO.projection,)),
    ]
    image = reference.vision(**{name: images[name] for name in VISION_INPUTS})
    for case in towers:
        yield case.name, judge.rows(case)
    for mode in InputMode:
        request = made_request(mode, images, clips, len(image))
        yield f"{mode} request", _request_rows(judge, request, mode, image)
    limit = reference.config.rope.original_max_positions
    if limit <= LONGEST_SWITCH:
        ids = np.concatenate([[USER], text_ids("parity/switch", limit)])
        for length in (limit, limit + 1):
            name = f"{length:,} tokens"
            yield name, judge.rows(text_case(name, ids[:length], None, steps=0, long=True))


def made_request(
    mode: InputMode, images: Mapping[str, Array], clips: Mapping[str, Array], image_tokens: int
) -> dict[str, Array]:
    """A processed request of one kind, as og's processor would hand it over."""
    request: dict[str, Array] = {"audio_projection_mode": np.array([mode.projection])}
    ids = [np.array([USER])]
    if mode in (InputMode.IMAGE, InputMode.BOTH):
        request |= images
        ids.append(np.full(image_tokens, IMAGE_TOKEN_ID))
    if mode in (InputMode.AUDIO, InputMode.BOTH):
        request |= clips
        ids.append(np.full(int(clips["audio_sizes"].sum()), AUDIO_TOKEN_ID))
    ids += [text_ids(f"parity/{mode}", TEXT_TOKENS), np.array([END, ASSISTANT])]
    return request | {"input_ids": np.concatenate(ids)[None]}


def _request_rows(
    judge: _Judge, request: Mapping[str, Array], mode: InputMode, image_features: Array
) -> Iterator[ParityRow]:
    """Embedding and decoder on the original's features, then the package's own graphs in a chain."""
    ids = request["input_ids"]
    image = image_features if "pixel_values" in request else None
    audio = None
    if "audio_embeds" in request:
        arrays = {name: request[name] for name in SPEECH_INPUTS}
        audio = judge.reference.speech(**arrays, mode=mode.projection)
    embeds = judge.reference.embedding(ids, image, audio)

    def embed(graphs: Graphs, _: Array | None) -> dict[str, Array]:
        return {"embeds": graphs.embedding(ids, image, audio)}

    def decode(graphs: Graphs, follow: Array | None) -> dict[str, Array]:
        return greedy(graphs, embeds, ids, mode.adapter, steps=SHORT_STEPS, follow=follow)

    yield from judge.rows(Case("prompt", Group.EMBEDDING, embed, mode=mode), {"embeds": embeds})
    want = decode(judge.reference, None)
    yield from judge.rows(Case("", Group.DECODER, decode, (mode.adapter,), mode), want)
    yield from judge.rows(chain_case("", request, mode.adapter, steps=SHORT_STEPS), want)


def _held(graphs: PackageGraphs, reference: Reference) -> frozenset[Role | None]:
    """The adapters a package runs with: on demand, or those that its bare decoder comes nearest to."""
    if graphs.chooses is not None:
        return graphs.chooses
    ids = text_ids("parity/probe", PROBE_TOKENS)
    distance: dict[Role | None, float] = {}
    for adapter in (None, *Role):
        case = text_case("probe", ids, adapter, steps=0)
        want, got = case.run(reference, None), case.run(graphs, None)
        distance[adapter] = _errors(got, want, list(want)).relative_l2
    nearest = min(distance.values())
    return frozenset(adapter for adapter, value in distance.items() if value == nearest)


def _errors(got: Mapping[str, Array], want: Mapping[str, Array], names: list[str]) -> Errors:
    return worst(errors(got[name], want[name]) for name in names)


def _wrong_tokens(got: Mapping[str, Array], want: Mapping[str, Array], precision: Precision) -> tuple[int, int]:
    """Greedy tokens that differ, of those whose lead exceeds the noise of the precision."""
    rows = np.concatenate([want["prefill_logits"][:1], want["step_logits"]])
    clear = margins(logit_samples(rows, rows.shape[1]), "") > clear_margin(precision)
    return int(((got["tokens"] != want["tokens"]) & clear).sum()), int(clear.sum())
