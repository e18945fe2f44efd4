"""The 4-bit quantizers side by side on two real models: error on held-out inputs, bytes, CPU seconds, memory.

    python scripts/bench_quantize.py                                  # both models, blocks 128 64 32
    python scripts/bench_quantize.py --models minilm --blocks 128 --methods rtn gptq --seeds 0 1 2

Methods, all MatMulNBits with 4 bits:
  rtn, rtn-asym      ours, rounding to nearest, symmetric and with packed zero points
  gptq, gptq-asym    ours, calibrated, on inputs whose channels are mixed in groups of 128 (--rotate)
  gptq-unrotated     the same without the mixing
  ort-rtn, ort-gptq  onnxruntime's bundled quantizer; its GPTQ gets ONE feed: its error does not depend on the data
                     (tests/quantize/test_foreign_engines.py), its time grows with them

Every method runs in a process of its own with one thread; CPU seconds are that process's, imports included.
run s: CPU seconds of the quantized model over all evaluation inputs, one thread.
rel L2 = |Y' - Y| / |Y| over all evaluation outputs; cosine: mean over tokens; median: of the rel L2 of single inputs.
All 64 calibration inputs are used; each of --seeds adds rows for a subset of 48 of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

METHODS = ("rtn", "rtn-asym", "gptq", "gptq-asym", "gptq-unrotated", "ort-rtn", "ort-gptq")
SUBSET = 48
F64 = NDArray[np.float64]


class Reader:
    """onnxruntime's CalibrationDataReader over a folder of .npz files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self.rewind()

    def get_next(self) -> Mapping[str, NDArray[Any]] | None:
        """The next feed."""
        file = next(self._next, None)
        return None if file is None else dict(np.load(file))

    def rewind(self) -> None:
        """Start again."""
        self._next: Iterator[Path] = iter(self._files)


def work(method: str, model: Path, feeds: Path, block: int, out: Path) -> None:
    """Quantize one model: what the process of one row does."""
    files = sorted(feeds.glob("*.npz"))
    if method.startswith("ort-"):
        from phi4mm_export.quant.engines.onnxruntime import OrtAlgorithm, quantize_with_onnxruntime

        algorithm = OrtAlgorithm(method.removeprefix("ort-"))
        quantize_with_onnxruntime(model, out, algorithm=algorithm, reader=Reader(files[:1]), block_size=block)
        return
    from phi4mm_export.quant.engine import Method, QuantSettings, quantize_graph

    name, _, kind = method.partition("-")
    rotate = name == "gptq" and kind != "unrotated"
    settings = QuantSettings(method=Method(name), block_size=block, symmetric=kind != "asym", rotate=rotate)
    quantize_graph(model, out, reader=Reader(files), settings=settings)


def measured(method: str, model: Path, feeds: Path, block: int, out: Path) -> dict[str, float]:
    """Run `work` in a process; -> CPU seconds and peak MiB."""
    out.parent.mkdir(parents=True)
    one = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    command = [sys.executable, __file__, "--work", method, str(model), str(feeds), str(block), str(out)]
    process = subprocess.Popen(command, env={**os.environ, **one}, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"cpu_s": used.ru_utime + used.ru_stime, "peak_mib": used.ru_maxrss / 1024}


def outputs(path: Path, feeds: Sequence[Mapping[str, NDArray[Any]]]) -> tuple[list[F64], float]:
    """The model's first output for every feed, and the CPU seconds that running it took."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    session.run(None, dict(feeds[0]))
    began = time.process_time()
    found = [session.run(None, dict(feed))[0] for feed in feeds]
    seconds = time.process_time() - began
    return [np.asarray(value, np.float64) for value in found], seconds


def compare(exact: Sequence[F64], found: Sequence[F64]) -> dict[str, float]:
    """Error figures over all outputs."""
    errors = [float(((a - b) ** 2).sum()) for a, b in zip(exact, found, strict=True)]
    energy = [float((a**2).sum()) for a in exact]
    rows = [np.concatenate([a.reshape(-1, a.shape[-1]) for a in x]) for x in (exact, found)]
    norms = np.linalg.norm(rows[0], axis=1) * np.linalg.norm(rows[1], axis=1)
    cosine = (rows[0] * rows[1]).sum(1) / np.maximum(norms, 1e-30)
    single = [e / r for e, r in zip(errors, energy, strict=True)]
    return {
        "rel_l2": float(np.sqrt(sum(errors) / sum(energy))),
        "cosine": float(cosine.mean()),
        "median": float(np.sqrt(np.median(single))),
        "worst": float(np.sqrt(max(single))),
    }


def weight_nbytes(path: Path) -> int:
    """Bytes of the constants of MatMulNBits nodes, biases excepted, and of the matrix that mixes channels."""
    import onnx

    graph = onnx.load(path).graph
    size = {t.name: len(t.raw_data) or onnx.numpy_helper.to_array(t).nbytes for t in graph.initializer}
    codes = [name for node in graph.node if node.op_type == "MatMulNBits" for name in node.input[1:4] if name]
    mixing = [name for name in size if name.startswith("phi4mm.rotation")]
    return sum(size[name] for name in (*codes, *mixing))


def subset(feeds: list[dict[str, NDArray[Any]]], seed: int | None) -> list[dict[str, NDArray[Any]]]:
    """All feeds, or the 48 of a seed."""
    if seed is None:
        return feeds
    chosen = sorted(np.random.default_rng(seed).permutation(len(feeds))[:SUBSET])
    return [feeds[int(number)] for number in chosen]


def calibrated(methods: Sequence[str]) -> list[str]:
    """The methods that calibration inputs matter to."""
    return [method for method in methods if method.startswith("gptq")]


def bench(options: argparse.Namespace) -> None:
    """Every row of the table."""
    import bench_models

    print(f"{'model':7}{'block':>6} {'method':15}{'seed':>5}{'feeds':>6}{'rel L2':>8}{'cosine':>8}{'median':>8}"
          f"{'worst':>8}{'CPU s':>8}{'run s':>7}{'MiB':>6}{'bytes':>11}")  # fmt: skip
    with tempfile.TemporaryDirectory(dir=bench_models.cache_dir()) as temporary:
        for name in options.models:
            path, calibration, evaluation = bench_models.load(name)
            exact, _ = outputs(path, evaluation)
            for seed in [None, *options.seeds]:
                chosen = subset(calibration, seed)
                feeds = bench_models.save_feeds(chosen, Path(temporary) / f"{name}-{seed}")
                for block in options.blocks:
                    for method in options.methods if seed is None else calibrated(options.methods):
                        out = Path(temporary) / f"{name}-{seed}-{block}-{method}" / "model.onnx"
                        row = {"model": name, "block": block, "method": method, "seed": seed}
                        row["feeds"] = 0 if "rtn" in method else 1 if method == "ort-gptq" else len(chosen)
                        row |= measured(method, path, feeds, block, out)
                        found, row["run_s"] = outputs(out, evaluation)
                        row |= compare(exact, found) | {"bytes": weight_nbytes(out)}
                        for file in out.parent.iterdir():
                            file.unlink()
                        show(row, options.json)


def show(row: dict[str, Any], log: Path | None) -> None:
    """One line of the table, and one JSON object in the log."""
    seed = "-" if row["seed"] is None else row["seed"]
    print(f"{row['model']:7}{row['block']:6} {row['method']:15}{seed:>5}{row['feeds']:6}{row['rel_l2']:8.4f}"
          f"{row['cosine']:8.4f}{row['median']:8.4f}{row['worst']:8.3f}{row['cpu_s']:8.1f}{row['run_s']:7.2f}"
          f"{row['peak_mib']:6.0f}{row['bytes']:11}",
          flush=True)  # fmt: skip
    if log:
        with log.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def main() -> None:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("vit", "minilm"), default=["vit", "minilm"])
    parser.add_argument("--blocks", nargs="+", type=int, default=[128, 64, 32])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="subsets to run, after all inputs")
    parser.add_argument("--json", type=Path, help="append one JSON object a row to this file")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        method, model, feeds, block, out = options.work
        work(method, Path(model), Path(feeds), int(block), Path(out))
    else:
        bench(options)


if __name__ == "__main__":
    main()
