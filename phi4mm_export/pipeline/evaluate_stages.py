"""The measurements of an evaluation, one stage after another: encoders, float decoder, the package's decoder, layers,
blame. What one side leaves for the other lies in a spool folder, so that both are never in memory together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.checks.blame import LayerBench, blame_of, forced_figures, swapped
from phi4mm_export.checks.chain import Chain, Features
from phi4mm_export.checks.error_maps import error_map, patch_errors, thumbnail
from phi4mm_export.checks.evaluation import (
    Answer,
    Blame,
    ComponentLayers,
    ComponentSize,
    Mode,
    ModeRow,
    Picture,
    Sample,
    TextRow,
)
from phi4mm_export.checks.fidelity import (
    F64,
    RowComparison,
    TokenComparison,
    TokenFigures,
    common_prefix,
    pooled,
)
from phi4mm_export.checks.text_probes import Fields, probe
from phi4mm_export.pipeline.evaluate_against import array_differences, component_sizes, preprocessing_differences
from phi4mm_export.pipeline.evaluate_inputs import Ask, Asked
from phi4mm_export.runtime.package import RunPackage
from phi4mm_export.runtime.processor import open_processor
from phi4mm_export.runtime.stepping import FourGraphs
from phi4mm_export.spec.contract import Component, Provider

Array = NDArray[Any]

SHOWN_PICTURES = 4
"""Worst pictures that the report shows."""
ENCODERS = {Component.VISION: "pixel_values", Component.SPEECH: "audio_embeds"}
"""The processed array whose presence means that a request runs the component."""


@dataclass(frozen=True)
class Limits:
    """Most tokens of an answer and of a text."""

    new_tokens: int
    text_tokens: int


@dataclass(frozen=True)
class Measured:
    """What the stages found."""

    preprocessing: tuple[str, ...]
    sizes: tuple[ComponentSize, ...]
    samples: tuple[Sample, ...]
    modes: tuple[ModeRow, ...]
    texts: tuple[TextRow, ...]
    answers: tuple[Answer, ...]
    layers: tuple[ComponentLayers, ...]
    blame: tuple[Blame, ...]
    pictures: tuple[Picture, ...]


class Stages:
    """One evaluation in progress."""

    def __init__(
        self,
        package: RunPackage,
        floats: RunPackage,
        asked: Asked,
        folder: Path,
        limits: Limits,
        *,
        provider: Provider,
        threads: int | None,
        tell: Callable[[str], None],
    ) -> None:
        self._package, self._floats, self._asked, self._limits = package, floats, asked, limits
        self._provider, self._threads, self._tell = provider, threads, tell
        self._spool = Spool(folder)
        self._samples: list[Sample] = []
        self._decoders: list[TokenFigures] = []
        self._answers: list[Answer] = []
        self._pictures: list[Picture] = []
        self._prompt_ids: dict[str, list[int]] = {}
        self._count = f"{len(asked.asks)} requests, {len(asked.texts)} text{'' if len(asked.texts) == 1 else 's'}"

    def run(self, fields: Fields, references: Mapping[str, str], *, blame: bool) -> Measured:
        """All stages."""
        preprocessing = self._preprocessing()
        for component in ENCODERS:
            self._encode(component)
        self._float_answers()
        texts = self._package_answers(fields, references)
        layers = self._layers()
        blamed = self._blame() if blame else ()
        self._pictures.sort(key=lambda each: -(each.relative_l2 or 0.0))
        return Measured(
            preprocessing=preprocessing,
            sizes=component_sizes(self._package, self._floats),
            samples=tuple(self._samples),
            modes=self._modes(),
            texts=texts,
            answers=tuple(self._answers),
            layers=layers,
            blame=blamed,
            pictures=tuple(self._pictures[:SHOWN_PICTURES]),
        )

    # ------------------------------------------------------------------ stages

    def _preprocessing(self) -> tuple[str, ...]:
        """How the packages' processors differ: by file, and on the requests themselves."""
        found = list(preprocessing_differences(self._package, self._floats))
        if found:
            other = open_processor(self._floats)
            for ask in self._asked.asks:
                mine, theirs = self._asked.arrays(ask), self._asked.arrays(ask, other)
                found += [f"{ask.name}: {line}" for line in array_differences(mine, theirs)]
        return tuple(found)

    def _encode(self, component: Component) -> None:
        """Features of both sides for every request that has them, and how they differ."""
        asks = [ask for ask in self._asked.asks if _runs(component, ask)]
        for package, side in ((self._floats, "float"), (self._package, "package")):
            if not asks:
                return
            self._tell(f"{component} of the {side}{'' if side == 'package' else ' model'}: {len(asks)} requests")
            chain = self._chain(package, component)
            for ask in asks:
                arrays = self._asked.arrays(ask)
                made = chain.vision(arrays) if component is Component.VISION else chain.speech(arrays)
                self._spool.put(f"{component}.{side}", ask.name, made)
                if side == "package":
                    self._compare_features(component, ask, arrays, made)

    def _compare_features(self, component: Component, ask: Ask, arrays: Mapping[str, Array], made: Array) -> None:
        rows = RowComparison()
        rows.add(made, self._spool.get(f"{component}.float", ask.name))
        self._samples.append(Sample(component.value, ask.name, ask.mode.value, rows.result()))
        if component is Component.VISION and not rows.result().fault:
            self._keep_pictures(ask, arrays, rows.position_errors())

    def _keep_pictures(self, ask: Ask, arrays: Mapping[str, Array], errors: F64) -> None:
        """Thumbnails and error maps; once there are many, only of the worst."""
        counts = [int(n) for n in np.asarray(arrays["num_image_tokens"]).reshape(-1)]
        begin = 0
        for index, (picture, count) in enumerate(zip(ask.pictures, counts, strict=True)):
            own = errors[begin : begin + count]
            begin += count
            level = float(np.sqrt(np.mean(own**2))) if own.size else 0.0
            grid = patch_errors(own, arrays, index)
            shown = b"" if grid is None else error_map(grid)
            largest = float(own.max(initial=0.0))
            name = ask.name if len(counts) == 1 else f"{ask.name}, picture {index + 1}"
            small = thumbnail(picture.png)
            if all(small != other.thumbnail for other in self._pictures):
                self._pictures.append(Picture(name, level, small, shown, largest))
        self._pictures.sort(key=lambda each: -(each.relative_l2 or 0.0))
        del self._pictures[SHOWN_PICTURES:]

    def _float_answers(self) -> None:
        """The float model's greedy answers, their logits, and its embeddings of all sequences."""
        self._tell(f"answers of the float model: {self._count}")
        chain = self._chain(self._floats, Component.EMBEDDING, Component.DECODER)
        for ask in self._asked.asks:
            ids, features = self._ids(ask), self._features(ask, "float")
            tokens, rows = chain.greedy(ids, features, self._limits.new_tokens, self._package.eos_token_ids)
            self._spool.put("answer", ask.name, np.asarray(tokens, np.int64))
            self._spool.put("logits", ask.name, np.asarray(rows, np.float32))
            self._spool.put("embeds", ask.name, chain.embeds(ids, features, tokens[: len(rows) - 1]))
        for name, text in self._asked.texts:
            ids = self._asked.text_ids(text, self._limits.text_tokens)
            embeds = chain.embeds(ids, (None, None))
            self._spool.put("text-embeds", name, embeds)
            self._spool.put("text-logits", name, np.asarray(list(chain.forced(embeds, ids, 1)), np.float32))

    def _package_answers(self, fields: Fields, references: Mapping[str, str]) -> tuple[TextRow, ...]:
        """The package along the float model's answers, then its own answers, then the texts."""
        self._tell(f"answers of the package: {self._count}")
        chain = self._chain(self._package, Component.EMBEDDING, Component.DECODER)
        for ask in self._asked.asks:
            self._answer(chain, ask, fields.get(ask.name), references.get(ask.name))
        return tuple(self._text_row(chain, name, text) for name, text in self._asked.texts)

    def _answer(self, chain: Chain, ask: Ask, fields: Mapping[str, str] | None, reference: str | None) -> None:
        ids, theirs = self._ids(ask), [int(i) for i in self._spool.get("answer", ask.name)]
        logits, embeds = self._spool.get("logits", ask.name), self._spool.get("embeds", ask.name)
        along = theirs[: len(logits) - 1]
        own = chain.embeds(ids, self._features(ask, "package"), along)
        same_features = chain.embeds(ids, self._features(ask, "float"), along)
        rows = RowComparison()
        rows.add(same_features, embeds)
        self._samples.append(Sample(Component.EMBEDDING.value, ask.name, ask.mode.value, rows.result()))
        alone = _compared(chain, embeds, [*ids, *along], len(ids), logits)
        same = np.array_equal(own, embeds)
        joined = alone if same else _compared(chain, own, [*ids, *along], len(ids), logits)
        self._samples.append(Sample(Component.DECODER.value, ask.name, ask.mode.value, alone.rows.result()))
        self._decoders.append(alone.result())
        stop = self._package.eos_token_ids
        tokens, _ = chain.greedy(ids, self._features(ask, "package"), self._limits.new_tokens, stop)
        texts = [self._asked.processor.decode(each) for each in (tokens, theirs)]
        finish = ["stop" if each and each[-1] in stop else "length" for each in (tokens, theirs)]
        probes = [
            probe(text, ending, baseline=texts[1], fields=fields, reference=reference)
            for text, ending in zip(texts, finish, strict=True)
        ]
        self._answers.append(
            Answer(
                request=ask.name,
                mode=ask.mode.value,
                prompt_tokens=len(ids),
                end_to_end=joined.result(),
                tokens=len(tokens),
                tokens_float=len(theirs),
                agree_tokens=common_prefix(tokens, theirs),
                text=texts[0],
                text_float=texts[1],
                probes=probes[0],
                probes_float=probes[1],
            )
        )

    def _text_row(self, chain: Chain, name: str, text: str) -> TextRow:
        ids = self._asked.text_ids(text, self._limits.text_tokens)
        comparison = TokenComparison()
        want, embeds = self._spool.get("text-logits", name), chain.embeds(ids, (None, None))
        for index, got in enumerate(chain.forced(embeds, ids, 1)):
            comparison.add(got, want[index], ids[index + 1] if index + 1 < len(ids) else None)
        return TextRow(name, len(ids), comparison.result())

    def _layers(self) -> tuple[ComponentLayers, ...]:
        """Each component that differs, layer by layer, on its worst request."""
        bench = LayerBench(self._package, self._floats, provider=self._provider, threads=self._threads)
        found: list[ComponentLayers] = []
        for component in (Component.VISION, Component.SPEECH, Component.DECODER):
            own = [s for s in self._samples if s.component == component.value and s.fidelity.relative_l2]
            if own:
                worst = max(own, key=lambda sample: sample.fidelity.relative_l2 or 0.0)
                self._tell(f"layers of the {component} on {worst.request}")
                found.append(bench.layers(component, worst.request, self._arrays(self._named(worst.request))))
        return tuple(found)

    def _blame(self) -> tuple[Blame, ...]:
        """The request of each mode that loses most."""
        bench = LayerBench(self._package, self._floats, provider=self._provider, threads=self._threads)
        both = [
            FourGraphs(each, provider=self._provider, threads=self._threads) for each in (self._package, self._floats)
        ]
        found: list[Blame] = []
        for mode in Mode:
            own = [answer for answer in self._answers if answer.mode == mode.value]
            if not own:
                continue
            worst = max(own, key=lambda each: _badness(each.end_to_end))
            self._tell(f"blame for {worst.request}")
            found.append(self._blame_one(self._named(worst.request), both[0], both[1], bench))
        return tuple(found)

    def _blame_one(self, ask: Ask, package: FourGraphs, floats: FourGraphs, bench: LayerBench) -> Blame:
        arrays, logits = self._arrays(ask), list(self._spool.get("logits", ask.name))
        answer = [int(i) for i in self._spool.get("answer", ask.name)]
        parts = [Component(s.component) for s in self._samples if s.request == ask.name and _differs(s)]
        swaps = swapped(package, floats, parts, lambda chain: forced_figures(chain, arrays, answer, logits))
        return blame_of(ask.name, ask.mode.value, swaps, lambda part: bench.impacts(part, arrays))

    # ------------------------------------------------------------------ what the stages share

    def _chain(self, package: RunPackage, *components: Component) -> Chain:
        graphs = FourGraphs(package, provider=self._provider, threads=self._threads, components=components)
        return Chain(dict.fromkeys(components, graphs))

    def _named(self, request: str) -> Ask:
        return next(ask for ask in self._asked.asks if ask.name == request)

    def _ids(self, ask: Ask) -> list[int]:
        """The prompt's ids, placeholders filled in; kept, because processing pictures takes a while."""
        if ask.name not in self._prompt_ids:
            self._prompt_ids[ask.name] = [int(i) for i in self._asked.arrays(ask)["input_ids"].reshape(-1)]
        return self._prompt_ids[ask.name]

    def _features(self, ask: Ask, side: str) -> Features:
        image, audio = (self._spool.get(f"{part}.{side}", ask.name) if _runs(part, ask) else None for part in ENCODERS)
        return image, audio

    def _arrays(self, ask: Ask) -> Mapping[str, Array]:
        """og's arrays of a request, with the float model's features and embeddings beside them."""
        arrays = dict(self._asked.arrays(ask))
        image, audio = self._features(ask, "float")
        arrays |= {} if image is None else {"image_features": image}
        arrays |= {} if audio is None else {"audio_features": audio}
        embeds = self._spool.get("embeds", ask.name)
        along = [int(i) for i in self._spool.get("answer", ask.name)][: embeds.shape[1] - len(self._ids(ask))]
        arrays["inputs_embeds"] = embeds
        arrays["sequence_ids"] = np.asarray([[*self._ids(ask), *along]], np.int64)
        return arrays

    def _modes(self) -> tuple[ModeRow, ...]:
        rows: list[ModeRow] = []
        for mode in Mode:
            own = [(a, d) for a, d in zip(self._answers, self._decoders, strict=True) if a.mode == mode.value]
            if not own:
                continue
            answers = [answer for answer, _ in own]
            longest = sum(max(a.tokens, a.tokens_float) for a in answers)
            rows.append(
                ModeRow(
                    mode=mode.value,
                    requests=len(own),
                    decoder=pooled([figures for _, figures in own]),
                    end_to_end=pooled([answer.end_to_end for answer in answers]),
                    agreement=sum(a.agree_tokens for a in answers) / longest if longest else 1.0,
                    identical=sum(a.agree_tokens == max(a.tokens, a.tokens_float) for a in answers),
                )
            )
        return tuple(rows)


class Spool:
    """Arrays by kind and request, on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers: dict[tuple[str, str], int] = {}

    def put(self, kind: str, request: str, array: Array) -> None:
        number = self._numbers.setdefault((kind, request), len(self._numbers))
        np.save(self._folder / f"{number:06d}.npy", array, allow_pickle=False)

    def get(self, kind: str, request: str) -> Array:
        stored: Array = np.load(self._folder / f"{self._numbers[kind, request]:06d}.npy", allow_pickle=False)
        return stored


def _compared(chain: Chain, embeds: Array, ids: list[int], first: int, expected: Array) -> TokenComparison:
    comparison = TokenComparison()
    for got, want in zip(chain.forced(embeds, ids, first), expected, strict=False):
        comparison.add(got, want)
    return comparison


def _differs(sample: Sample) -> bool:
    return bool(sample.fidelity.relative_l2) or bool(sample.fidelity.fault)


def _runs(component: Component, ask: Ask) -> bool:
    return bool(ask.pictures if component is Component.VISION else ask.clips)


def _badness(figures: TokenFigures) -> float:
    return float("inf") if figures.kl_mean is None else figures.kl_mean
