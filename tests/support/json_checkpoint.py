"""The small files of a checkpoint whose dimensions are those of `stub_graphs`; no weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.stub_graphs import HEAD_DIM, HIDDEN, VOCAB

SPECIAL = {
    "<|endoftext|>": 199999,
    "<|endoftext10|>": 200010,
    "<|endoftext11|>": 200011,
    "<|assistant|>": 200019,
    "<|end|>": 200020,
    "<|user|>": 200021,
    "<|system|>": 200022,
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """The 256 letters that a byte-level BPE writes for bytes, in the order of the real vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + number) for number in range(len(rest))]


def model_config() -> dict[str, Any]:
    """config.json in the original layout."""
    return {
        "model_type": "phi4mm",
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 1.0,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "sliding_window": 262144,
        "bos_token_id": 199999,
        "eos_token_id": 199999,
        "pad_token_id": 199999,
        "audio_processor": {
            "name": "cascades",
            "config": {
                "attention_dim": 64,
                "attention_heads": 4,
                "linear_units": 96,
                "num_blocks": 1,
                "kernel_size": 3,
                "nemo_conv_settings": {"conv_channels": 32},
                "relative_attention_bias_args": {"t5_bias_max_distance": 500, "type": "t5"},
                "time_reduction": 8,
            },
        },
        "embd_layer": {"embedding_cls": "image_audio"},
    }


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: byte-level BPE without merges."""
    added = [
        {"id": number, "content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        for token, number in SPECIAL.items()
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(byte_letters())}, "merges": []},
    }


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json."""
    decoder = {str(number): {"content": token, "special": True} for token, number in SPECIAL.items()}
    return {"added_tokens_decoder": decoder, "tokenizer_class": "GPT2TokenizerFast", "chat_template": TEMPLATE}


def write_checkpoint(folder: Path) -> Path:
    """Every small file of the checkpoint."""
    folder.mkdir(parents=True)
    documents = {
        "config.json": model_config(),
        "generation_config.json": {"bos_token_id": 199999, "eos_token_id": [200020, 199999], "pad_token_id": 199999},
        "preprocessor_config.json": {"dynamic_hd": 36, "audio_compression_rate": 8, "audio_downsample_rate": 1},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config(),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return folder


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Apply a change to a JSON file."""
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
