"""The decoders that bench_decode.py compares: ours and onnxruntime-genai's builder's, of the same synthetic weights."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phi4mm_export.checkpoint.open import Checkpoint, open_checkpoint
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.names import ADAPTED_MODULES

PHI4MM = (sys.executable, "-m", "phi4mm_export")
SMALL_TOWERS = {
    "vision_hidden_size": 64, "vision_intermediate_size": 64, "vision_num_hidden_layers": 2, "audio_attention_dim": 64,
    "audio_attention_heads": 4, "audio_linear_units": 64, "audio_num_blocks": 1, "audio_conv_channels": 16,
}  # fmt: skip
OURS = {
    "none": ("--lora", "merged", "--adapter", "none"),
    "gated": ("--lora", "gated"),
    "branch": ("--lora", "branch", "--adapter", "vision"),
    "none-32": ("--lora", "merged", "--adapter", "none", "--block-size", "32"),
    "none-128": ("--lora", "merged", "--adapter", "none", "--block-size", "128"),
    "none-plain": ("--lora", "merged", "--adapter", "none", "--no-rotate"),
    "none-full-logits": ("--lora", "merged", "--adapter", "none", "--full-logits"),
}
"""Form -> options of `phi4mm export`."""
BUILDERS = {"builder": (), "builder-apart": ("fuse_qkv=false",), "builder-lora": ()}
"""Form -> extra options of the builder; builder-lora has the vision adapter as a branch, as its phi4mm graph does."""
OUR_FILE, BUILDER_FILE = "phi-4-mm-text.onnx", "model.onnx"
BUILDER_DEFAULTS = ("exclude_embeds=true", "accuracy_level=4", "block_size=32")


def made(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made under another name first so that what stands there is complete; used again when it exists."""
    if not path.exists():
        part = path.with_name(path.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        make(part)
        part.rename(path)
    return path


def graph_of(form: str, bits: str, args: argparse.Namespace) -> Path:
    """The graph file of one candidate."""
    checkpoint = made(args.work / "checkpoint", lambda part: synth(part, args))
    if form in OURS:
        words = ["--component", "decoder", "--precision", bits, *OURS[form], *args.export_option, "-q"]
        return made(args.work / f"{form}-{bits}", lambda part: phi4mm("export", checkpoint, "-o", part, *words)) / (
            OUR_FILE
        )
    return made(args.work / f"{form}-{bits}", lambda part: build(part, form, bits, checkpoint, args)) / BUILDER_FILE


def phi4mm(*words: object) -> None:
    """Run a command of ours."""
    subprocess.run([*PHI4MM, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def synth(folder: Path, args: argparse.Namespace) -> None:
    """A checkpoint of the real decoder geometry with --layers layers and small encoders."""
    settings = {**SMALL_TOWERS, "num_hidden_layers": args.layers, **dict(pair.split("=") for pair in args.set)}
    words = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    phi4mm("synth", folder, "--size", "full", *words)


def build(out: Path, form: str, bits: str, checkpoint: Path, args: argparse.Namespace) -> None:
    """onnxruntime-genai's own decoder at its defaults: blocks of 32, accuracy level 4."""
    phi3 = made(args.work / "phi3", lambda part: write_phi3(checkpoint, part))
    extra = [*BUILDER_DEFAULTS, *BUILDERS[form], *args.builder_option]
    if form == "builder-lora":
        extra.append(f"adapter_path={made(args.work / 'peft', lambda part: write_peft(checkpoint, part))}")
    words = ["-m", "onnxruntime_genai.models.builder", "-i", phi3, "-o", out, "-p", bits, "-e", "cpu"]
    words += ["-c", args.work / "builder-cache", "--extra_options", *extra]
    with (args.work / f"{form}-{bits}.log").open("w") as log:
        subprocess.run([sys.executable, *map(str, words)], check=True, stdout=log, stderr=log)


def write_phi3(checkpoint: Path, folder: Path) -> None:
    """The base weights as a Phi-3 text checkpoint, which the model builder and transformers know."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    with open_checkpoint(checkpoint) as opened:
        parts = ("model.layers.", "model.norm.", "model.embed_tokens.")
        weights = {name: source.whole() for name, source in opened.tensors.items() if name.startswith(parts)}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        document = phi3_config(opened)
    (folder / "config.json").write_text(json.dumps(document))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copyfile(checkpoint / name, folder / name)


def phi3_config(opened: Checkpoint) -> dict[str, Any]:
    """config.json of a Phi-3 of the same sizes."""
    config, rope = opened.config, opened.config.rope
    return {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "torch_dtype": "bfloat16",
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps, "tie_word_embeddings": True, "hidden_act": "silu",
        "max_position_embeddings": rope.max_positions, "rope_theta": rope.theta,
        "original_max_position_embeddings": rope.original_max_positions,
        "partial_rotary_factor": rope.rotary_dim / config.head_dim,
        "rope_scaling": {
            "type": "longrope", "short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor),
        },
        "bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999,
    }  # fmt: skip


def write_peft(checkpoint: Path, folder: Path) -> None:
    """The vision adapter as a PEFT folder for that Phi-3."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    with open_checkpoint(checkpoint) as opened:
        pairs = opened.adapters[Role.VISION].pairs
        weights = {}
        for module, pair in pairs.items():
            weights[f"base_model.model.{module}.lora_A.weight"] = pair.a.whole()
            weights[f"base_model.model.{module}.lora_B.weight"] = pair.b.whole()
        save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
        rank, scale = next((pair.rank, pair.scale) for pair in pairs.values())
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": scale * rank, "lora_dropout": 0.0,
        "bias": "none", "target_modules": [module.rpartition(".")[2] for module in ADAPTED_MODULES],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
