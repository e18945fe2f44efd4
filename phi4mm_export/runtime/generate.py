"""Greedy text generation with onnxruntime-genai, on the CPU or on CUDA device 0.

What og 0.18 does not do for phi4mm is done here: a new start with the whole sequence when its length crosses the
LongRoPE switch (keys cached before it were rotated with the short factors), and a cache no larger than the request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phi4mm_export.errors import PackageError, SystemLimitError, UsageError
from phi4mm_export.runtime.ort import GATED_GENAI_VERSION, genai_version, import_genai
from phi4mm_export.runtime.package import CONFIG_FILE, RunPackage
from phi4mm_export.runtime.processor import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Processor, Request, native_errors
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.json_text import read_object
from phi4mm_export.spec.on_disk import is_file
from phi4mm_export.spec.phi4mm_config import DEVICE_ADVICE

ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
"""A run option whose value names the device, so that it must follow the provider."""

OnText = Callable[[str], None]


@dataclass(frozen=True)
class Generation:
    """One answer. `finish_reason` is "stop" (an end token came) or "length"; `restarts` counts new starts at the
    LongRoPE switch; seconds are wall time."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    prompt_seconds: float
    decode_seconds: float
    restarts: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Speed of the decode steps, the prompt apart; 0 if there was none."""
        steps = len(self.token_ids) - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds > 0 else 0.0


class TextGenerator:
    """One loaded package: processes requests and generates greedily."""

    def __init__(self, package: RunPackage, *, provider: Provider | None = None) -> None:
        """Load the package's four graphs; `provider` replaces what its config asks for.

        Raises SystemLimitError for an og that is too old for a gated decoder, a missing CUDA, or too little memory;
        PackageError for whatever else og refuses, naming the file.
        """
        check_device(package)
        wants_cuda = provider is Provider.CUDA or (provider is None and Provider.CUDA in configured_providers(package))
        genai = import_genai(cuda=wants_cuda)
        _check_version(genai, package)
        self.package, self._genai = package, genai
        with native_errors(package):
            self._model = genai.Model(_config(genai, package, provider))
        with native_errors(package, TOKENIZER_FILE):
            self._tokenizer = genai.Tokenizer(self._model)
        self.processor = Processor(genai, self._model, package)
        self.device = str(self._model.device_type).lower()

    def chat_template(self, messages: str) -> str:
        """The prompt text that the package's chat template makes of a JSON list of messages."""
        with native_errors(self.package):
            return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def generate(
        self,
        request: Request,
        *,
        max_new_tokens: int,
        max_length: int | None = None,
        on_text: OnText | None = None,
    ) -> Generation:
        """The greedy continuation of a processed request.

        `max_length` bounds prompt and answer together (and sizes a shared cache); by default it is what the request
        needs. `on_text` receives the answer piece by piece. Raises UsageError for a prompt that leaves no room.
        """
        prompt = [int(i) for i in request.input_ids]
        limit = self._length_limit(prompt, max_new_tokens, max_length)
        ids, restarts, finish = list(prompt), 0, "length"
        pieces: list[str] = []
        stream = self._tokenizer.create_stream()
        began = first_at = time.perf_counter()
        generator, started_with = self._start(request, ids, limit), len(prompt)
        while len(ids) < limit:
            if self._crosses_switch(started_with, len(ids)):
                del generator  # frees its cache before the next one is made
                generator, started_with = self._start(request, ids, limit), len(ids)
                restarts += 1
            token = self._next_token(generator)
            ids.append(token)
            if len(ids) == len(prompt) + 1:
                first_at = time.perf_counter()
            if token in self.package.eos_token_ids:
                finish = "stop"
                break
            pieces.append(str(stream.decode(token)))
            if on_text is not None and pieces[-1]:
                on_text(pieces[-1])
        return Generation(
            text="".join(pieces),
            token_ids=tuple(ids[len(prompt) :]),
            prompt_tokens=len(prompt),
            finish_reason=finish,
            prompt_seconds=first_at - began,
            decode_seconds=time.perf_counter() - first_at,
            restarts=restarts,
        )

    def _crosses_switch(self, started_with: int, length: int) -> bool:
        """Whether the next run is the first with the long factors, on a cache that holds keys of the short ones."""
        switch = self.package.rope_switch
        return switch is not None and started_with <= switch < length

    def _start(self, request: Request, ids: list[int], limit: int) -> Any:
        """A generator that has been given the whole sequence so far, with the request's pictures and clips."""
        with native_errors(self.package):
            params = self._genai.GeneratorParams(self._model)
            params.set_search_options(max_length=limit, do_sample=False, num_beams=1)
            generator = self._genai.Generator(self._model, params)
            request.named["input_ids"] = np.asarray([ids], np.int32)
            generator.set_inputs(request.named)
        return generator

    def _next_token(self, generator: Any) -> int:
        with native_errors(self.package):
            generator.generate_next_token()
            return int(generator.get_next_tokens()[0])

    def _length_limit(self, prompt: list[int], max_new_tokens: int, max_length: int | None) -> int:
        context = self.package.context_length
        if max_new_tokens < 1:
            raise UsageError(f"expected at least 1 new token, found {max_new_tokens}", where="--max-new-tokens")
        if max_length is not None and not 1 <= max_length <= context:
            raise UsageError(
                f"expected a length from 1 to the package's context length {context:,}, found {max_length:,}",
                where="--max-length",
            )
        limit = min(len(prompt) + max_new_tokens, max_length or context)
        if len(prompt) >= limit:
            raise UsageError(
                f"the prompt has {len(prompt):,} tokens, expected fewer than {limit:,} so that an answer fits",
                where="--prompt",
                fix="shorten it, pass fewer or smaller pictures and clips"
                + (", or raise --max-length" if max_length else ""),
            )
        pad = self.package.model.get("pad_token_id")
        if prompt and prompt[-1] == pad:
            raise UsageError(
                f"the prompt ends with the padding token {pad}, after which the runtime reads the wrong position",
                where="--prompt",
                fix="remove it from the end",
            )
        return limit


def configured_providers(package: RunPackage) -> tuple[str, ...]:
    """The execution providers that the decoder's section names: lower case, without the `ExecutionProvider` ending."""
    return tuple(_provider_name(name) for name, _ in _provider_options(package))


def check_device(package: RunPackage) -> None:
    """Refuse a package that asks for a CUDA device other than 0: reported to die while loading."""
    for name, options in _provider_options(package):
        device = options.get("device_id", "0")
        if str(device) != "0":
            raise PackageError(
                f"expected device_id '0' for {name}, found {device!r}",
                where=f"{CONFIG_FILE}: model.decoder.session_options.provider_options",
                fix=DEVICE_ADVICE.format(device=device),
            )


def uses_template(package: RunPackage) -> bool:
    """Whether the tokenizer files bring a chat template that og reads."""
    folder = package.tokenizer_dir
    if any(is_file(folder / name) for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = read_object(folder / TOKENIZER_CONFIG_FILE, error=PackageError)
    return bool(settings.get("chat_template")) and "tokenizer_class" in settings


def _provider_options(package: RunPackage) -> list[tuple[str, Mapping[str, Any]]]:
    options = package.section(Component.DECODER).get("session_options", {}).get("provider_options", [])
    return [(name, values) for entry in options if isinstance(entry, dict) for name, values in entry.items()]


def _check_version(genai: Any, package: RunPackage) -> None:
    if package.gated and genai_version(genai) < GATED_GENAI_VERSION:
        wanted = ".".join(map(str, GATED_GENAI_VERSION))
        raise SystemLimitError(
            f"expected onnxruntime-genai {wanted} or later, because the package's decoder chooses its adapter from "
            f"input_ids, found {genai.__version__}",
            fix="upgrade what brings it: onnxruntime-genai, or on CUDA onnxruntime-genai-cuda",
        )


def _config(genai: Any, package: RunPackage, provider: Provider | None) -> Any:
    """The package's config with another provider, and the run options that name a device with it."""
    config = genai.Config(str(package.path))
    if provider is None:
        return config
    for component in Component:
        section = package.section(component)
        pinned = section.get("session_options", {}).get("provider_options") or []
        names = [name for entry in pinned for name in entry]
        if component is not Component.DECODER and any(_provider_name(name) != provider for name in names):
            raise PackageError(
                f"expected no provider or {provider}, found {', '.join(names)}, which --ep cannot replace there",
                where=f"{CONFIG_FILE}: model.{component}.session_options.provider_options",
                fix="remove the entry: this part follows the decoder's provider then",
            )
        if ARENA_SHRINKAGE in section.get("run_options", {}):
            options = {ARENA_SHRINKAGE: "gpu:0" if provider is Provider.CUDA else "cpu:0"}
            config.overlay(json.dumps({"model": {component.value: {"run_options": options}}}))
    config.clear_providers()
    if provider is Provider.CUDA:
        config.append_provider(provider.value)
    return config


def _provider_name(name: str) -> str:
    return name.lower().removesuffix("executionprovider")
