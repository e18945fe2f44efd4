"""The genai_config.json of a phi4mm package, from a model's dimensions, and what its key-value cache costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phi4mm_export.errors import SystemLimitError, UsageError
from phi4mm_export.spec.contract import FILE_NAMES, Component, FloatType, PackageLayout, Provider
from phi4mm_export.spec.genai import GenaiConfigGenerator
from phi4mm_export.spec.model import ModelConfig, Role
from phi4mm_export.spec.processors import SPEECH_PROCESSOR_FILE, VISION_PROCESSOR_FILE
from phi4mm_export.spec.tokens import TokenIds

ADAPTER_FILES: Mapping[Role, str] = {
    Role.VISION: "phi-4-mm-vision.onnx_adapter",
    Role.SPEECH: "phi-4-mm-speech.onnx_adapter",
}
ITEM_NBYTES: Mapping[FloatType, int] = {FloatType.FLOAT16: 2, FloatType.FLOAT32: 4}
PROVIDER_NAMES: Mapping[str, Provider] = {
    "cpu": Provider.CPU,
    "cuda": Provider.CUDA,
    "cpuexecutionprovider": Provider.CPU,
    "cudaexecutionprovider": Provider.CUDA,
}
"""Accepted spellings, lower case; "gpu" is none of them: the runtime refuses it at load."""


@dataclass(frozen=True)
class GraphNames:
    """One graph of a package: its file, and the tensors behind the runtime's keys."""

    filename: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


OFFICIAL_NAMES: Mapping[Component, tuple[Mapping[str, str], Mapping[str, str]]] = {
    Component.DECODER: (
        {
            "inputs_embeds": "inputs_embeds",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    ),
    Component.VISION: (
        {
            "pixel_values": "pixel_values",
            "attention_mask": "image_attention_mask",
            "image_sizes": "image_sizes",
        },
        {"image_features": "image_features"},
    ),
    Component.SPEECH: (
        {
            "audio_embeds": "audio_embeds",
            "attention_mask": "audio_attention_mask",
            "audio_sizes": "audio_sizes",
            "audio_projection_mode": "audio_projection_mode",
        },
        {"audio_features": "audio_features"},
    ),
    Component.EMBEDDING: (
        {
            "input_ids": "input_ids",
            "image_features": "image_features",
            "audio_features": "audio_features",
        },
        {"inputs_embeds": "inputs_embeds"},
    ),
}
"""Inputs and outputs of the official graphs: the runtime's key -> the graph's tensor."""


def official_graphs(layout: PackageLayout) -> dict[Component, GraphNames]:
    """The four graphs of our own packages."""
    return {component: GraphNames(FILE_NAMES[layout][component], *OFFICIAL_NAMES[component]) for component in Component}


def phi4mm_genai_config(
    config: ModelConfig,
    *,
    tokens: TokenIds,
    layout: PackageLayout = PackageLayout.FLAT,
    provider: Provider = Provider.CPU,
    max_length: int | None = None,
    adapters: tuple[Role, ...] = (),
    release_arena: bool = False,
    graphs: Mapping[Component, GraphNames] | None = None,
    share_cache: bool = True,
) -> dict[str, Any]:
    """The genai_config.json of a phi4mm package; `max_length` None is the model's context length.

    A gated decoder needs no key of its own: onnxruntime-genai feeds `input_ids` and the recurrent state by their
    default names. `adapters` names the roles whose .onnx_adapter file the package carries. `release_arena` gives
    the memory of a tower back after each of its runs; the device it names follows the provider. `graphs` replaces
    the files and names of `layout`; without a speech graph the runtime is told that there is none.
    Raises UsageError for a `max_length` outside 1 .. context length.
    """
    context = config.rope.max_positions
    length = context if max_length is None else checked_max_length(config, max_length)
    parts = official_graphs(layout) if graphs is None else graphs
    vision, embedding, decoder = parts[Component.VISION], parts[Component.EMBEDDING], parts[Component.DECODER]
    generator = GenaiConfigGenerator(
        "phi4mm",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        context_length=context,
        bos_token_id=tokens.bos,
        eos_token_id=list(tokens.eos),
        pad_token_id=tokens.pad,
    )
    generator.with_decoder(filename=decoder.filename, input_names=decoder.inputs, output_names=decoder.outputs)
    generator.with_search(max_length=length, past_present_share_buffer=share_cache)
    generator.with_vision(
        filename=vision.filename,
        embedding_filename=embedding.filename,
        spatial_merge_size=None,
        config_filename=VISION_PROCESSOR_FILE,
        input_names=vision.inputs,
        output_names=vision.outputs,
        embedding_input_names=embedding.inputs,
        embedding_output_names=embedding.outputs,
    )
    speech = parts.get(Component.SPEECH)
    if speech is not None:
        generator.with_speech(
            filename=speech.filename,
            config_filename=SPEECH_PROCESSOR_FILE,
            input_names=speech.inputs,
            output_names=speech.outputs,
        )
    if provider is Provider.CUDA:
        generator.with_provider("cuda", {"device_id": "0"})
    document = generator.generate()
    document["model"] = _with_options(document["model"], provider, adapters, release_arena=release_arena)
    return document


def _with_options(
    model: Mapping[str, Any], provider: Provider, adapters: tuple[Role, ...], *, release_arena: bool
) -> dict[str, Any]:
    """`model` with what the options add to the towers' sections, in the published order of keys."""
    device = "gpu:0" if provider is Provider.CUDA else "cpu:0"
    result: dict[str, Any] = {}
    for key, section in model.items():
        if key == "embedding" and "speech" not in model:
            result["speech"] = {"filename": "", "config_filename": ""}
        if key in tuple(Role) and Role(key) in adapters:
            names = {"filename": section["filename"], "config_filename": section["config_filename"]}
            section = {**names, "adapter_filename": ADAPTER_FILES[Role(key)], **section}
        if key in tuple(Role) and release_arena:
            section = {**section, "run_options": {"memory.enable_memory_arena_shrinkage": device}}
        result[key] = section
    return result


def parse_provider(name: str) -> Provider:
    """The provider of a name: cpu, cuda, CPUExecutionProvider, CUDAExecutionProvider. Raises UsageError otherwise."""
    provider = PROVIDER_NAMES.get(name.lower())
    if provider is None:
        known = "cpu, cuda, CPUExecutionProvider, CUDAExecutionProvider"
        raise UsageError(
            f"unknown execution provider {name!r}; known are {known}", where="--ep", fix="pass one of these"
        )
    return provider


DEVICE_ADVICE = "keep device 0 and choose the GPU with CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={device}"


def check_device(device_id: int, *, where: str = "--device-id") -> None:
    """Refuse every device but 0: the runtime is reported to die while loading on another. Raises UsageError."""
    if device_id != 0:
        raise UsageError(
            f"device {device_id} cannot be used; expected 0, the only CUDA device on which ONNX Runtime GenAI loads",
            where=where,
            fix=DEVICE_ADVICE.format(device=max(device_id, 0)),
        )


def kv_bytes_per_token(config: ModelConfig, float_type: FloatType) -> int:
    """Bytes of key and value cache per token of `max_length`: 2 x layers x KV heads x head size x item size."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * ITEM_NBYTES[float_type]


def largest_max_length(config: ModelConfig, float_type: FloatType, budget_nbytes: int) -> int:
    """The largest `max_length` whose cache fits the budget, at most the context length; 0 if not one token does."""
    return min(budget_nbytes // kv_bytes_per_token(config, float_type), config.rope.max_positions)


def checked_max_length(config: ModelConfig, max_length: int) -> int:
    """`max_length` itself. Raises UsageError if it is below 1 or above the model's context length."""
    context = config.rope.max_positions
    if not 1 <= max_length <= context:
        raise UsageError(
            f"max_length {max_length:,} is out of range; expected 1 to {context:,}, the model's context length",
            where="--max-length",
            fix=f"pass a number up to {context}",
        )
    return max_length


def choose_max_length(
    config: ModelConfig, float_type: FloatType, *, max_length: int | None, budget_nbytes: int | None
) -> int:
    """The `search.max_length` of a package: the wish, else the largest that fits the budget, else the context length.

    Raises UsageError for a wish out of range; SystemLimitError, naming the largest that fits, if the wish or even
    one token exceeds the budget.
    """
    wish = None if max_length is None else checked_max_length(config, max_length)
    if budget_nbytes is None:
        return config.rope.max_positions if wish is None else wish
    fits = largest_max_length(config, float_type, budget_nbytes)
    each = kv_bytes_per_token(config, float_type)
    if fits < (1 if wish is None else wish):
        asked = f"max_length {wish:,} needs {wish * each:,} bytes" if wish else f"one token needs {each:,} bytes"
        raise SystemLimitError(
            f"{asked} of key-value cache, the budget is {budget_nbytes:,} bytes; "
            f"the largest max_length that fits is {fits:,}",
            where="--memory-budget",
            fix=f"pass --max-length {fits}, or a larger budget" if fits else "pass a larger budget",
        )
    return fits if wish is None else wish
