"""The four graphs stepped in plain onnxruntime, numpy in and out: what og does, without og.

Parity compares this with og and with PyTorch; calibration takes its activations from here. Letters as in spec/model.py:
B batch, S new tokens, T total tokens, H hidden size, N images or clips.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import PackageError, SystemLimitError
from phi4mm_export.runtime.ort import first_line, import_onnxruntime, native_faults
from phi4mm_export.runtime.package import RunPackage
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.model import AUDIO_TOKEN_ID, IMAGE_TOKEN_ID, Role

Array = NDArray[Any]

ELEMENT_TYPES: Mapping[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}
PROVIDERS = {Provider.CPU: "CPUExecutionProvider", Provider.CUDA: "CUDAExecutionProvider"}
TEXT_MODE, IMAGE_MODE, AUDIO_MODE, BOTH_MODE = 0, 1, 2, 3
"""Values of `audio_projection_mode` as og feeds them; 3 takes the audio tower's vision projection."""
STATE_ENDINGS = (".conv_state", ".recurrent_state")
"""Inputs that og carries from step to step beside keys and values, zeros at first."""


@dataclass(frozen=True)
class DecoderCache:
    """What one decoder call hands to the next: tensors by the decoder's input names, and the tokens they cover."""

    tensors: Mapping[str, Array]
    length: int


class FourGraphs:
    """Sessions over a package's graphs. Floats are cast to what each graph declares; results come as it gives them."""

    def __init__(
        self,
        package: RunPackage,
        *,
        provider: Provider = Provider.CPU,
        threads: int | None = None,
        components: Iterable[Component] = tuple(Component),
    ) -> None:
        """Load the graphs of `components` that the package has.

        `threads`: intra-op threads of each session, None for onnxruntime's own choice.
        Raises PackageError naming the graph that onnxruntime refuses, SystemLimitError if the provider is not there.
        """
        self.package = package
        self._ort = import_onnxruntime(cuda=provider is Provider.CUDA)
        self._faults = native_faults(self._ort)
        if PROVIDERS[provider] not in self._ort.get_available_providers():
            raise SystemLimitError(
                f"expected {PROVIDERS[provider]}, found only {', '.join(self._ort.get_available_providers())}",
                fix="pass --ep cpu, or install 'phi4mm[cuda]'",
            )
        options = self._ort.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        self._sessions: dict[Component, Any] = {}
        for component in components:
            file = package.graph(component)
            if file is not None:
                self._sessions[component] = self._load(str(file), options, PROVIDERS[provider])
        self._inputs = {
            component: {value.name: value for value in session.get_inputs()}
            for component, session in self._sessions.items()
        }
        self._adapters: dict[Role, Any] = {}

    # ------------------------------------------------------------------ the four graphs

    def vision(self, pixel_values: Array, image_attention_mask: Array, image_sizes: Array) -> Array:
        """pixel_values [N, C, 3, 448, 448], mask [N, C, 32, 32], sizes int64 [N, 2] (pixels) -> [image tokens, H]."""
        feeds = {
            "pixel_values": pixel_values,
            "attention_mask": image_attention_mask,
            "image_sizes": image_sizes,
        }
        return self._run_named(Component.VISION, feeds, "image_features")

    def speech(self, audio_embeds: Array, audio_attention_mask: Array, audio_sizes: Array, mode: int) -> Array:
        """audio_embeds [N, frames, 80], mask bool [N, frames], sizes int64 [N] (tokens) -> [audio tokens, H].

        `mode` picks the projection: 2 speech, 3 vision (both kinds of media in one prompt).
        """
        feeds = {
            "audio_embeds": audio_embeds,
            "attention_mask": audio_attention_mask,
            "audio_sizes": audio_sizes,
            "audio_projection_mode": np.array([mode]),
        }
        features = self._run_named(Component.SPEECH, feeds, "audio_features")
        return features.reshape(-1, features.shape[-1])

    def embedding(
        self, input_ids: Array, image_features: Array | None = None, audio_features: Array | None = None
    ) -> Array:
        """input_ids [B, S] with placeholders, features [tokens, H] (None: no rows) -> inputs_embeds [B, S, H]."""
        none = np.zeros((0, self.package.hidden_size), np.float32)
        feeds = {
            "input_ids": input_ids,
            "image_features": none if image_features is None else image_features,
            "audio_features": none if audio_features is None else audio_features,
        }
        return self._run_named(Component.EMBEDDING, feeds, "inputs_embeds")

    def decoder(
        self,
        inputs_embeds: Array,
        attention_mask: Array,
        cache: DecoderCache | None = None,
        *,
        input_ids: Array | None = None,
        role: Role | None = None,
    ) -> tuple[Array, DecoderCache]:
        """One call: inputs_embeds [B, S, H], attention_mask [B, T], the cache of the call before (None at first).

        `input_ids` [B, S] feed a gated decoder; `role` activates that adapter file of a decoder with adapter inputs.
        Returns logits [B, S or 1, V] and the cache for the next call.
        """
        declared = self._inputs[Component.DECODER]
        batch, new = inputs_embeds.shape[:2]
        past = 0 if cache is None else cache.length
        feeds: dict[str, Array] = {
            self._name("inputs_embeds"): inputs_embeds,
            self._name("attention_mask"): attention_mask,
            self._name("position_ids"): np.tile(np.arange(past, past + new), (batch, 1)),
        }
        if input_ids is not None:
            feeds[self._name("input_ids")] = input_ids
        elif self.package.gated:
            raise ValueError("a gated decoder chooses its adapter from input_ids: pass them")
        carried = self._carried()
        feeds |= cache.tensors if cache is not None else {name: _empty_past(declared[name], batch) for name in carried}
        wanted = [self._name("logits"), *carried.values()]
        results = self._run(Component.DECODER, feeds, wanted, self._run_options(role))
        return results[0], DecoderCache(dict(zip(carried, results[1:], strict=True)), past + new)

    # ------------------------------------------------------------------ a whole request

    def features(self, arrays: Mapping[str, Array]) -> tuple[Array | None, Array | None]:
        """Image and audio features of a processed request (og's array names), None for a kind it does not have."""
        image = audio = None
        if "pixel_values" in arrays:
            image = self.vision(arrays["pixel_values"], arrays["image_attention_mask"], arrays["image_sizes"])
        if "audio_embeds" in arrays:
            sizes = arrays["audio_sizes"]
            mask = arrays.get("audio_attention_mask")
            if mask is None:
                mask = np.ones(arrays["audio_embeds"].shape[:2], np.bool_)
            audio = self.speech(arrays["audio_embeds"], mask, sizes, BOTH_MODE if image is not None else AUDIO_MODE)
        return image, audio

    def greedy(
        self, arrays: Mapping[str, Array], max_new_tokens: int, *, stop_ids: Sequence[int] = (), restart: bool = True
    ) -> list[int]:
        """The greedy tokens that follow a processed request (batch 1), an end token included.

        With `restart`, keys cached with the short LongRoPE factors are dropped when the length crosses the switch, and
        the whole sequence is run again, as the original does.
        """
        image, audio = self.features(arrays)
        ids = [int(i) for i in np.asarray(arrays["input_ids"]).reshape(-1)]
        role = role_of(ids)
        cache: DecoderCache | None = None
        tokens: list[int] = []
        switch = self.package.rope_switch if restart else None
        while len(tokens) < max_new_tokens:
            if cache is not None and switch is not None and cache.length <= switch < len(ids):
                cache = None
            done = 0 if cache is None else cache.length
            step = np.asarray([ids[done:]], np.int64)
            embeds = self.embedding(step, *((image, audio) if cache is None else (None, None)))
            mask = np.ones((1, len(ids)), np.int64)
            logits, cache = self.decoder(embeds, mask, cache, input_ids=step, role=role)
            token = int(np.argmax(logits[0, -1].astype(np.float32)))
            tokens.append(token)
            ids.append(token)
            if token in stop_ids:
                break
        return tokens

    # ------------------------------------------------------------------ sessions

    def _load(self, file: str, options: Any, provider: str) -> Any:
        try:
            return self._ort.InferenceSession(file, options, providers=[provider])
        except Exception as err:
            raise self._refused(file.removeprefix(str(self.package.path)).lstrip("/\\"), err) from err

    def _refused(self, name: str, err: Exception) -> PackageError:
        message = first_line(err).replace(str(self.package.path), "")
        return PackageError(f"onnxruntime refuses the graph: {message}", where=name, fix="run: phi4mm validate")

    def _name(self, key: str) -> str:
        return self.package.tensor_name(Component.DECODER, key)

    def _carried(self) -> dict[str, str]:
        """Decoder inputs that an output of the call before feeds, with that output's name."""
        outputs = [value.name for value in self._sessions[Component.DECODER].get_outputs()]
        pairs = [(self._name(f"past_{kind}_names"), self._name(f"present_{kind}_names")) for kind in ("key", "value")]
        prefix, present = pairs[0][0].rpartition(".")[0], pairs[0][1].rpartition(".")[0]
        pairs += [(prefix + ending, present + ending) for ending in STATE_ENDINGS]
        carried: dict[str, str] = {}
        for layer in range(len(outputs)):
            for past, current in pairs:
                if past % layer in self._inputs[Component.DECODER] and current % layer in outputs:
                    carried[past % layer] = current % layer
        return carried

    def _run_named(self, component: Component, feeds: Mapping[str, Array], output: str) -> Array:
        named = {self.package.tensor_name(component, key): value for key, value in feeds.items()}
        return self._run(component, named, [self.package.tensor_name(component, output)])[0]

    def _run(
        self, component: Component, feeds: Mapping[str, Array], outputs: list[str], run_options: Any = None
    ) -> list[Array]:
        session = self._sessions.get(component)
        file = self.package.graph(component)
        if session is None or file is None:
            raise PackageError(f"expected a {component} graph, found none", where="genai_config.json")
        declared = self._inputs[component]
        cast = {
            name: np.ascontiguousarray(value, _element_type(declared[name])) for name, value in feeds.items()
            if name in declared
        }  # fmt: skip
        try:
            return [np.asarray(value) for value in session.run(outputs, cast, run_options)]
        except Exception as err:
            raise self._refused(file.name, err) from err

    def _run_options(self, role: Role | None) -> Any:
        if role is None or role not in self.package.adapters:
            return None
        if role not in self._adapters:
            adapter = self._ort.LoraAdapter()
            adapter.Load(str(self.package.adapters[role]))
            self._adapters[role] = adapter
        options = self._ort.RunOptions()
        options.add_active_adapter(self._adapters[role])
        return options


def role_of(input_ids: Iterable[int]) -> Role | None:
    """The adapter that the original activates: vision for pictures (with or without clips), speech for clips alone."""
    ids = set(input_ids)
    if IMAGE_TOKEN_ID in ids:
        return Role.VISION
    return Role.SPEECH if AUDIO_TOKEN_ID in ids else None


def _element_type(value: Any) -> Any:
    return ELEMENT_TYPES[value.type]


def _empty_past(value: Any, batch: int) -> Array:
    """Zeros for the first call: no past positions for keys and values, a full state for the others."""
    dims = [batch if axis == 0 else dim if isinstance(dim, int) else 0 for axis, dim in enumerate(value.shape)]
    return np.zeros(dims, _element_type(value))
