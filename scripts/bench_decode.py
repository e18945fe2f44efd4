"""Compare decoders of the same weights in one run: ours, onnxruntime-genai's model builder's, and transformers'.

    python scripts/bench_decode.py WORK_FOLDER [--layers N] [--precision int8 int4] [--forms none gated branch]

A synthetic checkpoint of the real geometry with N layers is made in WORK_FOLDER, its base weights are written again as
a Phi-3 text checkpoint for the builder, and every candidate runs in onnxruntime with one shared cache. Candidates take
turns: in each round one prompt of --prompt tokens, and --steps single tokens after it. `prefill x` and `decode x` say
how many times faster than the builder's graph of the same bits, as the median over rounds of ratios within a round.
The builder runs at its defaults with blocks of 32 and accuracy level 4; --builder-option adds to its extra options.
`none` has no adapter at all, `gated` runs in the text mode, `branch` with the vision adapter beside the weights.
With --sessions N each candidate is loaded N times in rotated order: one pair of sessions cannot resolve 3 percent.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measuring import MIB, Peak, paired_ratio, report, resident, smaps_rollup

from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.runtime.ort import import_onnxruntime

PHI4MM = (sys.executable, "-m", "phi4mm_export")
SMALL_TOWERS = {
    "vision_hidden_size": 64, "vision_intermediate_size": 64, "vision_num_hidden_layers": 2, "audio_attention_dim": 64,
    "audio_attention_heads": 4, "audio_linear_units": 64, "audio_num_blocks": 1, "audio_conv_channels": 16,
}  # fmt: skip
FORMS = {
    "none": ("--lora", "merged", "--adapter", "none"),
    "gated": ("--lora", "gated"),
    "branch": ("--lora", "branch", "--adapter", "vision"),
}
TEXT_FILE = {"ours": "phi-4-mm-text.onnx", "builder": "model.onnx"}
NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


class Decoder:
    """One graph with a cache of [heads, tokens, head size], which lies in one place as past and present."""

    def __init__(self, path: Path, threads: int, cache: tuple[int, int, int]) -> None:
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = {item.name: item for item in self.session.get_inputs()}
        self.caches = {}
        for name, item in self.inputs.items():
            if name.endswith((".key", ".value")):
                self.caches[name] = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, *cache), NUMPY[item.type]))

    def bind(self, tokens: int, past: int) -> Any:
        """Inputs and outputs of a run of `tokens` after `past`."""
        bound = self.session.io_binding()
        random = np.random.default_rng(0)
        for name, item in self.inputs.items():
            kind = NUMPY.get(item.type)
            if name in self.caches:
                bound.bind_ortvalue_input(name, self.caches[name])
            elif name == "attention_mask":
                bound.bind_cpu_input(name, np.ones((1, past + tokens), np.int64))
            elif name == "position_ids":
                bound.bind_cpu_input(name, np.arange(past, past + tokens, dtype=np.int64)[None])
            elif name == "input_ids":
                bound.bind_cpu_input(name, np.full((1, tokens), 9, np.int64))
            elif name == "inputs_embeds":
                bound.bind_cpu_input(name, random.standard_normal((1, tokens, item.shape[2])).astype(kind))
            else:  # the recurrent state of a gated decoder
                bound.bind_cpu_input(name, np.zeros([1, *item.shape[1:]], kind))
        for item in self.session.get_outputs():
            source = item.name.replace("present", "past_key_values")
            if source in self.caches:
                bound.bind_ortvalue_output(item.name, self.caches[source])
            else:
                bound.bind_output(item.name)
        return bound


def cache_shape(args: argparse.Namespace) -> tuple[int, int, int]:
    """Key-value heads, tokens and head size of every candidate's cache."""
    config = json.loads((args.work / "checkpoint" / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_key_value_heads"]), args.prompt + 8, int(head_dim)


def make_checkpoint(folder: Path, args: argparse.Namespace) -> Path:
    """The synthetic checkpoint; one that stands there already is used again."""
    settings = {**SMALL_TOWERS, "num_hidden_layers": args.layers, **dict(pair.split("=") for pair in args.set)}
    if not folder.exists():
        words = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        subprocess.run([*PHI4MM, "synth", folder, "--size", "full", *words], check=True, stdout=subprocess.DEVNULL)
    return folder


def write_phi3(checkpoint: Path, folder: Path) -> Path:
    """The base weights as a Phi-3 text checkpoint, which the model builder and transformers know."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with open_checkpoint(checkpoint) as opened:
        names = [
            name for name in opened.tensors if name.startswith(("model.layers.", "model.norm.", "model.embed_tokens."))
        ]
        save_file(
            {name: opened.tensors[name].whole() for name in names}, folder / "model.safetensors", {"format": "pt"}
        )
        config, rope = opened.config, opened.config.rope
    document = {
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
    (folder / "config.json").write_text(json.dumps(document))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copyfile(checkpoint / name, folder / name)
    return folder


def build_all(args: argparse.Namespace) -> dict[str, Path]:
    """Every candidate's graph: name -> file. Names are FORM/BITS for ours and builder/BITS."""
    checkpoint = make_checkpoint(args.work / "checkpoint", args)
    graphs: dict[str, Path] = {}
    for precision in args.precision:
        for form in args.forms:
            package = args.work / f"{form}-{precision}"
            if not package.exists():
                words = ["export", checkpoint, "-o", package, "--component", "decoder", "--precision", precision]
                words += [*FORMS[form], *args.export_option, "-q"]
                subprocess.run([*PHI4MM, *map(str, words)], check=True)
            graphs[f"{form}/{precision}"] = package / TEXT_FILE["ours"]
        if args.builder:
            graphs[f"builder/{precision}"] = build_with_builder(checkpoint, args, precision)
    return graphs


def build_with_builder(checkpoint: Path, args: argparse.Namespace, precision: str) -> Path:
    """onnxruntime-genai's own decoder at its defaults: blocks of 32, accuracy level 4."""
    work: Path = args.work
    out = work / f"builder-{precision}"
    if not out.exists():
        phi3 = work / "phi3"
        if not phi3.exists():
            write_phi3(checkpoint, phi3)
        words = ["-m", "onnxruntime_genai.models.builder", "-i", phi3, "-o", out, "-p", precision, "-e", "cpu"]
        words += ["-c", work / "builder-cache", "--extra_options", "exclude_embeds=true"]
        words += ["accuracy_level=4", "block_size=32", *args.builder_option]
        subprocess.run([sys.executable, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    return out / TEXT_FILE["builder"]


def transformers_runs(folder: Path, args: argparse.Namespace) -> tuple[Callable[[], object], Callable[[], object]]:
    """Prefill and one step of transformers' eager module in float32 (head included, last position only)."""
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    embeds = torch.randn(1, args.prompt, model.config.hidden_size)

    def prefill() -> Any:
        with torch.inference_mode():
            return model(inputs_embeds=embeds, use_cache=True, logits_to_keep=1)

    cache = prefill().past_key_values

    def step() -> Any:
        with torch.inference_mode():
            found = model(inputs_embeds=embeds[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-1)
        return found

    return prefill, step


def measure(graphs: dict[str, Path], args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds per prompt and per step of every candidate, in rounds; sessions are loaded afresh --sessions times."""
    times: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in graphs}
    for number in range(args.sessions):
        order = rotated(list(graphs), number)
        decoders = {name: Decoder(graphs[name], args.threads, cache_shape(args)) for name in order}
        runs = {name: (one, one.bind(args.prompt, 0), one.bind(1, args.prompt)) for name, one in decoders.items()}
        eager = transformers_runs(args.work / "phi3", args) if args.transformers else None
        for turn in range(-1, args.rounds):
            for name in rotated(order, max(turn, 0)):
                decoder, prompt, step = runs[name]
                run = decoder.session.run_with_iobinding
                measured = (clock(partial(run, prompt), 1), clock(partial(run, step), args.steps))
                if turn >= 0:
                    times[name]["prefill"].append(measured[0])
                    times[name]["decode"].append(measured[1])
            if eager is not None and turn >= 0:
                slot = times.setdefault("transformers/eager", {"prefill": [], "decode": []})
                slot["prefill"].append(clock(eager[0], 1))
                slot["decode"].append(clock(eager[1], max(1, args.steps // 4)))
    return times


def clock(work: Callable[[], object], count: int) -> float:
    """Median seconds of `count` runs."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def rotated(names: list[str], by: int) -> list[str]:
    """The list, begun `by` places later."""
    shift = by % len(names)
    return names[shift:] + names[:shift]


def memory(path: Path, args: argparse.Namespace) -> dict[str, float]:
    """Resident memory of one decoder in a process of its own: after loading, and at the peak of one prompt."""
    words = [
        __file__,
        "--memory-of",
        path,
        "--prompt",
        args.memory_prompt or args.prompt,
        "--threads",
        args.threads,
        args.work,
    ]
    done = subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def print_memory(path: Path, args: argparse.Namespace) -> None:
    """What `memory` reads."""
    decoder = Decoder(path, args.threads, cache_shape(args))
    loaded, share = resident(), smaps_rollup()
    with Peak() as peak:
        decoder.session.run_with_iobinding(decoder.bind(args.prompt, 0))
    found = {
        "loaded anonymous MiB": loaded["anonymous"],
        "loaded file MiB": share["pss_file"],
        "peak MiB": peak.most["peak"],
    }
    print(json.dumps({key: value / MIB for key, value in found.items()}))


def rows_of(graphs: dict[str, Path], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per candidate."""
    import onnx

    times = measure(graphs, args)
    for name, found in times.items():
        row: dict[str, Any] = {"decoder": name}
        base = times.get(f"builder/{name.partition('/')[2]}")
        row |= {
            "prefill tokens/s": args.prompt / statistics.median(found["prefill"]),
            "decode tokens/s": 1 / statistics.median(found["decode"]),
            "prefill x": paired_ratio(base["prefill"], found["prefill"]) if base else float("nan"),
            "decode x": paired_ratio(base["decode"], found["decode"]) if base else float("nan"),
        }
        path = graphs.get(name)
        if path is None:
            row |= {"nodes": 0, "bytes": 0, "loaded anonymous MiB": 0.0, "loaded file MiB": 0.0, "peak MiB": 0.0}
        else:
            row["nodes"] = len(onnx.load(path, load_external_data=False).graph.node)
            row["bytes"] = sum(p.stat().st_size for p in path.parent.glob(f"{path.name}*"))
            row |= memory(path, args)
        yield row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="decoders of the same weights, compared in one run")
    parser.add_argument("work", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for phi4mm synth")
    parser.add_argument("--precision", nargs="+", default=["int8", "int4"])
    parser.add_argument("--forms", nargs="+", choices=sorted(FORMS), default=["none", "gated", "branch"])
    parser.add_argument("--export-option", action="append", default=[], help="added to every export of ours")
    parser.add_argument("--builder-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--builder", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--memory-prompt", type=int, help="tokens of the prompt whose peak memory is measured")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of is not None:
        print_memory(args.memory_of, args)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    graphs = build_all(args)
    facts = {key: getattr(args, key) for key in ("layers", "prompt", "steps", "rounds", "sessions", "threads")}
    report(list(rows_of(graphs, args)), json_file=args.json, markdown=args.markdown, facts=facts)


if __name__ == "__main__":
    main()
