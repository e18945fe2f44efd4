"""Measure `phi4mm export`: time against plain copying on the same disk, memory by kind, growth with the model.

    python scripts/bench_export.py CHECKPOINT WORK_FOLDER [--precision int8 ...] [--lora gated ...] [--jobs N]
    python scripts/bench_export.py --growth 8 16 32 WORK_FOLDER      synthetic checkpoints of that many layers

In every round each recipe is exported once, and then as many bytes as it reads and writes are copied with `cat` into
WORK_FOLDER: the checkpoint's files in, the package's files out. `ratio` is export / cat, the median over rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from measuring import MIB, report, run_measured

PHI4MM = (sys.executable, "-m", "phi4mm_export")
SYNTH = ("--size", "full", "--set", "vision_num_hidden_layers=27")


def copied(files: list[Path], target: Path) -> float:
    """Seconds that `cat` takes to copy the files, one after the other, with a final sync of the target."""
    script = 'for file in "$@"; do cat "$file" > "$0"; done; sync "$0"'
    ran = run_measured(["sh", "-c", script, target, *files])
    target.unlink()
    return ran.seconds


def exported(checkpoint: Path, package: Path, options: list[str]) -> dict[str, Any]:
    """One export: seconds, bytes and peak memory."""
    shutil.rmtree(package, ignore_errors=True)
    ran = run_measured([*PHI4MM, "export", checkpoint, "-o", package, "--json", *options])
    said = json.loads(ran.output)
    return {
        "seconds": ran.seconds,
        "bytes read": said["bytes_read"],
        "bytes written": said["bytes"],
        "anonymous MiB": ran.peak["anonymous"] / MIB,
        "file MiB": ran.peak["file"] / MIB,
        "peak MiB": ran.peak["peak"] / MIB,
    }


def against_cat(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per recipe."""
    recipes = list(itertools.product(args.precision, args.lora, args.embedding_precision))
    runs: dict[tuple[str, ...], list[dict[str, Any]]] = {recipe: [] for recipe in recipes}
    shards = sorted(args.checkpoint.rglob("*.safetensors"))
    for _ in range(args.rounds):
        for recipe in recipes:
            precision, lora, table = recipe
            options = ["--precision", precision, "--lora", lora, "--jobs", str(args.jobs)]
            options += ["--embedding-precision", table] if table else []
            package = args.work / "package"
            run = exported(args.checkpoint, package, options)
            written = sorted(path for path in package.rglob("*") if path.is_file())
            run["cat seconds"] = copied(shards, args.work / "copy") + copied(written, args.work / "copy")
            run["ratio"] = run["seconds"] / run["cat seconds"]
            runs[recipe].append(run)
            shutil.rmtree(package)
    return [{"recipe": "/".join(part for part in recipe if part), **medians(found)} for recipe, found in runs.items()]


def growth(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per number of layers, of a checkpoint that is made, exported and removed."""
    rows = []
    for layers in args.growth:
        checkpoint = args.work / f"layers-{layers}"
        words = [*PHI4MM, "synth", checkpoint, *SYNTH, "--set", f"num_hidden_layers={layers}"]
        run_measured(words)
        runs = [exported(checkpoint, args.work / "package", ["--jobs", str(args.jobs)]) for _ in range(args.rounds)]
        rows.append({"layers": layers, **medians(runs)})
        rows[-1]["s per GB read"] = rows[-1]["seconds"] / rows[-1]["bytes read"] * 1e9
        shutil.rmtree(checkpoint)
        shutil.rmtree(args.work / "package")
    return rows


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every figure; integers stay integers."""
    return {key: type(runs[0][key])(statistics.median(run[key] for run in runs)) for key in runs[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="time and memory of phi4mm export")
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("work", type=Path)
    parser.add_argument("--precision", nargs="+", default=["int8"])
    parser.add_argument("--lora", nargs="+", default=["gated"])
    parser.add_argument("--embedding-precision", nargs="+", default=[""])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--growth", nargs="+", type=int, default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if not args.growth and args.checkpoint is None:
        parser.error("name a checkpoint, or layers with --growth")
    rows = growth(args) if args.growth else against_cat(args)
    report(rows, json_file=args.json, markdown=args.markdown, facts={"jobs": args.jobs, "rounds": args.rounds})


if __name__ == "__main__":
    main()
