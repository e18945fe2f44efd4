"""transformers' own model agrees with our reference wherever the two are meant to agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phi4mm_export.checks.cases import Case, made_clips, made_images, speech_case, text_case, text_ids, vision_case
from phi4mm_export.checks.numerics import errors
from phi4mm_export.errors import UsageError
from phi4mm_export.spec.model import Role

pytest.importorskip("torch", reason='needs torch: pip install "phi4mm[reference]"')
pytest.importorskip("transformers", reason='needs transformers: pip install "phi4mm[reference]"')
pytest.importorskip("peft", reason='needs peft: pip install "phi4mm[reference]"')
pytestmark = pytest.mark.reference

WITNESS = 4e-5
"""Largest difference over rms, float32 against float64, over all cases measured."""
CASES = [
    vision_case("padded image", made_images("witness", [((1, 2), (31, 45))])),
    vision_case("whole image", made_images("witness", [((1, 1), (32, 32))])),
    speech_case("one clip", made_clips("witness", [500]), (2, 3)),
    speech_case("500 subsampled frames", made_clips("witness", [4000]), (2,)),
    *(text_case("text", text_ids("witness", 24), adapter, steps=8, rows=(-1, -24)) for adapter in (None, *Role)),
    text_case("beyond the switch", text_ids("witness", 4097), None, steps=0, long=True),
]


@pytest.fixture(scope="module")
def witness(tiny_native: Path) -> Any:
    from phi4mm_export.oracle.native import NativeWitness

    return NativeWitness(tiny_native)


@pytest.fixture(scope="module")
def reference(tiny_native: Path) -> Any:
    from phi4mm_export.oracle.reference import Reference

    return Reference.open(tiny_native, "float64")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_transformers_agrees(witness: Any, reference: Any, case: Case) -> None:
    want = case.run(reference, None)
    got = case.run(witness, want.get("tokens"))
    assert {name: errors(got[name], want[name]).peak <= WITNESS for name in want} == dict.fromkeys(want, True)


def test_padded_clips_are_refused_because_transformers_does_not_mask_them(witness: Any) -> None:
    with pytest.raises(UsageError, match="does not mask padded audio"):
        speech_case("two clips", made_clips("witness", [500, 61]), (2,)).run(witness, None)
