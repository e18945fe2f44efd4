"""Compare the vision and speech graphs with transformers' modules and with a plain torch.onnx export, in one run.

    python scripts/bench_towers.py WORK_FOLDER [--crops 2 5] [--seconds 10] [--rounds N] [--json FILE] [--markdown]

A synthetic checkpoint of the real towers (--vision-layers, --audio-blocks make them shallower) is exported in float32,
and with --precision in other forms; int4 and int8 are float32 rounded by `phi4mm quantize --method rtn`. The
transformers modules have the same sizes and random weights. Candidates take turns; `eager x` and `sdpa x` say how many
times faster ours is than the module, as medians of ratios within a round. The vision module ends at the encoder's
features; ours also pools, arranges and projects them. The speech modules both end with the projection's input, ours
with its output. Memory is that of one run in a process of its own, above the loaded weights.

Disk at full depth: 3.1 GB for the checkpoint, 3.5 for float32 graphs, 1.8 for float16, 0.8 for int4, and 3.5 for
torch.onnx. Needs the extras cpu and reference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from measuring import MIB, Peak, Record, add_report_options, alternating, paired_ratio, resident
from numpy.typing import NDArray

from phi4mm_export.runtime.ort import import_onnxruntime

PHI4MM = (sys.executable, "-m", "phi4mm_export")
GRAPHS = {"vision": "phi-4-mm-vision.onnx", "speech": "phi-4-mm-speech.onnx"}
SMALL_DECODER = {
    "hidden_size": 3072, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 24,
    "num_key_value_heads": 8, "vision_lora_r": 8, "speech_lora_r": 8,
}  # fmt: skip
FRAMES_PER_SECOND, MELS, SIDE, PATCHES = 100, 80, 448, 32
FLOATS, FORMS = ("fp32", "fp16"), ("fp32", "fp16", "int8", "int4")
Feed = dict[str, NDArray[Any]]


def feed(kind: str, amount: float) -> Feed:
    """Inputs of our graph: one image of `amount` crops (the global one included), or one clip of `amount` seconds."""
    random = np.random.default_rng(0)
    if kind == "speech":
        frames = round(amount * FRAMES_PER_SECOND)
        return {
            "audio_embeds": random.standard_normal((1, frames, MELS)).astype(np.float32),
            "audio_attention_mask": np.ones((1, frames), bool),
            "audio_sizes": np.array([-(-frames // 8)], np.int64),
            "audio_projection_mode": np.array([1], np.int64),
        }
    crops = int(amount)
    columns = max(crops - 1, 1)
    pixels = random.standard_normal((1, columns + 1, 3, SIDE, SIDE)).astype(np.float32)
    return {
        "pixel_values": pixels,
        "image_attention_mask": np.ones((1, columns + 1, PATCHES, PATCHES), np.float32),
        "image_sizes": np.array([[SIDE, SIDE * columns]], np.int64),
    }


def session(path: Path, threads: int) -> Any:
    """An onnxruntime session on the CPU."""
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def cast(inputs: Feed, running: Any) -> Feed:
    """The inputs in the element types of a graph."""
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    wanted = {item.name: kinds.get(item.type) for item in running.get_inputs()}
    return {name: values if wanted[name] is None else values.astype(wanted[name]) for name, values in inputs.items()}


def graph_of(kind: str, form: str, args: argparse.Namespace) -> Path:
    """The graph file of one tower; what stands there already is used again."""
    if form not in FLOATS:
        path: Path = args.work / f"{kind}-{form}.onnx"
        if not path.exists():
            words = ["quantize", graph_of(kind, "fp32", args), "-o", path, "--method", "rtn"]
            phi4mm(*words, "--bits", form.removeprefix("int"), "--no-quality-gate", "-q")
        return path
    checkpoint: Path = args.work / "checkpoint"
    package: Path = args.work / f"towers-{form}"
    if not checkpoint.exists():
        settings = {
            **SMALL_DECODER, "vision_num_hidden_layers": args.vision_layers, "audio_num_blocks": args.audio_blocks,
        }  # fmt: skip
        words = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        phi4mm("synth", checkpoint, "--size", "full", "--layout", "native", *words)
    if not package.exists():
        words = ["export", checkpoint, "-o", package, "--component", "vision", "--component", "speech"]
        phi4mm(*words, "--encoder-precision", form, "-q")
    return package / GRAPHS[kind]


def phi4mm(*words: object) -> None:
    """Run a command of ours."""
    subprocess.run([*PHI4MM, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def module_runs(
    kind: str, attention: str, inputs: Feed, args: argparse.Namespace
) -> tuple[Callable[[], Any], Any, Any]:
    """One run of transformers' module, the module, and its arguments."""
    import torch
    import transformers
    from transformers.models.phi4_multimodal import modeling_phi4_multimodal as phi4

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    config = transformers.Phi4MultimodalConfig.from_pretrained(args.work / "checkpoint")
    if kind == "vision":
        config.vision_config.num_hidden_layers -= 1  # the original stops before the last layer
        config.vision_config._attn_implementation = attention
        module = phi4.Phi4MultimodalVisionModel(config.vision_config).eval()
        pixels = torch.from_numpy(inputs["pixel_values"]).flatten(0, 1)
        mask = torch.ones(len(pixels), PATCHES, PATCHES, dtype=torch.bool)
        arguments = {"pixel_values": pixels, "patch_attention_mask": mask}
    else:
        config.audio_config._attn_implementation = attention
        module = phi4.Phi4MultimodalAudioModel(config.audio_config).eval()
        arguments = {"hidden_states": torch.from_numpy(inputs["audio_embeds"]), "mask": None}

    def run() -> Any:
        with torch.inference_mode():
            return module(**arguments)

    return run, module, arguments


def plain_export(kind: str, module: Any, arguments: dict[str, Any], args: argparse.Namespace) -> Any | None:
    """A session of the module as torch.onnx exports it; None, with a remark on stderr, where that does not work."""
    import torch

    path = args.work / f"torch-{kind}.onnx"
    names = [name for name, value in arguments.items() if value is not None]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(module, kwargs=arguments, f=path, dynamo=True, verbose=False)
        running = session(path, args.threads)
    except Exception as err:  # noqa: BLE001 - whatever it raises is the result: it does not work
        print(f"torch.onnx on {kind}: {(str(err).splitlines() or [''])[0]}", file=sys.stderr)
        return None
    inputs = {item.name: arguments[name].numpy() for item, name in zip(running.get_inputs(), names, strict=False)}
    return partial(running.run, None, inputs)


def candidates(kind: str, inputs: Feed, args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """One run of every candidate that works."""
    runs: dict[str, Callable[[], object]] = {}
    for form in args.precision:
        running = session(graph_of(kind, form, args), args.threads)
        runs[f"ours {form}"] = partial(running.run, None, cast(inputs, running))
    for attention in ("eager", "sdpa"):
        try:
            run, module, arguments = module_runs(kind, attention, inputs, args)
        except ValueError as err:  # the module has no such attention
            print(f"transformers {attention} on {kind}: {err}", file=sys.stderr)
            continue
        runs[f"transformers {attention}"] = run
        if attention == "eager" and args.torch_onnx:
            plain = plain_export(kind, module, arguments, args)
            if plain is not None:
                runs["torch.onnx"] = plain
    return runs


def compare(kind: str, amount: float, record: Record, args: argparse.Namespace) -> None:
    """One row per candidate, for one amount of input; all are measured together when a row is missing."""

    @cache
    def times() -> dict[str, list[float]]:
        return alternating(candidates(kind, feed(kind, amount), args), args.rounds)

    size = f"{int(amount)} crops" if kind == "vision" else f"{amount:g} s"
    names = [f"ours {form}" for form in args.precision]
    for name in [*names, "transformers eager", "transformers sdpa", *(["torch.onnx"] if args.torch_onnx else [])]:
        key = {"graph": kind, "input": size, "candidate": name}
        record.row(key, partial(row_of, name, kind, amount, times, args))


def row_of(
    name: str, kind: str, amount: float, times: Callable[[], dict[str, list[float]]], args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of one candidate; empty where it does not work."""
    found, form = times(), name.removeprefix("ours ")
    row: dict[str, Any] = {"seconds": statistics.median(found[name]) if name in found else None}
    for attention in ("eager", "sdpa"):
        base = found.get(f"transformers {attention}")
        row[f"{attention} x"] = paired_ratio(base, found[name]) if base and name in found else None
    extra = memory(graph_of(kind, form, args), kind, amount, args) if form in args.precision else {}
    return row | {"MiB above weights": extra.get("above"), "loaded MiB": extra.get("loaded")}


def memory(path: Path, kind: str, amount: float, args: argparse.Namespace) -> dict[str, float]:
    """Resident memory of one run in a process of its own: loaded, and above that."""
    words = [__file__, args.work, "--memory-of", path, "--kind", kind, "--amount", amount, "--threads", args.threads]
    done = subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def print_memory(args: argparse.Namespace) -> None:
    """What `memory` reads."""
    running = session(args.memory_of, args.threads)
    inputs = cast(feed(args.kind, args.amount), running)
    before = resident()["resident"]
    with Peak() as peak:
        running.run(None, inputs)
    print(json.dumps({"loaded": before / MIB, "above": (peak.most["peak"] - before) / MIB}))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="vision and speech encoders, compared in one run")
    parser.add_argument("work", type=Path)
    parser.add_argument("--vision-layers", type=int, default=27, help="stored layers; the last one never runs")
    parser.add_argument("--audio-blocks", type=int, default=24)
    parser.add_argument("--crops", nargs="*", type=int, default=[2, 5], help="crops, the global one included")
    parser.add_argument("--seconds", nargs="*", type=float, default=[10.0])
    parser.add_argument("--precision", nargs="+", choices=FORMS, default=["fp32", "fp16", "int4"])
    parser.add_argument("--torch-onnx", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    add_report_options(parser)
    for hidden, kind in (("--memory-of", Path), ("--kind", str), ("--amount", float)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of is not None:
        print_memory(args)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    names = ("vision_layers", "audio_blocks", "rounds", "threads")
    record = Record({name: getattr(args, name) for name in names}, json_file=args.json, markdown=args.markdown)
    for crops in args.crops:
        compare("vision", crops, record, args)
    for seconds in args.seconds:
        compare("speech", seconds, record, args)


if __name__ == "__main__":
    main()
