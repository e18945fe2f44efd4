"""A made-up evaluation that has everything a report can show."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
from PIL import Image

from phi4mm_export.checks.error_maps import error_map, thumbnail
from phi4mm_export.checks.evaluation import (
    Answer,
    Blame,
    ComponentLayers,
    ComponentSize,
    Evaluation,
    Gate,
    ModeRow,
    Picture,
    Sample,
    Swap,
    TextRow,
    summaries,
)
from phi4mm_export.checks.fidelity import Fidelity, TokenFigures
from phi4mm_export.checks.layers import LayerError, LayerImpact
from phi4mm_export.checks.text_probes import FieldHit, TextProbes


def evaluation(*, requests: int = 3, layers: int = 9, notes: tuple[str, ...] = ("a note",)) -> Evaluation:
    """`requests` a mode through vision and decoder; every figure another number."""
    rng = np.random.default_rng(0)
    names = [f"page <{number}> & co.png" for number in range(requests)]
    samples = tuple(_sample(rng, component, name) for component in ("vision", "decoder") for name in names)
    return Evaluation(
        tool_version="0.1.0",
        package="int4 <b>",
        against="float",
        against_kind="checkpoint",
        settings={"provider": "cpu", "max_new_tokens": 32, "seed": 0},
        inputs=f"given: {requests} requests",
        notes=notes,
        preprocessing=("differs as preprocessing: vision_processor.json",),
        sizes=(
            ComponentSize("decoder", 4_221_947, 12_954_906, "int4", "fp32"),
            ComponentSize("vision", 83_216, 832_162, "int8", "fp32"),
        ),
        components=summaries(samples),
        modes=(ModeRow("vision", requests, _tokens(rng), _tokens(rng), 0.375, 1),),
        texts=(TextRow("letter.txt", 61, replace(_tokens(rng), nll=1.37912, nll_float=1.21763)),),
        answers=tuple(_answer(rng, name) for name in names),
        samples=samples,
        layers=(
            ComponentLayers("vision", names[0], tuple(_layer(rng, i) for i in range(layers))),
            ComponentLayers("decoder", names[0], (), "the graphs share no layer names"),
        ),
        blame=(
            Blame(
                names[0],
                "vision",
                (Swap("none", _tokens(rng)), Swap("vision", _tokens(rng))),
                "vision",
                "tower/layers.3/fc2",
                (LayerImpact("tower/layers.3/fc2", 0.31734, 0.27311),),
            ),
        ),
        gates=(Gate("min_cosine", 0.995, 0.91234, "vision", False), Gate("max_kl", 2.5, 1.25361, "vision", True)),
        pictures=(Picture(names[0], 0.21345, thumbnail(_page()), error_map(rng.random((8, 6))), 0.61273),),
    )


def _sample(rng: np.random.Generator, component: str, name: str) -> Sample:
    figures = Fidelity(*(float(x) for x in rng.random(3)), int(rng.integers(300, 900)), int(rng.integers(300)), 0.71133)
    return Sample(component, name, "vision", figures)


def _tokens(rng: np.random.Generator) -> TokenFigures:
    return TokenFigures(int(rng.integers(20, 200)), *(float(x) for x in rng.random(3)))


def _answer(rng: np.random.Generator, name: str) -> Answer:
    hits = (FieldHit("total", "12.50", True, 1.0), FieldHit("date", "14 March", False, float(rng.uniform(0.5, 1))))
    probes = TextProbes("length", 74, 3, 2, 1, 4, hits, float(rng.random()), float(rng.random()))
    text = "<script>alert(1)</script>\nTotal 12.50"
    return Answer(name, "vision", 577, _tokens(rng), 19, 21, 7, text, "Total 12.50", probes, probes)


def _layer(rng: np.random.Generator, index: int) -> LayerError:
    made, accumulated = (float(x) for x in rng.random(2) * 0.1)
    return LayerError(f"tower/layers.{index}/fc1", "MatMulNBits", 4, 4000 + index, 32000 + index, made, accumulated)


def _page() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (300, 200, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()
