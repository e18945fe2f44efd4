"""Special tokens: the ids that the runtime hard-codes, where generation stops, and what the tokenizer calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phi4mm_export.errors import CheckpointError
from phi4mm_export.spec.json_text import json_kind
from phi4mm_export.spec.model import AUDIO_TOKEN_ID, IMAGE_TOKEN_ID

END_OF_TEXT = "<|endoftext|>"
"""199999 in the real tokenizer: begin, end and padding of a sequence."""
END_OF_TURN = "<|end|>"
"""200020 in the real tokenizer: the end of one message of a conversation."""
PUBLISHED_IDS: Mapping[str, int] = {END_OF_TEXT: 199999, END_OF_TURN: 200020}
"""The two end tokens as the published tokenizer numbers them."""
IMAGE_PLACEHOLDER = "<|endoftext10|>"
AUDIO_PLACEHOLDER = "<|endoftext11|>"
PLACEHOLDERS: Mapping[str, int] = {IMAGE_PLACEHOLDER: IMAGE_TOKEN_ID, AUDIO_PLACEHOLDER: AUDIO_TOKEN_ID}
"""Token -> id; onnxruntime-genai's phi4mm processor hard-codes both ids."""

RUNTIME_TOKENIZER_CLASSES = frozenset(
    {
        "BaichuanTokenizer",
        "ChatGLMTokenizer",
        "CodeGenTokenizer",
        "CodeLlamaTokenizer",
        "DebertaV2Tokenizer",
        "GPT2Tokenizer",
        "GPTNeoXTokenizer",
        "GemmaTokenizer",
        "InternLM2Tokenizer",
        "LlamaTokenizer",
        "MarianTokenizer",
        "Phi3Tokenizer",
        "PreTrainedTokenizer",
        "Qwen2Tokenizer",
        "T5Tokenizer",
        "TokenizersBackend",
        "XLMRobertaTokenizer",
    }
)
"""Values of `tokenizer_class`, with or without "Fast" at the end, with which onnxruntime-genai 0.18 encodes a
byte-level BPE tokenizer.json to the same ids as the tokenizers library does (tried one by one). CLIPTokenizer gives
other ids, WhisperTokenizer drops special tokens from chat templates; others fail: "Unsupported tokenizer class".
"""
SAFE_TOKENIZER_CLASS = "GPT2TokenizerFast"
"""The class that the original checkpoint states."""


def runtime_knows_class(name: object) -> bool:
    """Whether onnxruntime-genai loads a tokenizer of this `tokenizer_class` and gives the right ids."""
    return isinstance(name, str) and (
        name in RUNTIME_TOKENIZER_CLASSES or name.removesuffix("Fast") in RUNTIME_TOKENIZER_CLASSES
    )


@dataclass(frozen=True)
class TokenIds:
    """What a package states: begin of text, the ids that end generation (in the config's order), padding."""

    bos: int
    eos: tuple[int, ...]
    pad: int


@dataclass(frozen=True)
class NamedJson:
    """A parsed JSON file of the checkpoint and the name it has in messages."""

    name: str
    value: Mapping[str, Any]


def choose_token_ids(
    special: Mapping[str, int], *, generation: NamedJson | None, model: NamedJson, vocab_size: int
) -> TokenIds:
    """The stop, pad and begin ids of a package. `special` maps the tokenizer's added tokens to their ids.

    Stop ids: `<|end|>`, then `<|endoftext|>`, as the tokenizer numbers them; then, in ascending order, what else
    generation_config.json lists, or config.json where the former lists none. No id occurs twice. Begin and pad:
    generation_config.json, else config.json, else `<|endoftext|>`.
    Raises CheckpointError, naming file and key, for an id that is no integer or not in 0 .. vocab_size - 1, and if
    neither the tokenizer nor a config tells where a turn ends.
    """
    files = [file for file in (generation, model) if file is not None]
    stated = {key: [_ids(file, f"{key}_token_id", vocab_size) for file in files] for key in ("eos", "bos", "pad")}
    others = next((ids for ids in stated["eos"] if ids), [])
    by_name = [special[token] for token in (END_OF_TURN, END_OF_TEXT) if token in special]
    _check_range(by_name, vocab_size, "tokenizer.json", "added_tokens")
    if END_OF_TURN not in special and len(set(others)) < 2:
        raise CheckpointError(
            f"the tokenizer has no {END_OF_TURN} token and no config lists a second end id; every answer would run on",
            where="tokenizer.json: added_tokens",
            fix=f"restore the original tokenizer, or list the id that ends a turn in {files[0].name}: eos_token_id",
        )
    eos = tuple(dict.fromkeys([*by_name, *sorted(others)]))
    fallback = special.get(END_OF_TEXT, eos[-1])
    return TokenIds(
        bos=next((ids[0] for ids in stated["bos"] if ids), fallback),
        eos=eos,
        pad=next((ids[0] for ids in stated["pad"] if ids), fallback),
    )


def check_placeholders(special: Mapping[str, int], *, where: str) -> None:
    """Raise CheckpointError unless the image and audio placeholders have the ids that the runtime hard-codes."""
    for token, wanted in PLACEHOLDERS.items():
        found = special.get(token)
        if found == wanted:
            continue
        state = f"has the id {found}" if found is not None else "is missing"
        holder = next((name for name, number in special.items() if number == wanted), None)
        also = f" ({wanted} is {holder})" if holder else ""
        raise CheckpointError(
            f"the placeholder {token} {state}, the model and ONNX Runtime GenAI need {wanted}{also}",
            where=f"{where}: {token}",
            fix="restore the original tokenizer files; these two ids cannot be moved",
        )


def _ids(file: NamedJson, key: str, vocab_size: int) -> list[int]:
    """The ids under a key, [] if it is absent or null."""
    value = file.value.get(key)
    if value is None:
        return []
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise CheckpointError(
                f"expected a whole number or a list of them, found {json_kind(entry)} ({entry!r})",
                where=f"{file.name}: {key}",
                fix="write the token's id as a number",
            )
    if isinstance(value, list) and key != "eos_token_id" and len(value) != 1:
        raise CheckpointError(f"expected one id, found {len(value)}", where=f"{file.name}: {key}", fix="keep one id")
    _check_range(entries, vocab_size, file.name, key)
    return list(entries)


def _check_range(ids: list[int], vocab_size: int, file: str, key: str) -> None:
    for number in ids:
        if not 0 <= number < vocab_size:
            raise CheckpointError(
                f"the id {number} lies outside the vocabulary of {vocab_size:,} tokens (0 to {vocab_size - 1:,})",
                where=f"{file}: {key}",
                fix="correct the id, or vocab_size in config.json",
            )
