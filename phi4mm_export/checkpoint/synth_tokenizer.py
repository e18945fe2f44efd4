"""tokenizer.json of a synthetic checkpoint: a byte-level BPE with the real special tokens and a handful of merges.

Every id up to the vocabulary size decodes to something: a hole would stop ONNX Runtime GenAI from loading the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from phi4mm_export.checkpoint.synth_configs import json_text

FIRST_SPECIAL_ID = 199999
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS: dict[int, str] = {
    199999: END_OF_TEXT,
    200010: "<|endoftext10|>",
    200011: "<|endoftext11|>",
    200018: "<|endofprompt|>",
    200019: "<|assistant|>",
    200020: "<|end|>",
    200021: "<|user|>",
    200022: "<|system|>",
    200023: "<|tool|>",
    200024: "<|/tool|>",
    200025: "<|tool_call|>",
    200026: "<|/tool_call|>",
    200027: "<|tool_response|>",
    200028: "<|tag|>",
}
# fmt: off
MERGES = (
    "Ġ t", "h e", "Ġt he", "i n", "e r", "o n", "Ġ a", "r e", "a t", "s t", "e n", "o r", "i s", "Ġ w", "i t", "o u",
    "Ġ s", "a n", "in g", "Ġ i", "Ġ p", "Ġ c", "l l", "a l", "Ġ d", "h at", "W hat", "Ġ is", "Ġa n", "Ġan d",
)
# fmt: on
SPLIT_PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How o200k tokenizers cut text before merging (public, in the tokenizer.json of every such model)."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'system' and m['tools'] %}{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}{% endif %}"
    "{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
TOKEN_FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


def tokenizer_files(vocab_size: int) -> Iterator[tuple[str, str]]:
    """Name and text of tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    added = _added_tokens(vocab_size)
    yield "tokenizer.json", json.dumps(_tokenizer(added), ensure_ascii=False, separators=(",", ":"))
    named = [token for token in added if token["id"] in SPECIAL_TOKENS]
    decoder = {str(token["id"]): {flag: token[flag] for flag in TOKEN_FLAGS} for token in named}
    yield (
        "tokenizer_config.json",
        json_text(
            {
                "add_prefix_space": False,
                "added_tokens_decoder": decoder,
                "bos_token": END_OF_TEXT,
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
                "eos_token": END_OF_TEXT,
                "model_max_length": 131072,
                "pad_token": END_OF_TEXT,
                "tokenizer_class": "GPT2TokenizerFast",
                "unk_token": END_OF_TEXT,
            }
        ),
    )
    roles = ("bos_token", "eos_token", "pad_token", "unk_token")
    yield "special_tokens_map.json", json_text(dict.fromkeys(roles, END_OF_TEXT))


def _tokenizer(added: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Removed", "invert": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _vocabulary(),
            "merges": MERGES,
        },
    }


def _vocabulary() -> dict[str, int]:
    """Bytes, merged pieces, then filler words that encoding never produces, up to the first special id."""
    pieces = [*_byte_letters(), *(pair.replace(" ", "") for pair in MERGES)]
    fillers = (f"Ġw{i}" for i in range(len(pieces), FIRST_SPECIAL_ID))
    return {piece: i for i, piece in enumerate((*pieces, *fillers))}


def _byte_letters() -> list[str]:
    """The letter that stands for each byte, in id order: printable bytes first, as GPT-2's byte-level BPE has it.

    The newline is id 198, as in the real tokenizer.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def _added_tokens(vocab_size: int) -> list[dict[str, Any]]:
    return [
        {
            "id": i,
            "content": SPECIAL_TOKENS.get(i, f"<|extra_{i}|>"),
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i in range(FIRST_SPECIAL_ID, vocab_size)
    ]
