"""GPTQ of the vision tower at its real width: time, memory, and a run that is killed and goes on.

    python scripts/bench_tower_gptq.py time WORK_FOLDER                    # 26 layers, 16 crops
    python scripts/bench_tower_gptq.py memory WORK_FOLDER --layers 3       # peak memory, 64 images against 8
    python scripts/bench_tower_gptq.py kill WORK_FOLDER --layers 2         # kill -9 in the middle, and again

A synthetic checkpoint with heavy-tailed weights (`phi4mm synth --size full --weights heavy`) is exported in float32;
`phi4mm quantize --method gptq` runs as a command of its own, and what it used is read from the operating system.
--layers counts the layers that run: one more is stored, as in the real model. Pictures are smooth random fields with
noise. `time` also judges: relative L2 of image_features on one more picture, beside rounding to nearest.

Disk at full depth: 3.1 GB for the checkpoint, 1.8 for the float32 graph, and the live values of the samples.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_towers import PATCHES, PHI4MM, SIDE, SMALL_DECODER, phi4mm, session
from numpy.typing import NDArray

OUTPUT = "image_features"
HELD_SEED = 10_000
POLL_S = 0.2


@dataclass(frozen=True)
class Used:
    """What a command used. code: its exit status, negative for a signal."""

    code: int
    wall_s: float
    cpu_s: float
    peak_mib: float
    output: str


def graph(args: argparse.Namespace) -> Path:
    """The float32 vision graph of `--layers` layers; what stands there already is used again."""
    checkpoint = args.work / f"checkpoint-{args.layers}"
    package = args.work / f"float-{args.layers}"
    if not package.exists():
        settings = {**SMALL_DECODER, "vision_num_hidden_layers": args.layers + 1, "audio_num_blocks": 1}
        words = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        if not checkpoint.exists():
            phi4mm("synth", checkpoint, "--size", "full", "--layout", "native", "--weights", "heavy", *words)
        phi4mm("export", checkpoint, "-o", package, "--component", "vision", "--encoder-precision", "fp32", "-q")
        shutil.rmtree(checkpoint)
    return Path(package / "phi-4-mm-vision.onnx")


def picture(seed: int, crops: int) -> dict[str, NDArray[Any]]:
    """Inputs of one picture of `crops` crops, the global one included: smooth fields of three sizes, and noise."""
    random = np.random.default_rng(seed)
    pixels = np.zeros((crops, 3, SIDE, SIDE), np.float32)
    for cells in (4, 16, 64):
        field = random.standard_normal((crops, 3, cells, cells)).astype(np.float32)
        pixels += np.kron(field, np.ones((SIDE // cells, SIDE // cells), np.float32)) / 3
    pixels += 0.1 * random.standard_normal(pixels.shape).astype(np.float32)
    return {
        "pixel_values": np.clip(pixels, -1, 1)[None],
        "image_attention_mask": np.ones((1, crops, PATCHES, PATCHES), np.float32),
        "image_sizes": np.array([[SIDE, SIDE * (crops - 1)]], np.int64),
    }


def feeds(args: argparse.Namespace, images: int) -> Path:
    """A folder of `images` samples."""
    folder: Path = args.work / f"feeds-{images}-{args.crops_each}"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(images):
        path = folder / f"{number:04d}.npz"
        if not path.exists():
            np.savez(path, allow_pickle=False, **picture(number, args.crops_each))
    return folder


def command(args: argparse.Namespace, target: Path, images: int, *more: str | Path) -> list[str]:
    """The quantization as a command."""
    words = ["quantize", graph(args), "-o", target, "--calibration", feeds(args, images), "--no-quality-gate", "--json"]
    words += ["--block-size", args.block, "--jobs", args.jobs, *args.options.split(), *more]
    return [*PHI4MM, *map(str, words)]


def used(words: list[str], *, stop_at: int = 0, layers: Path | None = None) -> Used:
    """Run a command to its end, or kill it once `stop_at` finished layers lie below `layers`."""
    began = time.perf_counter()
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **threads}) as process:
        while stop_at and layers is not None and process.poll() is None:
            if len(list(layers.rglob("*.layer"))) >= stop_at:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(POLL_S)
        assert process.stdout is not None
        output = process.stdout.read()
        if process.returncode is not None:
            raise SystemExit("the command ended before it could be killed: raise --layers")
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall, cpu = time.perf_counter() - began, usage.ru_utime + usage.ru_stime
    return Used(process.returncode, wall, cpu, usage.ru_maxrss / 1024, output)


def finished(words: list[str]) -> tuple[Used, dict[str, Any]]:
    """A command that must succeed, and its JSON report."""
    found = used(words)
    if found.code:
        raise SystemExit(f"exit code {found.code}: {' '.join(words)}")
    return found, json.loads(found.output)


def run_time(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One quantization at full depth, its error and that of rounding to nearest."""
    target, rounded = args.work / "gptq.onnx", args.work / "rtn.onnx"
    clear(target, rounded)
    images = -(-args.crops // args.crops_each)
    found, report = finished(command(args, target, images))
    words = ["quantize", graph(args), "-o", rounded, "--method", "rtn", "--no-quality-gate", "-q"]
    phi4mm(*words, "--block-size", args.block)
    held = picture(HELD_SEED, args.crops_each)
    exact, ours, nearest = (features(path, held) for path in (graph(args), target, rounded))
    row = {"layers": args.layers, "crops": images * args.crops_each, "block": args.block, "wall_s": found.wall_s}
    row |= {"cpu_s": found.cpu_s, "peak_mib": found.peak_mib, "weights": len(report["per_layer"])}
    row |= {"rel_l2": relative(ours, exact), "rtn_rel_l2": relative(nearest, exact)}
    return [row]


def run_memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak memory for few and for many samples."""
    rows = []
    for images in args.images:
        target = args.work / f"memory-{images}.onnx"
        clear(target)
        found, _ = finished(command(args, target, images))
        row = {"images": images, "crops": images * args.crops_each, "layers": args.layers, "wall_s": found.wall_s}
        rows.append(row | {"cpu_s": found.cpu_s, "peak_mib": found.peak_mib})
        rows[-1]["ratio"] = found.peak_mib / rows[0]["peak_mib"]
        clear(target)
    return rows


def run_kill(args: argparse.Namespace) -> list[dict[str, Any]]:
    """An undisturbed run, one that is killed after half of its layers, and the same command again."""
    images = -(-args.crops // args.crops_each)
    whole, broken = args.work / "whole.onnx", args.work / "broken.onnx"
    work = args.work / "killed-work"
    clear(whole, broken)
    shutil.rmtree(work, ignore_errors=True)
    undisturbed, report = finished(command(args, whole, images))
    words = command(args, broken, images, "--work-dir", work)
    killed = used(words, stop_at=len(report["per_layer"]) // 2, layers=work)
    if broken.exists():
        raise SystemExit("a killed run has left a result")
    again, second = finished(words)
    rows = [
        {"run": name, "cpu_s": each.cpu_s, "wall_s": each.wall_s, "exit": each.code, "reused": reused}
        for name, each, reused in (
            ("undisturbed", undisturbed, report["reused_layers"]),
            ("killed", killed, 0),
            ("again", again, second["reused_layers"]),
        )
    ]
    rows[-1]["same bytes"] = digest(whole) == digest(broken)
    return rows


def features(path: Path, inputs: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """image_features of one picture."""
    return np.asarray(session(path, 2).run([OUTPUT], inputs)[0], np.float64)


def relative(found: NDArray[np.float64], exact: NDArray[np.float64]) -> float:
    """|found - exact| / |exact|."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def clear(*graphs: Path) -> None:
    """Remove graphs and their data."""
    for path in graphs:
        for file in (path, path.with_name(f"{path.name}.data")):
            file.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """sha256 of a graph's data file. (The graph file names it, so two names are two graph files.)"""
    with path.with_name(f"{path.name}.data").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "kill"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--layers", type=int, default=26, help="layers of the tower that run")
    parser.add_argument("--crops", type=int, default=16, help="crops of all pictures together, for time and kill")
    parser.add_argument("--crops-each", type=int, default=2, help="crops of one picture, the global one included")
    parser.add_argument("--images", type=int, nargs=2, default=[8, 64], help="pictures, for memory")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--options", default="", help="more options of phi4mm quantize, in one word")
    parser.add_argument("--json", type=Path, help="append one JSON object a row to this file")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for row in {"time": run_time, "memory": run_memory, "kill": run_kill}[args.what](args):
        print(
            ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
        if args.json:
            with args.json.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"what": args.what, **row}) + "\n")


if __name__ == "__main__":
    main()
