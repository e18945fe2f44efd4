"""The stored goldens, derived again in float64 from a freshly made checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from phi4mm_export.checks.goldens import Goldens, read_goldens
from phi4mm_export.checks.sampling import sample_all

torch = pytest.importorskip("torch", reason='needs torch: pip install "phi4mm[reference]"')
pytestmark = pytest.mark.reference

GOLDENS = read_goldens(Path(__file__).resolve().parent.parent / "goldens")
CASES = {case.name: case for case in GOLDENS.cases}
LAST_BIT = 1e-5
"""float64 sums differ between CPUs in their last bits; what is stored is float32."""


@pytest.fixture(scope="module")
def stored() -> Goldens:
    return GOLDENS


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> object:
    from phi4mm_export.oracle.reference import Reference

    return Reference.open(tiny_checkpoint, "float64")


def test_the_checkpoint_is_the_one_the_goldens_were_made_from(tiny_checkpoint: Path, stored: Goldens) -> None:
    found = {
        name: hashlib.sha256((tiny_checkpoint / name).read_bytes()).hexdigest()
        for name in stored.manifest["checkpoint"]
    }
    assert found == stored.manifest["checkpoint"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if c.long else ()) for n, c in CASES.items()])
def test_a_case_derived_again_equals_its_golden(reference: object, stored: Goldens, name: str) -> None:
    derived = sample_all(CASES[name].run(reference, None), stored.vocab_size)  # type: ignore[arg-type]
    assert derived.keys() == stored.arrays[name].keys()
    for key, golden in stored.arrays[name].items():
        if golden.dtype == np.float32:
            np.testing.assert_allclose(derived[key], golden, rtol=0, atol=LAST_BIT * float(np.abs(golden).max()))
        else:
            np.testing.assert_array_equal(derived[key], golden)


def test_every_stored_case_is_derived_but_the_clip_that_is_not_stored(stored: Goldens) -> None:
    assert set(stored.arrays) - set(CASES) == {"long_clip.speech"}
