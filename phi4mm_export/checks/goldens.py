"""Stored goldens: which cases there are, and a package compared with them. Needs onnxruntime, no torch.

`scripts/make_goldens.py` derives them in float64 from the PyTorch reference and the tiny synthetic checkpoint. They
hold for packages of that checkpoint only; other models are compared live (`checks/parity.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phi4mm_export.checks.cases import (
    ASSISTANT,
    CHAIN_STEPS,
    END,
    OVER_LIMIT,
    SHORT_STEPS,
    USER,
    Adapters,
    Array,
    Case,
    Graphs,
    Inputs,
    batch_case,
    bell,
    chain_case,
    embedding_case,
    made_clips,
    made_images,
    speech_case,
    split_case,
    suffix,
    text_case,
    text_ids,
    vision_case,
)
from phi4mm_export.checks.numerics import Errors, Precision, clear_margin, errors, tolerance_of, worst
from phi4mm_export.checks.package_graphs import PackageGraphs, case_precision, precisions
from phi4mm_export.checks.parity_table import ParityRow, ParityTable
from phi4mm_export.checks.sampling import margins, sample_all
from phi4mm_export.errors import UsageError
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.model import AUDIO_TOKEN_ID, IMAGE_TOKEN_ID, Role
from phi4mm_export.spec.on_disk import is_file

MANIFEST, INPUTS = "manifest.json", "inputs.npz"
ADAPTERS: Adapters = (None, Role.VISION, Role.SPEECH)
SHORT_TAGS = {None: "short53", Role.VISION: "short52", Role.SPEECH: "short54"}
"""Prompts whose greedy tokens win clearly in the tiny checkpoint."""
CHAIN_ADAPTERS: Mapping[str, Adapters] = {
    "text": (None, Role.VISION, Role.SPEECH),
    "image": (Role.VISION, None),
    "two_images": (Role.VISION,),
    "image_turn": (Role.VISION,),
    "audio": (Role.SPEECH, Role.VISION, None),
    "two_clips": (Role.SPEECH,),
    "audio_turn": (Role.SPEECH,),
    "long_clip": (Role.SPEECH,),
    "both": (Role.VISION, None),
}
"""Requests through all graphs; the first adapter is the original's own choice, the others tell forms apart."""
TWO_TURNS = ("image", "audio")
"""Requests that also exist with a second turn, whose pictures and clips are stored once."""
IDS = ("top_ids", "tokens")
"""Ends of arrays that hold ids, not numbers."""


@dataclass(frozen=True)
class Goldens:
    """The stored numbers: `arrays[case][name]`, processed requests `inputs[name]`, and manifest.json."""

    arrays: Mapping[str, Mapping[str, Array]]
    inputs: Mapping[str, Inputs]
    manifest: Mapping[str, Any]

    @property
    def cases(self) -> list[Case]:
        """Every case whose inputs are stored or made of seeded numbers."""
        model = self.manifest["model"]
        return golden_cases(self.inputs, hidden_size=model["hidden_size"], limit=model["original_max_positions"])

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["model"]["vocab_size"])


def read_goldens(folder: Path) -> Goldens:
    """Read a folder of goldens; UsageError if it holds none."""
    if not is_file(folder / MANIFEST):
        raise UsageError(f"expected a folder with {MANIFEST}, found none", where=str(folder), fix="run: make goldens")
    stored: dict[str, dict[str, Array]] = {}
    inputs: dict[str, dict[str, Array]] = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            for key in file.files:
                case, _, name = key.partition("/")
                (inputs if path.name == INPUTS else stored).setdefault(case, {})[name] = file[key]
    for name, first in ((f"{turn}_turn", turn) for turn in TWO_TURNS):
        inputs[name] = {**inputs[first], **inputs[name]}
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return Goldens(stored, inputs, manifest)


def golden_cases(inputs: Mapping[str, Inputs], *, hidden_size: int, limit: int) -> list[Case]:
    """All cases: og's processor outputs by request name where stored, and inputs made of seeded numbers.

    limit: the longest total length that still takes the short LongRoPE factors.
    """
    return [
        *_vision_cases(inputs),
        *_speech_cases(inputs),
        *_embedding_cases(hidden_size),
        *_decoder_cases(limit),
        *(
            chain_case(name, inputs[name], adapter, steps=CHAIN_STEPS)
            for name, adapters in CHAIN_ADAPTERS.items()
            if name in inputs
            for adapter in adapters
        ),
    ]


def _vision_cases(inputs: Mapping[str, Inputs]) -> Iterable[Case]:
    for name, request in (("vision_wide", "image"), ("vision_two", "two_images")):
        if request in inputs:
            yield vision_case(name, inputs[request])
    yield vision_case("vision_grid", made_images("grid", [((2, 2), (45, 64))]))
    yield vision_case(
        "vision_batch", made_images("batch", [((1, 3), (32, 65)), ((2, 1), (47, 32)), ((1, 1), (32, 32))])
    )


def _speech_cases(inputs: Mapping[str, Inputs]) -> Iterable[Case]:
    if "audio" in inputs:
        yield speech_case("speech_one", inputs["audio"], (0, 1, 2, 3))
    if "two_clips" in inputs:
        yield speech_case("speech_two", inputs["two_clips"], (2, 3))
    made: tuple[tuple[str, Sequence[int], Sequence[int]], ...] = (
        ("speech_45s", (4498,), (2,)),
        ("speech_mixed", (4498, 300), (3,)),
        ("speech_500", (4000,), (2,)),
        ("speech_501", (4001,), (2,)),
        ("speech_1000", (8000,), (2,)),
        ("speech_tiny", (5,), (2,)),
        ("speech_batch", (61, 200, 9), (3,)),
    )
    for name, frames, modes in made:
        yield speech_case(name, made_clips(name, frames), modes)


def _embedding_cases(hidden: int) -> Iterable[Case]:
    image, audio = np.full(5, IMAGE_TOKEN_ID), np.full(4, AUDIO_TOKEN_ID)
    both = np.concatenate([[USER], image, text_ids("embedding/a", 3), audio, [END]])
    batch = np.stack(
        [
            np.concatenate([text_ids("embedding/b", 2), image[:3], text_ids("embedding/c", 4)]),
            np.concatenate([image[:2], text_ids("embedding/d", 5), audio[:2]]),
        ]
    )
    legacy = np.array([USER, -1, -9999, 7, -10000, -20000, END])
    empty = np.zeros((0, hidden), np.float32)
    yield embedding_case("embedding_text", text_ids("embedding/t", 9)[None], empty, empty)
    for name, ids, images, audios in (
        ("embedding_both", both[None], 5, 4),
        ("embedding_batch", batch, 5, 2),
        ("embedding_legacy", legacy[None], 2, 2),
    ):
        yield embedding_case(
            name, ids, bell(f"{name}/image", (images, hidden)), bell(f"{name}/audio", (audios, hidden))
        )


def short_ids(adapter: Role | None) -> Array:
    """24 tokens in chat form."""
    return np.concatenate([[USER], text_ids(SHORT_TAGS[adapter], 21), [END, ASSISTANT]]).astype(np.int64)


def _decoder_cases(limit: int) -> Iterable[Case]:
    longer = np.concatenate([[USER], text_ids("pad", 12), [END, ASSISTANT]]).astype(np.int64)
    for adapter in ADAPTERS:
        ids = short_ids(adapter)
        whole = np.concatenate([[USER], text_ids(f"long/{suffix(adapter)}", limit + OVER_LIMIT - 1)]).astype(np.int64)
        yield text_case("decoder_short", ids, adapter, steps=SHORT_STEPS, rows=(-1, -17, -24))
        yield split_case("decoder_split", ids, adapter, 16)
        yield batch_case(f"decoder_pad.{suffix(adapter)}", [ids, longer], [adapter, adapter])
        yield text_case("decoder_long", whole, adapter, steps=2, rows=(-1, -2), long=True)
        if adapter is Role.VISION:
            yield text_case("decoder_limit", whole[:limit], adapter, steps=0, long=True)
            yield text_case("decoder_limit1", whole[: limit + 1], adapter, steps=0, long=True)
    yield batch_case("decoder_modes", [short_ids(None), longer, short_ids(Role.SPEECH)[:20]], ADAPTERS)


# --------------------------------------------------------------------------------------------- a package against them


def golden_table(
    package: Path | str,
    goldens: Path | str,
    *,
    quick: bool = False,
    only: Callable[[Case], bool] | None = None,
    provider: Provider = Provider.CPU,
    threads: int | None = None,
) -> ParityTable:
    """Run a package of the tiny checkpoint on every stored case; `quick` leaves out prompts over 4,000 tokens."""
    stored = read_goldens(Path(goldens))
    graphs = PackageGraphs(Path(package), provider=provider, threads=threads)
    formats = precisions(Path(package))
    held = held_adapters(graphs, stored)
    rows = []
    for case in stored.cases:
        if (quick and case.long) or (only and not only(case)) or not _can_ask(graphs, case):
            continue
        rows.append(compare(case, graphs, stored, formats, held))
    return ParityTable(tuple(rows), "the stored goldens")


def compare(
    case: Case,
    graphs: Graphs,
    stored: Goldens,
    formats: Mapping[Component, Precision],
    held: frozenset[Role | None],
) -> ParityRow:
    """One case of a package against its golden."""
    want = stored.arrays[case.name]
    got = sample_all(case.run(graphs, want.get("tokens")), stored.vocab_size)
    precision = case_precision(case.group, formats)
    wrong, clear = wrong_tokens(got, want, precision)
    return ParityRow(
        graph=case.group.value,
        mode=case.mode,
        case=case.name,
        precision=precision,
        errors=sample_errors(got, want),
        tolerance=tolerance_of(precision, case.group.value, long=case.long),
        held=set(case.adapters) <= held,
        wrong_tokens=wrong,
        clear_tokens=clear,
    )


def sample_errors(got: Mapping[str, Array], want: Mapping[str, Array]) -> Errors:
    """The worst figures over all arrays of a golden; rows that a last-logits graph does not give are left out."""
    listed = []
    for name, expected in want.items():
        if name.endswith(IDS):
            continue
        found = got.get(name)
        if found is None:
            return errors(np.zeros(0), expected)
        if name.startswith("prefill_") and not name.endswith("kv") and 0 < len(found) < len(expected):
            expected = expected[: len(found)]
        listed.append(errors(found, expected))
    return worst(listed)


def wrong_tokens(got: Mapping[str, Array], want: Mapping[str, Array], precision: Precision) -> tuple[int, int]:
    """Greedy tokens that differ, and how many were clear: those whose lead exceeds the noise of the precision."""
    if "tokens" not in want:
        return 0, 0
    lead = np.concatenate([margins(want, "prefill_")[:1], margins(want, "step_")])
    clear = lead > clear_margin(precision)
    return int(((got["tokens"] != want["tokens"]) & clear).sum()), int(clear.sum())


def held_adapters(graphs: PackageGraphs, stored: Goldens) -> frozenset[Role | None]:
    """The adapters a package runs with: on demand, or the one whose golden its bare decoder comes nearest to."""
    if graphs.chooses is not None:
        return graphs.chooses
    distance: dict[Role | None, float] = {}
    for case in stored.cases:
        if case.name.startswith("decoder_split"):
            got = sample_all(case.run(graphs, None), stored.vocab_size)
            distance[case.adapters[0]] = sample_errors(got, stored.arrays[case.name]).relative_l2
    return frozenset({min(distance, key=lambda adapter: distance[adapter])})


def _can_ask(graphs: PackageGraphs, case: Case) -> bool:
    """Whether a package can be asked for the case: a gated decoder cannot be made to run a request with a foreign
    adapter, and only a gated one can give the rows of a batch different adapters.
    """
    return not case.foreign if graphs.package.gated else len(set(case.adapters)) <= 1
