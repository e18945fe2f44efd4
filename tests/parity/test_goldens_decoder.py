"""Decoders of every LoRA form, alone and in a chain of all graphs, against the stored PyTorch goldens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from phi4mm_export.checks.cases import Case, Group, InputMode
from phi4mm_export.checks.goldens import golden_table
from phi4mm_export.checks.parity_table import ParityTable
from phi4mm_export.spec.model import Role

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
PackageOf = Callable[[str], Path]


def decodes(case: Case) -> bool:
    return case.group in (Group.DECODER, Group.CHAIN) and not case.name.startswith("two_images")


def short(case: Case) -> bool:
    return decodes(case) and not case.long


def decoder_alone(case: Case) -> bool:
    return short(case) and case.group is Group.DECODER


def one_request_of_each_mode(case: Case) -> bool:
    return short(case) and (case.group is Group.DECODER or case.name.partition(".")[0] in set(InputMode))


def failures(table: ParityTable) -> list[str]:
    return [line for line in table.lines()[1:] if "pass" not in line]


def test_one_gated_package_is_right_in_all_four_modes(package_of: PackageOf) -> None:
    table = golden_table(package_of("last-logits"), GOLDENS, only=short)
    assert failures(table) == []
    assert {row.mode for row in table.rows if row.graph == "chain"} == set(InputMode)
    assert all(row.clear_tokens == 17 for row in table.rows if row.graph == "chain")


def test_logits_of_every_position_are_right_too(package_of: PackageOf) -> None:
    table = golden_table(package_of("gated"), GOLDENS, only=decoder_alone)
    assert failures(table) == []
    assert len(table.rows) == 10


def test_both_sides_of_the_longrope_switch_are_right_with_either_adapter(package_of: PackageOf) -> None:
    table = golden_table(package_of("last-logits"), GOLDENS, only=lambda case: case.long)
    assert failures(table) == []
    assert {row.case.partition(".")[0] for row in table.rows} == {"decoder_long", "decoder_limit", "decoder_limit1"}


def test_rows_of_one_batch_may_differ_in_mode(package_of: PackageOf) -> None:
    table = golden_table(package_of("gated"), GOLDENS, only=lambda case: case.name == "decoder_modes")
    assert [row.verdict for row in table.rows] == ["pass"]


@pytest.mark.parametrize("form", ["merged", "branch"])
def test_a_package_with_one_adapter_is_right_where_the_original_uses_it_and_nowhere_else(
    package_of: PackageOf, form: str
) -> None:
    table = golden_table(package_of(form), GOLDENS, only=one_request_of_each_mode)
    assert table.ok
    verdicts = {row.case: row.verdict for row in table.rows if row.graph == "chain"}
    right = {case for case, verdict in verdicts.items() if verdict == "pass"}
    assert right == {case for case in verdicts if case.endswith(".vision")}
    assert {case for case in verdicts if verdicts[case] == "differs"} == set(verdicts) - right


def test_adapter_files_make_the_bare_decoder_the_adapter_s(package_of: PackageOf) -> None:
    table = golden_table(package_of("adapters"), GOLDENS, only=decoder_alone)
    assert failures(table) == []
    assert {case.partition(".")[2] for case in (row.case for row in table.rows)} == {"none", *Role}


def test_a_float16_package_stays_within_the_stated_error(package_of: PackageOf) -> None:
    table = golden_table(package_of("fp16"), GOLDENS, only=one_request_of_each_mode)
    assert failures(table) == []
    assert max(row.errors.relative_l2 for row in table.rows if row.graph == "decoder") <= 1.5e-2


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_quantized_package_is_judged_by_its_own_tolerance(package_of: PackageOf, precision: str) -> None:
    table = golden_table(package_of(precision), GOLDENS, only=decoder_alone)
    assert failures(table) == []
    assert {row.precision for row in table.rows} == {precision}
