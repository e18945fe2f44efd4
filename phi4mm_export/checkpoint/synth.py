"""Writing a synthetic checkpoint: safetensors files streamed block by block, the index, and the side files.

The safetensors library can only write tensors that are all in memory; the real model has 11 GB of them. Offsets are
known before any number is drawn, so the header goes first and the numbers follow, a few hundred kilobytes at a time.
The bytes are those `safetensors.numpy.save_file` would write.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phi4mm_export.checkpoint.synth_configs import json_text, side_files
from phi4mm_export.checkpoint.synth_plan import (
    MAIN_FILE,
    PlannedFile,
    StoredTensor,
    planned_files,
    planned_tensors,
)
from phi4mm_export.checkpoint.synth_settings import SynthSettings, WeightStyle
from phi4mm_export.checkpoint.synth_tokenizer import tokenizer_files
from phi4mm_export.checkpoint.synth_values import blocks
from phi4mm_export.spec.model import Layout

HEADER_ALIGNMENT = 8
"""safetensors: the header is padded with spaces, so that the numbers start at a multiple of 8."""
TAG_PREFIX = "phi4mm-oracle"
"""First part of every tensor's tag; a tag names a stream of random numbers, so changing it changes all checkpoints."""

OnBytes = Callable[[int], None]
"""Called with the number of bytes written since the last call."""


@dataclass(frozen=True)
class SynthPlan:
    """Everything about a checkpoint that is known before its first byte."""

    settings: SynthSettings
    layout: Layout
    seed: int
    files: tuple[PlannedFile, ...]

    @property
    def num_tensors(self) -> int:
        return sum(len(file.tensors) for file in self.files)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; headers and side files (8 MB, nearly all of it tokenizer.json) are extra."""
        return sum(tensor.nbytes for file in self.files for tensor in file.tensors)


def plan_checkpoint(settings: SynthSettings, *, layout: Layout, seed: int, weights: WeightStyle) -> SynthPlan:
    """Names, shapes, types and files of a checkpoint; draws no number."""
    return SynthPlan(settings, layout, seed, planned_files(settings, layout, planned_tensors(settings, weights)))


def write_checkpoint(plan: SynthPlan, folder: Path, on_bytes: OnBytes) -> tuple[str, ...]:
    """Write all files of `plan` into `folder`, which exists and is empty; returns their paths inside it, sorted."""
    written = []
    for file in plan.files:
        path = folder / file.path
        path.parent.mkdir(exist_ok=True)
        write_safetensors(path, file.tensors, plan.seed, on_bytes)
        written.append(file.path)
    for name, text in _text_files(plan):
        with (folder / name).open("w", encoding="utf-8", newline="\n") as out:
            out.write(text)
        written.append(name)
    return tuple(sorted(written))


def write_safetensors(path: Path, tensors: tuple[StoredTensor, ...], seed: int, on_bytes: OnBytes) -> None:
    """Write one file. Memory does not grow with the size of the tensors (one block and one table of numbers)."""
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.nbytes, tensor.name))
    with path.open("wb") as out:
        out.write(safetensors_header(ordered))
        for tensor in ordered:
            tag = f"{TAG_PREFIX}/{seed}/{tensor.plan.name}"
            for block in blocks(tag, tensor.plan.shape, tensor.plan.numbers, tensor.dtype.numpy):
                out.write(block.view(np.uint8).data)
                on_bytes(block.nbytes)


def safetensors_header(tensors: list[StoredTensor]) -> bytes:
    """Length and header of a file that holds `tensors` in this order.

    Source: the format section of the safetensors README; the order (wide types first, then by name) and the spelling
    of the JSON are those of the library's own writer.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.plan.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _text_files(plan: SynthPlan) -> Iterator[tuple[str, str]]:
    shards = [file for file in plan.files if "/" not in file.path]
    if [file.path for file in shards] != [MAIN_FILE]:
        yield "model.safetensors.index.json", json_text(_index(shards))
    yield from side_files(plan.settings, plan.layout)
    yield from tokenizer_files(plan.settings.vocab_size)


def _index(shards: list[PlannedFile]) -> dict[str, object]:
    where = {tensor.name: file.path for file in shards for tensor in file.tensors}
    total = sum(tensor.nbytes for file in shards for tensor in file.tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
