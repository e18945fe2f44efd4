"""scripts/measuring.py: rows of a bench outlive the run that measured them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measuring.py"

pytestmark = pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="the bench scripts read /proc")


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("measuring", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "measuring", module)
    spec.loader.exec_module(module)
    return module


def _measure(measuring: ModuleType, file: Path, facts: dict[str, int], names: str) -> list[str]:
    """The names that are measured by a run that asks for a row of each."""
    measured: list[str] = []
    record = measuring.Record(facts, json_file=file, markdown=True)
    for name in names:
        record.row({"name": name}, lambda name=name: measured.append(name) or {"seconds": 1.5, "bytes": 12000})
    return measured


def test_rows_of_an_interrupted_run_are_not_measured_again(measuring: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert _measure(measuring, file, {"rounds": 3}, "ab") == ["a", "b"]
    assert _measure(measuring, file, {"rounds": 3}, "abc") == ["c"]
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["a", "b", "c"]


def test_rows_measured_otherwise_are_dropped(measuring: ModuleType, tmp_path: Path) -> None:
    _measure(measuring, tmp_path / "rows.json", {"rounds": 3}, "ab")
    assert _measure(measuring, tmp_path / "rows.json", {"rounds": 5}, "a") == ["a"]


def test_each_row_is_printed_as_markdown_under_one_head(
    measuring: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _measure(measuring, tmp_path / "rows.json", {}, "ab")
    head = ["| name | seconds | bytes |", "| ---: | ---: | ---: |"]
    assert capsys.readouterr().out.split("\n")[1:] == [*head, "| a | 1.5 | 12,000 |", "| b | 1.5 | 12,000 |", ""]


def test_the_ratio_is_the_median_of_ratios_within_a_round(measuring: ModuleType) -> None:
    assert measuring.paired_ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == 2.0
