"""Every JSON and tokenizer file of a package, in memory, from a checkpoint's small files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.package.tokenizer import tokenizer_files
from phi4mm_export.spec.contract import Component, FloatType, PackageLayout, Provider
from phi4mm_export.spec.genai import CONFIG_FILE
from phi4mm_export.spec.json_text import json_bytes, read_object
from phi4mm_export.spec.model import ModelConfig, Role
from phi4mm_export.spec.on_disk import is_entry
from phi4mm_export.spec.phi4mm_config import (
    GraphNames,
    choose_max_length,
    kv_bytes_per_token,
    phi4mm_genai_config,
)
from phi4mm_export.spec.processors import (
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
    SPEECH_PROCESSOR_FILE,
    VISION_PROCESSOR_FILE,
    ProcessorValues,
    merged_preprocessor,
    processor_values,
    speech_processor,
    vision_processor,
)
from phi4mm_export.spec.tokens import NamedJson, TokenIds, choose_token_ids

GENERATION_FILE = "generation_config.json"
MODEL_FILE = "config.json"


@dataclass(frozen=True)
class ConfigOptions:
    """What a user chooses about the configuration files.

    `float_type` is that of the key-value cache, None follows the provider; `memory_budget` is in bytes and covers
    the cache of one sequence; `adapters` are the roles whose .onnx_adapter files the package carries;
    `original_audio_limit` restores the runtime's cut of clips at 30 s.
    """

    layout: PackageLayout = PackageLayout.FLAT
    provider: Provider = Provider.CPU
    float_type: FloatType | None = None
    max_length: int | None = None
    memory_budget: int | None = None
    adapters: tuple[Role, ...] = ()
    release_arena: bool = False
    original_audio_limit: bool = False

    @property
    def cache_type(self) -> FloatType:
        """Element type of the key-value cache."""
        return self.float_type or self.provider.float_type


@dataclass(frozen=True)
class PackageConfigs:
    """`files`: path in the package -> bytes, in the order of writing; the figures are those of one sequence."""

    files: Mapping[str, bytes]
    max_length: int
    kv_bytes_per_token: int
    warnings: tuple[str, ...]

    @property
    def kv_cache_nbytes(self) -> int:
        """Bytes that the runtime reserves for `max_length` tokens of one sequence, before the first is read."""
        return self.max_length * self.kv_bytes_per_token


def package_configs(checkpoint: Path, config: ModelConfig, options: ConfigOptions) -> PackageConfigs:
    """The configuration and tokenizer files of a package exported from a checkpoint's folder.

    Raises CheckpointError for unusable files of the checkpoint, UsageError and SystemLimitError for a length that
    the model or the budget does not allow.
    """
    tokenizer = tokenizer_files(checkpoint, vocab_size=config.vocab_size)
    runtime = runtime_configs(checkpoint, config, options, special=tokenizer.special)
    return PackageConfigs(
        files={**runtime.files, **tokenizer.files},
        max_length=runtime.max_length,
        kv_bytes_per_token=runtime.kv_bytes_per_token,
        warnings=(*tokenizer.warnings, *runtime.warnings),
    )


def runtime_configs(
    checkpoint: Path,
    config: ModelConfig,
    options: ConfigOptions,
    *,
    special: Mapping[str, int],
    graphs: Mapping[Component, GraphNames] | None = None,
    share_cache: bool = True,
) -> PackageConfigs:
    """genai_config.json and the two processor files; `special` maps the tokenizer's added tokens to ids.

    `graphs` describes graphs with other files and names than our layouts have, `share_cache` whether their decoder
    takes one buffer as past and present. Raises as `package_configs`.
    """
    values, warnings = read_processor_values(checkpoint, time_reduction=config.audio.time_reduction)
    length = choose_max_length(
        config, options.cache_type, max_length=options.max_length, budget_nbytes=options.memory_budget
    )
    genai = phi4mm_genai_config(
        config,
        tokens=read_token_ids(checkpoint, special, vocab_size=config.vocab_size),
        layout=options.layout,
        provider=options.provider,
        max_length=length,
        adapters=options.adapters,
        release_arena=options.release_arena,
        graphs=graphs,
        share_cache=share_cache,
    )
    documents = {CONFIG_FILE: genai, VISION_PROCESSOR_FILE: vision_processor(values)}
    if graphs is None or Component.SPEECH in graphs:
        limit = options.original_audio_limit
        documents[SPEECH_PROCESSOR_FILE] = speech_processor(values, original_audio_limit=limit)
    return PackageConfigs(
        files={name: json_bytes(document) for name, document in documents.items()},
        max_length=length,
        kv_bytes_per_token=kv_bytes_per_token(config, options.cache_type),
        warnings=warnings,
    )


def read_token_ids(checkpoint: Path, special: Mapping[str, int], *, vocab_size: int) -> TokenIds:
    """Stop, pad and begin ids, by the precedence of `choose_token_ids`. Raises CheckpointError."""
    generation = None
    if is_entry(checkpoint / GENERATION_FILE):
        generation = NamedJson(GENERATION_FILE, read_object(checkpoint / GENERATION_FILE))
    model = NamedJson(MODEL_FILE, read_object(checkpoint / MODEL_FILE))
    return choose_token_ids(special, generation=generation, model=model, vocab_size=vocab_size)


def read_processor_values(checkpoint: Path, *, time_reduction: int) -> tuple[ProcessorValues, tuple[str, ...]]:
    """What preprocessor_config.json, else processor_config.json, states; with neither, the published values and a
    warning. Raises CheckpointError.
    """
    if is_entry(checkpoint / PREPROCESSOR_FILE):
        body, where = read_object(checkpoint / PREPROCESSOR_FILE), PREPROCESSOR_FILE
    elif is_entry(checkpoint / PROCESSOR_FILE):
        body, where = merged_preprocessor(read_object(checkpoint / PROCESSOR_FILE)), PROCESSOR_FILE
    else:
        remark = f"the checkpoint has no {PREPROCESSOR_FILE}: images and audio are prepared as for the original model"
        return ProcessorValues(audio_compression_rate=time_reduction), (remark,)
    return processor_values(body, where=where, time_reduction=time_reduction), ()
