"""Compare decoders of the same weights in one run: ours, onnxruntime-genai's model builder's, and transformers'.

    python scripts/bench_decode.py WORK_FOLDER [--layers N] [--precision int8 int4] [--forms none gated ...]

A synthetic checkpoint of the real geometry with N layers is made in WORK_FOLDER, its base weights are written again as
a Phi-3 text checkpoint for the builder, and every candidate runs in onnxruntime with one shared cache. Candidates take
turns: in each round one prompt of --prompt tokens, and --steps single tokens after it. `prefill x F` and `decode x F`
say how many times faster than form F of the same bits: the median over rounds of ratios within a round, and of these
the geometric mean over --sessions, each of which loads every candidate afresh in rotated order (one pair of sessions
cannot resolve 3 percent).

Ours: `none` without an adapter (`none-32`, `none-128` with blocks of that size; the default is 128 for int8 and 32 for
int4; `none-plain` without rotated inputs), `gated` in its text mode, `branch` with the vision adapter beside the
weights. The builder's, with blocks of 32 and accuracy level 4: `builder` as it is, `builder-apart` with q, k and v
apart, `builder-lora` with the vision adapter as a branch, as its phi4mm graph has. --logits-prompt N measures the peak
of a prompt of N tokens with the last position's logits and with all (0: not).

Disk: about 20 GB with 4 layers and all forms. Memory: about 12 GiB, most of it while the builder works. Needs the
extras cpu and reference.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from decode_candidates import BUILDERS, OURS, graph_of
from measuring import MIB, Peak, Record, add_report_options, paired_ratio, resident, smaps_rollup

from phi4mm_export.runtime.ort import import_onnxruntime

NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
DEFAULT_FORMS = ("none", "gated", "branch", *BUILDERS)
EAGER = "transformers-eager"


class Decoder:
    """One graph with a cache of [heads, tokens, head size], which lies in one place as past and present."""

    def __init__(self, path: Path, threads: int, cache_shape: tuple[int, int, int]) -> None:
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = {item.name: item for item in self.session.get_inputs()}
        self.caches = {}
        for name, item in self.inputs.items():
            if name.endswith((".key", ".value")):
                self.caches[name] = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, *cache_shape), NUMPY[item.type]))

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


@dataclass
class Times:
    """Seconds of one candidate: per session, per round."""

    prefill: list[list[float]] = field(default_factory=list)
    decode: list[list[float]] = field(default_factory=list)


def cache_shape(args: argparse.Namespace) -> tuple[int, int, int]:
    """Key-value heads, tokens and head size of every candidate's cache."""
    config = json.loads((args.work / "checkpoint" / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_key_value_heads"]), args.prompt + 8, int(head_dim)


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

    past = prefill().past_key_values

    def step() -> Any:
        with torch.inference_mode():
            found = model(inputs_embeds=embeds[:, :1], past_key_values=past, use_cache=True)
        past.crop(-1)
        return found

    return prefill, step


def runs_of(path: Path, args: argparse.Namespace) -> tuple[Callable[[], object], Callable[[], object]]:
    """Prefill and one step of a graph."""
    decoder = Decoder(path, args.threads, cache_shape(args))
    run = decoder.session.run_with_iobinding
    return partial(run, decoder.bind(args.prompt, 0)), partial(run, decoder.bind(1, args.prompt))


def measure(graphs: Mapping[str, Path], args: argparse.Namespace) -> dict[str, Times]:
    """Seconds per prompt and per step of every candidate, in rounds; --sessions times with sessions loaded afresh."""
    names = [*graphs, *([EAGER] if args.transformers else [])]
    times = {name: Times() for name in names}
    for number in range(args.sessions):
        order = rotated(names, number)
        runs = {
            name: transformers_runs(args.work / "phi3", args) if name == EAGER else runs_of(graphs[name], args)
            for name in order
        }
        for name in names:
            times[name].prefill.append([])
            times[name].decode.append([])
        for turn in range(-1, args.rounds):
            for name in rotated(order, max(turn, 0)):
                prefill, step = runs[name]
                measured = clock(prefill, 1), clock(step, args.steps)
                if turn >= 0:
                    times[name].prefill[-1].append(measured[0])
                    times[name].decode[-1].append(measured[1])
        print(f"session {number + 1} of {args.sessions} measured", file=sys.stderr, flush=True)
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


def speedup(base: list[list[float]], other: list[list[float]]) -> float:
    """How many times faster `other` is: the geometric mean over sessions of the median over rounds."""
    logs = [math.log(paired_ratio(a, b)) for a, b in zip(base, other, strict=True)]
    return math.exp(statistics.mean(logs))


def row_of(
    form: str, measured: Callable[[], tuple[dict[str, Path], dict[str, Times]]], args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of one candidate: speed, speed over every reference form, size and memory."""
    import onnx

    graphs, times = measured()
    found = times[form]
    row: dict[str, Any] = {
        "prefill tokens/s": args.prompt / statistics.median(s for session in found.prefill for s in session),
        "decode tokens/s": 1 / statistics.median(s for session in found.decode for s in session),
    }
    for base in [name for name in ("none", *BUILDERS) if name in times]:
        row[f"prefill x {base}"] = speedup(times[base].prefill, found.prefill)
        row[f"decode x {base}"] = speedup(times[base].decode, found.decode)
    path = graphs.get(form)
    if path is None:
        return row
    row["nodes"] = len(onnx.load(path, load_external_data=False).graph.node)
    row["bytes"] = sum(p.stat().st_size for p in path.parent.glob(f"{path.name}*"))
    return row | memory(path, args.prompt, args)


def memory(path: Path, prompt: int, args: argparse.Namespace) -> dict[str, float]:
    """Resident memory of one decoder in a process of its own: after loading, and at the peak of one prompt."""
    words = [__file__, "--memory-of", path, "--prompt", prompt, "--threads", args.threads, args.work]
    done = subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def memory_of(form: str, bits: str, args: argparse.Namespace) -> dict[str, float]:
    """The memory of one form with a prompt of --logits-prompt tokens."""
    return memory(graph_of(form, bits, args), args.logits_prompt, args)


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


def compare(bits: str, record: Record, args: argparse.Namespace) -> None:
    """One row per candidate of these bits; all are measured together when a row is missing."""

    @cache
    def measured() -> tuple[dict[str, Path], dict[str, Times]]:
        graphs = {form: graph_of(form, bits, args) for form in args.forms}
        return graphs, measure(graphs, args)

    for form in (*args.forms, *([EAGER] if args.transformers else [])):
        record.row({"decoder": f"{form}/{bits}"}, partial(row_of, form, measured, args))


def logits(bits: str, record: Record, args: argparse.Namespace) -> None:
    """Peak memory of a long prompt, with the last position's logits and with all."""
    peaks = []
    for form in ("none", "none-full-logits"):
        row = record.row(
            {"logits": OURS[form][-1].removeprefix("--").replace("none", "last-only"), "prompt": args.logits_prompt},
            partial(memory_of, form, bits, args),
        )
        peaks.append(row["peak MiB"])
    print(f"last-token logits save {(peaks[1] - peaks[0]) / 1024:.2f} GiB", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="decoders of the same weights, compared in one run")
    parser.add_argument("work", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for phi4mm synth")
    parser.add_argument("--precision", nargs="+", default=["int8", "int4"])
    parser.add_argument("--forms", nargs="+", choices=[*OURS, *BUILDERS], default=DEFAULT_FORMS)
    parser.add_argument("--export-option", action="append", default=[], help="added to every export of ours")
    parser.add_argument("--builder-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--logits-prompt", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    add_report_options(parser)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of is not None:
        print_memory(args.memory_of, args)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    names = (
        "layers",
        "forms",
        "set",
        "export_option",
        "builder_option",
        "prompt",
        "steps",
        "rounds",
        "sessions",
        "threads",
    )
    record = Record({name: getattr(args, name) for name in names}, json_file=args.json, markdown=args.markdown)
    if args.logits_prompt:
        logits(args.precision[0], record, args)
    for bits in args.precision:
        compare(bits, record, args)


if __name__ == "__main__":
    main()
