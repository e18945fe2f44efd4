"""Deliberate mistakes in the original arithmetic: the golden meant for each notices it, far above its tolerance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phi4mm_export.checks.goldens import read_goldens, sample_errors
from phi4mm_export.checks.numerics import Precision, tolerance_of
from phi4mm_export.checks.sampling import sample_all

torch = pytest.importorskip("torch", reason='needs torch: pip install "phi4mm[reference]"')
pytestmark = pytest.mark.reference

GOLDENS = read_goldens(Path(__file__).resolve().parent.parent / "goldens")
CASES = {case.name: case for case in GOLDENS.cases}
FAR = 3.0
"""An error this many times the tolerance counts as noticed."""

functional = torch.nn.functional


def positions_in_order(_: Any, real: Any) -> Any:
    return torch.arange(1024).expand(len(real), 1024)


def bias_of_the_transposed(_: Any, length: int) -> Any:
    position = torch.arange(length)
    return position[:, None] - position[None]


def unit_scores(_: Any, scores: Any, keys: Any) -> Any:
    return torch.softmax(scores + keys.to(scores.dtype), -1)


def no_crop(_: Any, __: Any, grid: tuple[int, int]) -> tuple[int, int]:
    return grid[0] * 16, grid[1] * 16


MISTAKES: list[tuple[str, str, str, Callable[..., Any]]] = [
    ("vision_grid", "vision.Vision", "position_ids", positions_in_order),
    ("vision_grid", "vision.Vision", "attended", lambda _, real: torch.ones_like(real.flatten(1))),
    ("vision_grid", "vision.Vision", "layers", lambda self: self.dims.num_layers),
    ("vision_grid", "vision.Vision", "activation", lambda _, x: functional.gelu(x)),
    ("vision_grid", "vision.Vision", "order", lambda _, tiles, middle, whole: [whole, middle, tiles]),
    ("vision_grid", "vision.Vision", "real_size", no_crop),
    ("vision_grid", "vision.Vision", "projection_activation", lambda _, x: functional.gelu(x, approximate="tanh")),
    ("speech_one", "speech.Speech", "normalise", lambda _, frames: frames),
    ("speech_501", "speech.Speech", "chunk", lambda _, length: length),
    ("speech_two", "speech.Speech", "attended", lambda _, real: torch.ones_like(real)),
    ("speech_two", "speech.Speech", "masked_softmax", unit_scores),
    ("speech_one", "speech.Speech", "relative", bias_of_the_transposed),
    ("speech_one", "speech.Speech", "halves", lambda _, x: x.chunk(2, -1)[::-1]),
    ("speech_one", "speech.Speech", "convolution_padding", lambda _: (1, 1)),
    ("speech_one", "speech.Speech", "projection_activation", lambda _, x: functional.gelu(x, approximate="tanh")),
    ("decoder_split.vision", "decoder.Decoder", "lora_scale", lambda *_: 1.0),
    ("decoder_split.none", "decoder.Decoder", "rope_scale", lambda _: 1.0),
    ("decoder_split.none", "decoder.Decoder", "halves", lambda _, x: x.chunk(2, -1)[::-1]),
    ("decoder_limit1.vision", "decoder.Decoder", "rope_factor", lambda self, _: self.config.rope.short_factor),
    ("decoder_limit.vision", "decoder.Decoder", "rope_factor", lambda self, _: self.config.rope.long_factor),
]


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Any:
    from phi4mm_export.oracle.reference import Reference

    return Reference.open(tiny_checkpoint, "float32")


@pytest.mark.parametrize(("name", "where", "step", "wrong"), MISTAKES, ids=[f"{m[1]}.{m[2]}" for m in MISTAKES])
def test_a_mistake_is_noticed(
    reference: Any, monkeypatch: pytest.MonkeyPatch, name: str, where: str, step: str, wrong: Callable[..., Any]
) -> None:
    monkeypatch.setattr(f"phi4mm_export.oracle.{where}.{step}", wrong)
    case = CASES[name]
    got = sample_all(case.run(reference, None), GOLDENS.vocab_size)
    found = sample_errors(got, GOLDENS.arrays[name])
    tolerance = tolerance_of(Precision.FP32, case.group.value, long=case.long)
    assert found.fault or found.of(tolerance.measure) > FAR * tolerance.limit
