"""genai_config.json, the file that tells ONNX Runtime GenAI what a package holds: a builder for any model type.

Key order is that of the published packages. What the phi4mm export writes with it is in `spec/phi4mm_config.py`.
Source of keys and defaults: the configuration reference of onnxruntime-genai, and version 0.18 run on toy packages.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from phi4mm_export.spec.json_text import json_bytes
from phi4mm_export.spec.on_disk import is_folder

CONFIG_FILE = "genai_config.json"
RUNTIME_TYPES: Mapping[str, str] = {"phi4mm": "phi4mm", "phi4_multimodal": "phi4mm"}
"""Model types of checkpoints whose name in the runtime is another one; other types keep theirs."""
SHARED_CACHE_TYPES = frozenset({"phi4mm"})
"""Runtime types whose decoders take one buffer as past and present cache."""
TYPES_WITHOUT_POSITIONS = frozenset({"phi4mm"})
"""Runtime types whose decoders compute positions themselves: no `position_ids` input."""


class PackageKind(StrEnum):
    """What a package can take besides text."""

    DECODER_ONLY = "decoder-only"
    VISION_LANGUAGE = "vision-language"
    SPEECH = "speech"
    MULTIMODAL = "multimodal"


def package_kind(components: Iterable[str]) -> PackageKind:
    """The kind of a package that holds these graphs ("vision", "speech", "embedding", ...).

    A vision tower counts only together with the embedding graph that merges its features.
    """
    held = set(components)
    vision, speech = {"vision", "embedding"} <= held, "speech" in held
    if vision:
        return PackageKind.MULTIMODAL if speech else PackageKind.VISION_LANGUAGE
    return PackageKind.SPEECH if speech else PackageKind.DECODER_ONLY


@dataclass(frozen=True)
class _Tower:
    """The vision or the speech section."""

    filename: str
    config_filename: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    extra: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        return {
            "filename": self.filename,
            "config_filename": self.config_filename,
            "inputs": dict(self.inputs),
            "outputs": dict(self.outputs),
            **self.extra,
        }


class GenaiConfigGenerator:
    """Builds a genai_config.json of any model type.

    Every `with_*` call returns the generator, so calls chain; `generate` changes nothing and may be called again.
    Token ids become keys of `model` only when given. Towers make the decoder take `inputs_embeds` instead of
    `input_ids` and bring an embedding graph, whose inputs follow the towers.
    """

    def __init__(
        self,
        model_type: str,
        *,
        vocab_size: int,
        hidden_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        context_length: int = 4096,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        self.model_type = RUNTIME_TYPES.get(model_type, model_type)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.context_length = context_length
        self.bos_token_id = bos_token_id
        self.eos_token_id = copy.copy(eos_token_id)
        self.pad_token_id = pad_token_id
        self._decoder: dict[str, Any] = {}
        self._vision: _Tower | None = None
        self._speech: _Tower | None = None
        self._embedding: dict[str, Any] = {}
        self._placeholders: dict[str, int] = {}
        self._provider_options: list[dict[str, dict[str, str]]] = []
        self._search: dict[str, Any] = {}

    @property
    def kind(self) -> PackageKind:
        """What the config describes so far."""
        held = {"vision", "embedding"} if self._vision else set()
        return package_kind(held | ({"speech"} if self._speech else set()))

    def with_vision(
        self,
        *,
        image_token_id: int | None = None,
        filename: str = "vision/model.onnx",
        embedding_filename: str = "embedding/model.onnx",
        spatial_merge_size: int | None = 2,
        config_filename: str = "processor_config.json",
        input_names: Mapping[str, str] | None = None,
        output_names: Mapping[str, str] | None = None,
        embedding_input_names: Mapping[str, str] | None = None,
        embedding_output_names: Mapping[str, str] | None = None,
    ) -> Self:
        """Add a vision tower and the embedding graph. Names map the runtime's key to the graph's tensor.

        `spatial_merge_size=None` leaves that key out. `embedding_input_names` replaces the inputs that would
        otherwise follow the enabled towers.
        """
        self._vision = _Tower(
            filename,
            config_filename,
            dict(_same("pixel_values", "image_grid_thw") if input_names is None else input_names),
            dict(_same("image_features") if output_names is None else output_names),
            {} if spatial_merge_size is None else {"spatial_merge_size": spatial_merge_size},
        )
        self._embedding["filename"] = embedding_filename
        self._set_embedding_names(embedding_input_names, embedding_output_names)
        if image_token_id is not None:
            self._placeholders["image_token_id"] = image_token_id
        return self

    def with_speech(
        self,
        *,
        audio_token_id: int | None = None,
        filename: str = "speech/model.onnx",
        config_filename: str = "speech_processor.json",
        input_names: Mapping[str, str] | None = None,
        output_names: Mapping[str, str] | None = None,
    ) -> Self:
        """Add a speech tower; alone it brings the embedding graph under its usual name."""
        defaults = {
            "audio_embeds": "audio_embeds",
            "attention_mask": "audio_attention_mask",
            "audio_sizes": "audio_sizes",
            "audio_projection_mode": "audio_projection_mode",
        }
        self._speech = _Tower(
            filename,
            config_filename,
            dict(defaults if input_names is None else input_names),
            dict(_same("audio_features") if output_names is None else output_names),
            {},
        )
        if audio_token_id is not None:
            self._placeholders["audio_token_id"] = audio_token_id
        return self

    def with_decoder(
        self,
        *,
        filename: str | None = None,
        input_names: Mapping[str, str] | None = None,
        output_names: Mapping[str, str] | None = None,
    ) -> Self:
        """Replace the decoder's file name, inputs or outputs; what is None follows the towers as usual."""
        given = {"filename": filename, "inputs": input_names, "outputs": output_names}
        self._decoder |= {key: copy.copy(value) for key, value in given.items() if value is not None}
        return self

    def with_provider(self, name: str, options: Mapping[str, str] | None = None) -> Self:
        """Append an execution provider. The runtime takes strings only as option values, `"0"` and not 0."""
        self._provider_options.append({name: {key: str(value) for key, value in (options or {}).items()}})
        return self

    def with_search(self, **values: Any) -> Self:
        """Replace values of the `search` section, such as `max_length` or `past_present_share_buffer`."""
        self._search |= values
        return self

    def generate(self) -> dict[str, Any]:
        """The config as a new dictionary."""
        model: dict[str, Any] = {}
        if self.bos_token_id is not None:
            model["bos_token_id"] = self.bos_token_id
        model["context_length"] = self.context_length
        model["decoder"] = self._decoder_section()
        if self._vision is not None:
            model["vision"] = self._vision.as_json()
        if self._speech is not None:
            model["speech"] = self._speech.as_json()
        if self._has_towers:
            model["embedding"] = self._embedding_section()
        if self.eos_token_id is not None:
            model["eos_token_id"] = copy.copy(self.eos_token_id)
        if self.pad_token_id is not None:
            model["pad_token_id"] = self.pad_token_id
        model["type"] = self.model_type
        model["vocab_size"] = self.vocab_size
        model |= self._placeholders
        return {"model": model, "search": self._search_section()}

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the config to a .json file, or as genai_config.json into a folder; returns the file's path."""
        target = Path(path)
        if is_folder(target) or target.suffix != ".json":
            target = target / CONFIG_FILE
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.tmp")
        try:
            beside.unlink(missing_ok=True)  # nothing is written through a link that lies there
            with beside.open("xb") as file:
                file.write(json_bytes(self.generate()))
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
        return target

    @property
    def _has_towers(self) -> bool:
        return self._vision is not None or self._speech is not None

    def _set_embedding_names(self, inputs: Mapping[str, str] | None, outputs: Mapping[str, str] | None) -> None:
        for key, names in (("inputs", inputs), ("outputs", outputs)):
            if names is not None:
                self._embedding[key] = dict(names)
            else:
                self._embedding.pop(key, None)

    def _decoder_section(self) -> dict[str, Any]:
        inputs = _same("inputs_embeds" if self._has_towers else "input_ids", "attention_mask")
        if self.model_type not in TYPES_WITHOUT_POSITIONS:
            inputs["position_ids"] = "position_ids"
        inputs |= {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
        outputs = {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        }
        return {
            "session_options": {
                "log_id": "onnxruntime-genai",
                "provider_options": copy.deepcopy(self._provider_options),
            },
            "filename": self._decoder.get("filename", "model/model.onnx" if self._has_towers else "model.onnx"),
            "head_size": self.head_dim,
            "hidden_size": self.hidden_size,
            "inputs": dict(self._decoder.get("inputs", inputs)),
            "outputs": dict(self._decoder.get("outputs", outputs)),
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
        }

    def _embedding_section(self) -> dict[str, Any]:
        inputs = _same("input_ids")
        if self._vision is not None:
            inputs["image_features"] = "image_features"
        if self._speech is not None:
            inputs["audio_features"] = "audio_features"
        return {
            "filename": self._embedding.get("filename", "embedding/model.onnx"),
            "inputs": dict(self._embedding.get("inputs", inputs)),
            "outputs": dict(self._embedding.get("outputs", _same("inputs_embeds"))),
        }

    def _search_section(self) -> dict[str, Any]:
        greedy = {
            "diversity_penalty": 0.0,
            "do_sample": False,
            "early_stopping": True,
            "length_penalty": 1.0,
            "max_length": self.context_length,
            "min_length": 0,
            "no_repeat_ngram_size": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": self.model_type in SHARED_CACHE_TYPES,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        }
        return greedy | self._search


def _same(*names: str) -> dict[str, str]:
    """Keys whose tensors carry the key's own name."""
    return {name: name for name in names}
