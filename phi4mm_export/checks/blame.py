"""Which component, and which layer of it, loses an answer: one component at a time is taken from the float package.

Graphs of different makers share no layer names; for them the verdict ends at the component.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.checks.chain import Chain
from phi4mm_export.checks.evaluation import Blame, ComponentLayers, Swap
from phi4mm_export.checks.fidelity import TokenComparison, TokenFigures
from phi4mm_export.checks.layers import LayerComparison, LayerImpact
from phi4mm_export.errors import PackageError
from phi4mm_export.runtime.calibration_prompts import decoder_feeds
from phi4mm_export.runtime.calibration_samples import fit, graph_inputs
from phi4mm_export.runtime.package import DEFAULT_NAMES, RunPackage
from phi4mm_export.runtime.probes import ProbedGraph
from phi4mm_export.runtime.stepping import AUDIO_MODE, BOTH_MODE, FourGraphs
from phi4mm_export.spec.contract import Component, Provider

Array = NDArray[Any]

LEAST_LOSS = 1e-6
"""A mean KL divergence (nats) below this is rounding: nothing was lost."""
CANDIDATES = 8
"""Layers with the largest errors of their own whose effect on the component's output is measured."""
RESULTS = {
    Component.VISION: "image_features",
    Component.SPEECH: "audio_features",
    Component.EMBEDDING: "inputs_embeds",
    Component.DECODER: "logits",
}
NO_SHARED_LAYERS = "the graphs share no layer names, so they are compared at their borders only"

Figures = Callable[[Chain], TokenFigures]


def swapped(package: FourGraphs, floats: FourGraphs, components: Sequence[Component], figures: Figures) -> list[Swap]:
    """`figures` of the package as it is, then with each component from the float package."""
    as_it_is = Chain(dict.fromkeys(Component, package))
    swaps = [Swap("none", figures(as_it_is))]
    for component in components:
        swaps.append(Swap(component.value, figures(as_it_is.replaced(component, floats))))
    return swaps


def guilty(swaps: Sequence[Swap]) -> str:
    """The component whose float version brings the mean KL down the most; empty if there is nothing to bring down."""
    base = swaps[0].figures.kl_mean
    if base is not None and base < LEAST_LOSS:
        return ""
    measured = [(swap.figures.kl_mean, swap.component) for swap in swaps[1:] if swap.figures.kl_mean is not None]
    if not measured:
        return ""
    least, component = min(measured, key=lambda pair: pair[0])
    return component if base is None or least < base else ""


def forced_figures(
    chain: Chain, arrays: Mapping[str, Array], answer: Sequence[int], expected: Sequence[Array]
) -> TokenFigures:
    """The chain's distributions along the float model's answer, against that model's logits [V] per position."""
    prompt = [int(i) for i in np.asarray(arrays["input_ids"]).reshape(-1)]
    along = list(answer[: len(expected) - 1])
    embeds = chain.embeds(prompt, chain.features(arrays), along)
    comparison = TokenComparison()
    for got, want in zip(chain.forced(embeds, [*prompt, *along], len(prompt)), expected, strict=True):
        comparison.add(got, want)
    return comparison.result()


def blame_of(request: str, mode: str, swaps: Sequence[Swap], layers: Callable[[Component], LayerVerdict]) -> Blame:
    """The verdict on one request; `layers` is asked about the guilty component only."""
    component = guilty(swaps)
    if not component:
        return Blame(request, mode, tuple(swaps), "", "", (), "the float model's answer survives")
    impacts, remark = layers(Component(component))
    return Blame(request, mode, tuple(swaps), component, impacts[0].layer if impacts else "", impacts, remark)


LayerVerdict = tuple[tuple[LayerImpact, ...], str]


class LayerBench:
    """Compares a component of both packages layer by layer on one request."""

    def __init__(
        self, package: RunPackage, floats: RunPackage, *, provider: Provider = Provider.CPU, threads: int | None = None
    ) -> None:
        self._sides = (package, floats)
        self._provider, self._threads = provider, threads

    def layers(self, component: Component, request: str, arrays: Mapping[str, Array]) -> ComponentLayers:
        """Every shared layer. arrays: og's arrays of the request; for the decoder also `sequence_ids`
        [1, S] and `inputs_embeds` [1, S, H] of the whole sequence."""
        try:
            comparison = self._comparison(component, arrays)
            if not comparison.comparable:
                return ComponentLayers(component.value, request, (), NO_SHARED_LAYERS)
            return ComponentLayers(component.value, request, comparison.errors())
        except PackageError as err:
            return ComponentLayers(component.value, request, (), f"the layers cannot be read: {err.what}")

    def impacts(self, component: Component, arrays: Mapping[str, Array]) -> LayerVerdict:
        """The layers that do most harm to the component's output, each alone, and a remark if there are none."""
        try:
            comparison = self._comparison(component, arrays)
            if not comparison.comparable:
                return (), NO_SHARED_LAYERS
            result = self._sides[1].tensor_name(component, RESULTS[component])
            return comparison.impacts(comparison.errors(), result, CANDIDATES), ""
        except PackageError as err:
            return (), f"the layers cannot be read: {err.what}"

    def _comparison(self, component: Component, arrays: Mapping[str, Array]) -> LayerComparison:
        graphs: list[ProbedGraph] = []
        feeds: list[Mapping[str, Array]] = []
        for package in self._sides:
            path = package.graph(component)
            if path is None:
                raise PackageError(f"expected a {component} graph, found none", where="genai_config.json")
            name = path.relative_to(package.path).as_posix()
            graphs.append(ProbedGraph(path, name, provider=self._provider, threads=self._threads))
            feeds.append(_feeds(package, component, name, arrays))
        return LayerComparison(graphs[0], graphs[1], feeds[0], feeds[1])


def _feeds(package: RunPackage, component: Component, name: str, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """The graph's inputs, in its names and element types, out of og's arrays."""
    inputs = graph_inputs(package.path / name, name)
    if component is Component.DECODER:
        return decoder_feeds(package, inputs, name, arrays["sequence_ids"], arrays["inputs_embeds"])
    known = dict(arrays)
    if component is Component.SPEECH:
        known["audio_projection_mode"] = np.array([BOTH_MODE if "pixel_values" in arrays else AUDIO_MODE])
        known.setdefault("audio_attention_mask", np.ones(arrays["audio_embeds"].shape[:2], np.bool_))
        known["attention_mask"] = known["audio_attention_mask"]
    elif component is Component.VISION:
        known["attention_mask"] = arrays["image_attention_mask"]
    else:
        width = package.hidden_size
        for kind in ("image_features", "audio_features"):
            known.setdefault(kind, np.zeros((0, width), np.float32))
    keys = DEFAULT_NAMES[component]
    return fit({package.tensor_name(component, key): known[key] for key in keys if key in known}, inputs, name)
