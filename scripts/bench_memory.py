"""Compare what `phi4mm plan` says a package takes with what onnxruntime-genai really takes on this CPU.

    python scripts/bench_memory.py PACKAGE [--max-length N] [--words N] [--crops N] [--seconds S] [--markdown]

Each request runs in a process of its own: text alone, text with an image, with audio, and one after the other in one
process. `planned` is `phi4mm plan` for the tokens that the request really had; `ratio` is planned / measured peak.
With --release-arena packages (`phi4mm export --release-arena`) the last row shows what the release saves.
Nothing is written. Memory: the package's weights twice over where they are float16, see `phi4mm plan PACKAGE`.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measuring import MIB, Peak, Record, add_report_options, resident

from phi4mm_export.runtime.ort import import_genai

SIDE, SAMPLE_RATE_HZ = 448, 16000
REQUESTS = {"text": ("text",), "image": ("image",), "audio": ("audio",), "both": ("image", "audio")}


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """Load the package, serve the requests named, and say what was resident."""
    og = import_genai()
    found: dict[str, Any] = {}
    with Peak() as peak:
        model = og.Model(str(args.package))
        found["load peak"] = max(peak.most.get("peak", 0), resident()["peak"])
        processor = model.create_multimodal_processor()
    tokens = 0
    with Peak() as peak:
        for kind in REQUESTS[args.request]:
            tokens = max(tokens, answer(og, model, processor, kind, args))
    found |= {
        "peak": peak.most["peak"],
        "anonymous": peak.most["anonymous"],
        "file": peak.most["file"],
        "tokens": tokens,
    }
    return found


def answer(og: Any, model: Any, processor: Any, kind: str, args: argparse.Namespace) -> int:
    """Two tokens for one prompt; returns the prompt's length."""
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=args.max_length)
    generator = og.Generator(model, params)
    marker = {"text": "", "image": "<|image_1|>", "audio": "<|audio_1|>"}[kind]
    prompt = f"<|user|>{marker}{'word ' * args.words}<|end|><|assistant|>"
    inputs = processor(prompt, images=image(og, args.crops) if kind == "image" else None,
                       audios=clip(og, args.seconds) if kind == "audio" else None)  # fmt: skip
    generator.set_inputs(inputs)
    length = int(generator.token_count())
    for _ in range(2):
        generator.generate_next_token()
    return length


def image(og: Any, crops: int) -> Any:
    """A picture that the processor cuts into `crops` crops, the global one included."""
    from PIL import Image

    out = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE * (crops - 1), 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "png")
    return og.Images.open_bytes(out.getvalue())


def clip(og: Any, seconds: float) -> Any:
    """Noise of that length."""
    import soundfile

    out = io.BytesIO()
    noise = np.random.default_rng(0).standard_normal(round(seconds * SAMPLE_RATE_HZ)).astype(np.float32) * 0.1
    soundfile.write(out, noise, SAMPLE_RATE_HZ, format="WAV")
    return og.Audios.open_bytes(out.getvalue())


def row_of(request: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measured and planned, for one kind of request."""
    from phi4mm_export.pipeline.plan import PlanSettings, plan  # not in the processes that are measured
    from phi4mm_export.pipeline.plan_memory import Workload

    words = [__file__, args.package, "--request", request, "--max-length", args.max_length, "--words", args.words]
    words += ["--crops", args.crops, "--seconds", args.seconds]
    done = subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    kinds = REQUESTS[request]
    workload = Workload(
        found["tokens"], args.crops if "image" in kinds else 0, args.seconds if "audio" in kinds else 0.0
    )
    run = plan(args.package, settings=PlanSettings(workload=workload, max_length=args.max_length)).run
    return {
        "tokens": found["tokens"],
        "measured MiB": found["peak"] / MIB,
        "anonymous MiB": found["anonymous"] / MIB,
        "file MiB": found["file"] / MIB,
        "planned MiB": (run.peak_text if kinds == ("text",) else run.peak_both_kept) / MIB,
        "ratio": (run.peak_text if kinds == ("text",) else run.peak_both_kept) / found["peak"],
        "load measured MiB": found["load peak"] / MIB,
        "load ratio": run.load_peak / found["load peak"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="phi4mm plan against real memory")
    parser.add_argument("package", type=Path)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--crops", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--requests", nargs="+", choices=sorted(REQUESTS), default=list(REQUESTS))
    add_report_options(parser)
    parser.add_argument("--request", choices=sorted(REQUESTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.request:
        print(json.dumps(serve(args)))
        return
    names = ("max_length", "words", "crops", "seconds")
    record = Record({name: getattr(args, name) for name in names}, json_file=args.json, markdown=args.markdown)
    for request in args.requests:
        record.row({"package": args.package.name, "request": request}, partial(row_of, request, args))


if __name__ == "__main__":
    main()
