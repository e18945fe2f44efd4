"""Measure `phi4mm export`: time against plain copying on the same disk, memory by kind, growth with the model.

    python scripts/bench_export.py CHECKPOINT WORK_FOLDER [--recipe int8/int8/fp16/gated ...] [--keep] [--jobs N]
    python scripts/bench_export.py --growth 8 16 32 WORK_FOLDER      synthetic checkpoints of that many layers

A recipe is decoder/token table/encoders/adapters, as `phi4mm plan --fit` spells it. Each is exported, validated, and as
many bytes as went in and out are copied with `cat` into WORK_FOLDER: the checkpoint's files, then the package's.
`ratio` is export / cat. The page cache is emptied of the checkpoint before both. `planned` columns are what
`phi4mm plan` said before, over what was measured. With --rounds N every figure is the median of N runs.

Disk beside the checkpoint: one package, and a copy of the largest file. --growth makes and removes its checkpoints:
that of 32 layers has 11.2 GB, its package 6.5 GB. --keep leaves each package in WORK_FOLDER under its recipe's name.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from measuring import MIB, Record, add_report_options, run_measured, uncached

PHI4MM = (sys.executable, "-m", "phi4mm_export")
RECIPES = (
    "int8/int8/fp16/gated", "int8/int8/fp16/merged", "int8/int8/fp16/branch", "int8/fp16/fp16/gated",
    "int8/int4/fp16/gated", "int4/int4/fp16/gated",
)  # fmt: skip


def options_of(recipe: str) -> list[str]:
    """A recipe's name as options of `phi4mm export` and `phi4mm plan`."""
    names = ("--precision", "--embedding-precision", "--encoder-precision", "--lora")
    return [word for pair in zip(names, recipe.split("/"), strict=True) for word in pair]


def copied(files: list[Path], target: Path) -> float:
    """Seconds that `cat` takes to copy the files, one after the other, each synced like an export's files."""
    script = 'for file in "$@"; do cat "$file" > "$0"; sync "$0"; done'
    ran = run_measured(["sh", "-c", script, target, *files])
    target.unlink()
    return ran.seconds


def exported(checkpoint: Path, package: Path, options: list[str]) -> dict[str, Any]:
    """One export: seconds, bytes and peak memory."""
    shutil.rmtree(package, ignore_errors=True)
    uncached(checkpoint.rglob("*.safetensors"))
    ran = run_measured([*PHI4MM, "export", checkpoint, "-o", package, "--json", *options])
    said = json.loads(ran.output)
    return {
        "seconds": ran.seconds,
        "bytes read": said["bytes_read"],
        "bytes written": sum(path.stat().st_size for path in package.rglob("*") if path.is_file()),
        "anonymous MiB": ran.peak["anonymous"] / MIB,
        "file MiB": ran.peak["file"] / MIB,
        "peak MiB": ran.peak["peak"] / MIB,
    }


def run_of(recipe: str, args: argparse.Namespace) -> dict[str, Any]:
    """One export of a recipe, beside `cat`, `validate` and what `plan` had said."""
    package, options = args.work / recipe.replace("/", "-"), [*options_of(recipe), "--jobs", str(args.jobs)]
    plan = json.loads(run_measured([*PHI4MM, "plan", args.checkpoint, "--json", *options]).output)
    run = exported(args.checkpoint, package, options)
    shards = sorted(args.checkpoint.rglob("*.safetensors"))
    uncached(shards)
    written = sorted(path for path in package.rglob("*") if path.is_file())
    run["cat seconds"] = copied(shards, args.work / "copy") + copied(written, args.work / "copy")
    run["ratio"] = run["seconds"] / run["cat seconds"]
    run["planned bytes"] = plan["bytes"] / run["bytes written"]
    run["planned peak"] = plan["export"]["memory_peak"] / MIB / run["peak MiB"]
    judged = run_measured([*PHI4MM, "validate", package, "--json"])
    run["validate seconds"], run["validate peak MiB"] = judged.seconds, judged.peak["peak"] / MIB
    if not args.keep:
        shutil.rmtree(package)
    return run


def against_cat(args: argparse.Namespace, record: Record) -> None:
    """One row per recipe."""
    for recipe in args.recipe:
        record.row({"recipe": recipe}, partial(repeated, partial(run_of, recipe, args), args.rounds))


def growth(args: argparse.Namespace, record: Record) -> None:
    """One row per number of layers, of a checkpoint that is made, exported and removed; then how far they differ."""

    def measured(layers: int) -> dict[str, Any]:
        checkpoint, package = args.work / f"layers-{layers}", args.work / "package"
        shutil.rmtree(checkpoint, ignore_errors=True)
        sets = [f"num_hidden_layers={layers}", *args.set]
        words = [word for pair in sets for word in ("--set", pair)]
        run_measured([*PHI4MM, "synth", checkpoint, "--size", "full", *words])
        options = [*options_of(args.recipe[0]), "--jobs", str(args.jobs)]
        row = repeated(partial(exported, checkpoint, package, options), args.rounds)
        shutil.rmtree(checkpoint)
        shutil.rmtree(package)
        return {**row, "s per GB moved": row["seconds"] / (row["bytes read"] + row["bytes written"]) * 1e9}

    rows = [record.row({"layers": layers}, partial(measured, layers)) for layers in args.growth]
    for column in ("anonymous MiB", "peak MiB", "s per GB moved"):
        values = [row[column] for row in rows]
        print(f"{column}: largest / smallest = {max(values) / min(values):.3f}", flush=True)


def repeated(run: partial[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """The median of every figure over so many runs; integers stay integers."""
    runs = [run() for _ in range(rounds)]
    return {key: type(runs[0][key])(statistics.median(run[key] for run in runs)) for key in runs[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="time and memory of phi4mm export")
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("work", type=Path)
    parser.add_argument("--recipe", nargs="+", default=RECIPES, metavar="DECODER/TABLE/ENCODERS/ADAPTERS")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave the packages in WORK_FOLDER")
    parser.add_argument("--growth", nargs="+", type=int, default=[], metavar="LAYERS")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with --growth: as for synth")
    add_report_options(parser)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if not args.growth and args.checkpoint is None:
        parser.error("name a checkpoint, or layers with --growth")
    facts = {"jobs": args.jobs, "rounds": args.rounds, "set": args.set, "growth of": args.recipe[0] * bool(args.growth)}
    record = Record(facts, json_file=args.json, markdown=args.markdown)
    if args.growth:
        growth(args, record)
    else:
        against_cat(args, record)


if __name__ == "__main__":
    main()
