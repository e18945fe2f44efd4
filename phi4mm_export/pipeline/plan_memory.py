"""Memory of an export and of a run, from weights, sizes and a workload. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phi4mm_export.package.footprint import GraphWeights
from phi4mm_export.package.write import DEFAULT_MEMORY_LIMIT
from phi4mm_export.pipeline.export_plan import ExportPlan
from phi4mm_export.spec import footprint as fp
from phi4mm_export.spec.contract import Component, FloatType, Provider
from phi4mm_export.spec.model import AudioDims, VisionDims

EXPORT_NBYTES = 130 << 20
"""Interpreter, libraries, graphs and the bound plan of an export (measured)."""
PAGE = 4096


@dataclass(frozen=True)
class Workload:
    """One request: tokens of the prompt (placeholders included), crops of all images with the global ones, seconds."""

    prompt_tokens: int = 3344
    crops: int = 5
    seconds: float = 30.0


@dataclass(frozen=True)
class RunDims:
    """Sizes, types and switches of a package that decide memory at run time."""

    decoder: fp.DecoderDims
    vision: VisionDims
    audio: AudioDims
    float_type: FloatType
    provider: Provider
    full_logits: bool
    arena_released: bool


@dataclass(frozen=True)
class ExportMemory:
    """What an export takes: bytes read, bytes on disk (also the peak: the package is written once), resident bytes.

    nbytes_inputs: the size of all input files; some of their tensors are read twice.
    """

    nbytes_read: int
    nbytes_inputs: int
    disk_peak: int
    memory_peak: int


@dataclass(frozen=True)
class RunMemory:
    """Bytes at run time. `peak` is resident on the host, `device_peak` on the GPU (0 on the CPU).

    load_peak: while the model loads. peak_text: after a text prompt; peak_image and peak_audio: in a process that
    serves one medium beside text; peak_both_kept and peak_both_released: both, without and with
    `--release-arena`. The decoder's arena is never released. scores_reserved is address space, not memory.
    """

    max_length: int
    prompt_tokens: int
    crops: int
    seconds: float
    kv_per_token: int
    kv: int
    logits_last: int
    logits_full: int
    full_logits: bool
    scores: int
    scores_reserved: int
    prompt: int
    vision: int
    speech: int
    load_peak: int
    peak_text: int
    peak_image: int
    peak_audio: int
    peak_both_kept: int
    peak_both_released: int
    peak: int
    device_peak: int


def run_memory(weights: Sequence[GraphWeights], dims: RunDims, workload: Workload, max_length: int) -> RunMemory:
    """Everything a package takes while it serves `workload` with a cache of `max_length` tokens."""
    decoder, provider, kind, tokens = dims.decoder, dims.provider, dims.float_type, workload.prompt_tokens
    on_cpu = provider is Provider.CPU
    kv = fp.kv_nbytes_per_token(decoder, kind) * max_length
    last, full = fp.logits_nbytes(decoder, kind, 1), fp.logits_nbytes(decoder, kind, tokens)
    prompt = fp.prompt_nbytes(decoder, provider, kind, tokens) + (full if dims.full_logits else last)
    vision = fp.vision_nbytes(dims.vision, provider, kind, workload.crops) if workload.crops else 0
    speech = fp.speech_nbytes(dims.audio, provider, kind, workload.seconds) if workload.seconds else 0
    packed = sum(w.anonymous for w in weights)
    tables = _touched_rows(weights, decoder, tokens) if on_cpu else 0
    idle = fp.RUNTIME_NBYTES + fp.TOKENIZER_NBYTES + packed + tables
    ready = idle + fp.FIRST_RUN_NBYTES
    on_device = sum(w.device for w in weights)
    serving = kv + prompt
    base = ready if on_cpu else on_device
    kept = base + serving + vision + speech
    released = base + kv + max(prompt, vision, speech)
    both = released if dims.arena_released else kept
    largest = max((w.largest for w in weights), default=0)
    return RunMemory(
        max_length=max_length,
        prompt_tokens=tokens,
        crops=workload.crops,
        seconds=workload.seconds,
        kv_per_token=fp.kv_nbytes_per_token(decoder, kind),
        kv=kv,
        logits_last=last,
        logits_full=full,
        full_logits=dims.full_logits,
        scores=fp.scores_nbytes(decoder, tokens) if on_cpu else 0,
        scores_reserved=fp.scores_reserved_nbytes(decoder, tokens, max_length) if on_cpu else 0,
        prompt=prompt,
        vision=vision,
        speech=speech,
        load_peak=fp.RUNTIME_NBYTES + packed + largest,
        peak_text=base + serving,
        peak_image=base + serving + vision,
        peak_audio=base + serving + speech,
        peak_both_kept=kept,
        peak_both_released=released,
        peak=max(both, fp.RUNTIME_NBYTES + packed + largest) if on_cpu else ready,
        device_peak=0 if on_cpu else both,
    )


def export_memory(plan: ExportPlan, inputs_nbytes: int, package_nbytes: int, jobs: int) -> ExportMemory:
    """What an export takes: bands at work on every thread, and finished ones that wait to be written."""
    widest = max((stream.band_nbytes for graph in plan.graphs for stream in graph.streams), default=0)
    waiting = widest // 3 * (jobs + 1) if jobs > 1 else 0
    bands = widest if jobs <= 1 else max(widest, min(DEFAULT_MEMORY_LIMIT, jobs * widest + waiting))
    return ExportMemory(plan.nbytes_read, inputs_nbytes, package_nbytes, EXPORT_NBYTES + bands)


def _touched_rows(weights: Sequence[GraphWeights], decoder: fp.DecoderDims, tokens: int) -> int:
    """Pages of the mapped token table that a prompt's rows bring into memory."""
    table = sum(w.mapped for w in weights if w.component is Component.EMBEDDING)
    row = table // decoder.vocab_size + PAGE
    return min(table, tokens * row)
