"""Vision, speech and embedding graphs against the stored PyTorch goldens, in float32 and float16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from phi4mm_export.checks.cases import Case, Group
from phi4mm_export.checks.goldens import golden_table
from phi4mm_export.checks.numerics import Precision
from phi4mm_export.checks.parity_table import ParityTable

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
TOWERS = (Group.VISION, Group.SPEECH, Group.EMBEDDING)
NUM_TOWER_CASES = 17


def is_tower(case: Case) -> bool:
    return case.group in TOWERS


@pytest.fixture(scope="module", params=["last-logits", "fp16"])
def table(request: pytest.FixtureRequest, package_of: Callable[[str], Path]) -> ParityTable:
    return golden_table(package_of(request.param), GOLDENS, only=is_tower)


def failures(table: ParityTable) -> list[str]:
    return [line for line in table.lines() if "pass" not in line][1:]


def test_every_tower_case_agrees_with_the_original(table: ParityTable) -> None:
    assert failures(table) == []
    assert len(table.rows) == NUM_TOWER_CASES


def test_the_tolerance_is_that_of_the_package_s_float_type(table: ParityTable) -> None:
    assert len({row.precision for row in table.rows}) == 1
    assert table.rows[0].precision in (Precision.FP32, Precision.FP16)
