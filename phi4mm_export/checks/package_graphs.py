"""A package's four graphs behind the interface that cases are written for, and the precision of each graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from phi4mm_export.checks.cases import Adapters, Group
from phi4mm_export.checks.numerics import Precision
from phi4mm_export.checks.summary import all_nodes
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.runtime.package import open_package
from phi4mm_export.runtime.stepping import STATE_ENDINGS, DecoderCache, FourGraphs
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.model import Role

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]

BITS = {8: Precision.INT8, 4: Precision.INT4}


@dataclass(frozen=True)
class PackageOutput:
    """One decoder call: logits [B, S or 1, V] and the cache for the next."""

    logits: Array
    cache: DecoderCache

    @property
    def present(self) -> Sequence[tuple[Array, Array]]:
        """Keys and values by layer [B, K, T, D]."""
        cached = [array for name, array in self.cache.tensors.items() if not name.endswith(STATE_ENDINGS)]
        return list(zip(cached[::2], cached[1::2], strict=True))


class PackageGraphs:
    """onnxruntime's answers. A gated decoder chooses by `input_ids`; adapter files are activated as asked; any other
    decoder runs with whatever it holds.
    """

    def __init__(self, package: Path, *, provider: Provider = Provider.CPU, threads: int | None = None) -> None:
        self.package = open_package(package)
        self._graphs = FourGraphs(self.package, provider=provider, threads=threads)

    @property
    def chooses(self) -> frozenset[Role | None] | None:
        """The adapters it runs with on demand; None if it holds one way for good, which only its numbers tell."""
        if self.package.gated:
            return frozenset({None, *Role})
        return frozenset({None, *self.package.adapters}) if self.package.adapters else None

    def vision(self, pixel_values: Array, image_attention_mask: Array, image_sizes: Array) -> Array:
        return self._graphs.vision(pixel_values, image_attention_mask, image_sizes)

    def speech(self, audio_embeds: Array, audio_attention_mask: Array, audio_sizes: Array, mode: int) -> Array:
        return self._graphs.speech(audio_embeds, audio_attention_mask, audio_sizes, mode)

    def embedding(
        self, input_ids: Array, image_features: Array | None = None, audio_features: Array | None = None
    ) -> Array:
        return self._graphs.embedding(input_ids, image_features, audio_features)

    def decoder(
        self,
        inputs_embeds: Array,
        input_ids: Array,
        attention_mask: Array,
        adapters: Adapters,
        previous: PackageOutput | None = None,
        *,
        last: int | None = None,
    ) -> PackageOutput:
        """Logits of at most the `last` positions; the graph itself may give fewer."""
        cache = previous.cache if previous else None
        logits, cache = self._graphs.decoder(
            inputs_embeds, attention_mask, cache, input_ids=input_ids, role=adapters[0]
        )
        return PackageOutput(logits if last is None else logits[:, -last:], cache)


def precisions(package: Path) -> dict[Component, Precision]:
    """The coarsest number format of each graph: its quantized weights, else its float types."""
    opened = open_package(package)
    files = {component: opened.graph(component) for component in Component}
    return {component: graph_precision(load_graph(file)) for component, file in files.items() if file}


def case_precision(group: Group, formats: Mapping[Component, Precision]) -> Precision:
    """The coarsest format among the graphs that a case runs; a decoder case looks its embeddings up as well."""
    order = list(Precision)
    used = {
        Group.VISION: [Component.VISION],
        Group.SPEECH: [Component.SPEECH],
        Group.EMBEDDING: [Component.EMBEDDING],
        Group.DECODER: [Component.EMBEDDING, Component.DECODER],
        Group.CHAIN: list(Component),
    }[group]
    return max((formats[component] for component in used if component in formats), key=order.index)


def graph_precision(model: onnx.ModelProto) -> Precision:
    """The fewest `bits` of any quantized operator, float16 if any weight or border has that type, else float32."""
    import onnx

    bits = [
        attribute.i for node in all_nodes(model.graph) for attribute in node.attribute if attribute.name == "bits"
    ]  # MatMulNBits and GatherBlockQuantized; no operator of the default domain has an attribute of that name
    if bits:
        return BITS[min(bits)]
    borders = [*model.graph.input, *model.graph.output]
    types = {value.type.tensor_type.elem_type for value in borders}
    types |= {tensor.data_type for tensor in model.graph.initializer}
    narrow = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    return Precision.FP16 if types & narrow else Precision.FP32
