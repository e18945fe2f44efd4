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

from phi4mm_export.errors import PackageError, SystemLimitError, install_line
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


@dataclass
class SharedCache:
    """og's form with `past_present_share_buffer`: each tensor is input and output of the decoder at once, keys and
    values with `max_length` rows from the start. A call writes into it. `buffers`: onnxruntime values by input name."""

    buffers: Mapping[str, Any]
    length: int = 0


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
                fix=f"pass --ep cpu, or run: {install_line('cuda')}",
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
        declared, carried = self._inputs[Component.DECODER], self._carried()
        feeds = self._decoder_feeds(inputs_embeds, attention_mask, 0 if cache is None else cache.length, input_ids)
        if cache is None:
            feeds |= {name: _zeros(declared[name], inputs_embeds.shape[0], 0) for name in carried}
        else:
            feeds |= cache.tensors
        wanted = [self._name("logits"), *carried.values()]
        results = self._run(Component.DECODER, feeds, wanted, self._run_options(role))
        length = inputs_embeds.shape[1] + (0 if cache is None else cache.length)
        return results[0], DecoderCache(dict(zip(carried, results[1:], strict=True)), length)

    def shared_cache(self, max_length: int, *, batch: int = 1) -> SharedCache:
        """An empty cache for `decoder_shared`, with room for `max_length` tokens."""
        declared = self._inputs[Component.DECODER]
        zeros = {name: _zeros(declared[name], batch, max_length) for name in self._carried()}
        return SharedCache({name: self._ort.OrtValue.ortvalue_from_numpy(value) for name, value in zeros.items()})

    def decoder_shared(
        self,
        inputs_embeds: Array,
        attention_mask: Array,
        cache: SharedCache,
        *,
        input_ids: Array | None = None,
        role: Role | None = None,
    ) -> Array:
        """Like `decoder`, with one buffer for past and present; writes into `cache` and returns the logits."""
        session = self._sessions[Component.DECODER]
        feeds = self._decoder_feeds(inputs_embeds, attention_mask, cache.length, input_ids)
        binding = session.io_binding()
        for name, value in self._cast(Component.DECODER, feeds).items():
            binding.bind_cpu_input(name, value)
        for past, present in self._carried().items():
            binding.bind_ortvalue_input(past, cache.buffers[past])
            binding.bind_ortvalue_output(present, cache.buffers[past])
        for name, value in self._adapter_values(role).items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output(self._name("logits"))
        try:
            session.run_with_iobinding(binding)
        except self._faults as err:
            raise self._refused(str(self.package.section(Component.DECODER)["filename"]), err) from err
        cache.length += inputs_embeds.shape[1]
        return np.asarray(binding.get_outputs()[-1].numpy())  # in the order of binding

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
        self,
        arrays: Mapping[str, Array],
        max_new_tokens: int,
        *,
        stop_ids: Sequence[int] = (),
        restart: bool = True,
        share_cache: bool = False,
    ) -> list[int]:
        """The greedy tokens that follow a processed request (batch 1), an end token included.

        With `restart`, keys cached with the short LongRoPE factors are dropped when the length crosses the switch, and
        the whole sequence is run again, as the original does. `share_cache`: one buffer for past and present.
        """
        features = self.features(arrays)
        ids = [int(i) for i in np.asarray(arrays["input_ids"]).reshape(-1)]
        role, end = role_of(ids), len(ids) + max_new_tokens
        switch = self.package.rope_switch if restart else None
        tokens: list[int] = []
        cache: DecoderCache | SharedCache | None = None
        while len(ids) < end:
            if cache is not None and switch is not None and cache.length <= switch < len(ids):
                cache = None
            step = np.asarray([ids[0 if cache is None else cache.length :]], np.int64)
            embeds = self.embedding(step, *(features if cache is None else (None, None)))
            mask = np.ones((1, len(ids)), np.int64)
            if share_cache:
                cache = cache if isinstance(cache, SharedCache) else self.shared_cache(end)
                logits = self.decoder_shared(embeds, mask, cache, input_ids=step, role=role)
            else:
                grown = cache if isinstance(cache, DecoderCache) else None
                logits, cache = self.decoder(embeds, mask, grown, input_ids=step, role=role)
            tokens.append(int(np.argmax(logits[0, -1].astype(np.float32))))
            ids.append(tokens[-1])
            if tokens[-1] in stop_ids:
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

    def _decoder_feeds(
        self, inputs_embeds: Array, attention_mask: Array, past: int, input_ids: Array | None
    ) -> dict[str, Array]:
        if input_ids is None and self.package.gated:
            raise ValueError("a gated decoder chooses its adapter from input_ids: pass them")
        batch, new = inputs_embeds.shape[:2]
        feeds: dict[str, Array] = {
            self._name("inputs_embeds"): inputs_embeds,
            self._name("attention_mask"): attention_mask,
            self._name("position_ids"): np.tile(np.arange(past, past + new), (batch, 1)),
        }
        return feeds if input_ids is None else feeds | {self._name("input_ids"): input_ids}

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
        cast = self._cast(component, feeds)
        try:
            return [np.asarray(value) for value in session.run(outputs, cast, run_options)]
        except Exception as err:
            raise self._refused(file.name, err) from err

    def _cast(self, component: Component, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The feeds that the graph declares, in its element types."""
        declared = self._inputs[component]
        return {
            name: np.ascontiguousarray(value, ELEMENT_TYPES[declared[name].type])
            for name, value in feeds.items()
            if name in declared
        }

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

    def _adapter_values(self, role: Role | None) -> Mapping[str, Any]:
        """The tensors of an adapter file by input name: with bound inputs onnxruntime ignores active adapters."""
        if role is None or role not in self.package.adapters:
            return {}
        values: Mapping[str, Any] = self._ort.AdapterFormat.read_adapter(
            str(self.package.adapters[role])
        ).get_parameters()
        return values


def role_of(input_ids: Iterable[int]) -> Role | None:
    """The adapter that the original activates: vision for pictures (with or without clips), speech for clips alone."""
    ids = set(input_ids)
    if IMAGE_TOKEN_ID in ids:
        return Role.VISION
    return Role.SPEECH if AUDIO_TOKEN_ID in ids else None


def _zeros(value: Any, batch: int, length: int) -> Array:
    """A cache input before the first call: `length` positions of keys and values, or a whole state."""
    dims = [batch if axis == 0 else dim if isinstance(dim, int) else length for axis, dim in enumerate(value.shape)]
    return np.zeros(dims, ELEMENT_TYPES[value.type])
