"""Every case constructor of the shared handout that touches export, config, validate, run or inspect.

Each row applies one fault to a copy and runs the commands that meet it: the expected exit code, and words the message
must hold. A word in braces is filled from what the constructor says it did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.shared, pytest.mark.subprocess]

BuildOnce = Callable[[str, Callable[[Path], object]], Path]
EXPORT, INSPECT, VALIDATE = ("export", "{new}", "-o", "{out}"), ("inspect", "{new}"), ("validate", "{new}")


@dataclass(frozen=True)
class Row:
    """One command on one damaged input; `extra` follows the command."""

    case: str
    command: tuple[str, ...]
    exit_code: int
    words: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return " ".join([self.case, self.command[0], *(word for word in self.extra if "{" not in word)])


ROWS = [
    Row("A1", EXPORT, 3, ("{file}", "LFS", "{expected_size}")),
    Row("A1", INSPECT, 3, ("{file}", "LFS")),
    Row("A2", EXPORT, 3, ("{file}", "{tensors_lost}", "index")),
    Row("A3", EXPORT, 0),
    Row("A4", EXPORT, 0, ("{tensor}", "{stale}")),
    Row("A4b", EXPORT, 3, ("{tensor}", "{mapped}", "{stale}")),
    Row("A5", EXPORT, 3, ("{file}", "{expected_size}", "{found_size}")),
    Row("A5", INSPECT, 3, ("{file}", "{found_size}")),
    Row("A6", EXPORT, 3, ("{tensor}", "2")),
    Row("A6b", EXPORT, 3, ("{tensor}",)),
    Row("A7", EXPORT, 4, ("{tensor}", "98"), ("--ep", "cuda")),
    Row("A7", EXPORT, 0),
    Row("A8", EXPORT, 0, ("no adapter",)),
    Row("A8", EXPORT, 3, ("vision",), ("--lora", "merged", "--adapter", "vision")),
    Row("A9", EXPORT, 0, ("speech",)),
    Row("A9", EXPORT, 3, ("{adapter}",), ("--lora", "merged", "--adapter", "speech")),
    Row("A9", INSPECT, 0, ("vision",)),
    Row("A10", EXPORT, 0, (), ("--lora", "merged", "--adapter", "vision", "--adapter-path", "{new}/{adapter}")),
    Row("A11", EXPORT, 3, ("{key}",), ("--adapter-path", "vision={new}/{adapter}")),
    Row("A12", EXPORT, 3, ("{tensor}", "{key}")),
    Row("A12", EXPORT, 0, (), ("--head", "stored")),
    Row("A13", EXPORT, 3, ("{key}", "{rows}")),
    Row("A13b", EXPORT, 0),
    Row("A14", EXPORT, 3, ("{token}", "{was}", "{now}")),
    Row("A15", EXPORT, 0),
    Row("A16", EXPORT, 0),
    Row("A17", EXPORT, 0),
    Row("A17", INSPECT, 0),
    Row("A18", VALIDATE, 0),
    Row("A18", INSPECT, 0),
    Row("A19", EXPORT, 0),
    Row("A20", EXPORT, 0),
    Row("A21", VALIDATE, 4, ("{missing}", "{present}")),
    Row("A22", ("inspect", "{new}/{graph}"), 0),
    Row("A23", VALIDATE, 4, ("device_id", "1", '"0"')),
    Row("A24", VALIDATE, 4, ("{key}", "131073", "131072")),
    Row("A25", EXPORT, 0),
    Row("A32", VALIDATE, 0, ("{file}", "{orphaned}")),
    Row("A32", INSPECT, 0, ("{orphaned}",)),
]


def phi4mm(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "2000", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "phi4mm_export", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def gated(built_once: BuildOnce, tiny_checkpoint: Path) -> Path:
    from phi4mm_export.pipeline.export import export

    return built_once("shared-gated", lambda folder: export(tiny_checkpoint, folder))


@pytest.fixture
def damage(
    shared: Path, tmp_path: Path, tiny_checkpoint: Path, gated: Path
) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """Apply one case to a copy: the damaged path, and what the constructor says about it."""

    def apply(case: str) -> tuple[Path, dict[str, Any]]:
        script = str(shared / "cases" / "make_cases.py")
        kinds = dict(line.split() for line in output_of(script, "list").splitlines())
        sources = {"checkpoint": [str(tiny_checkpoint)], "package": [str(gated)], "folder": []}[kinds[case]]
        new = tmp_path / "new"
        note = json.loads(output_of(script, case, *sources, str(new)))
        return (new.with_name(note["path"]) if case == "A19" else new), note

    return apply


def output_of(script: str, *words: str) -> str:
    return subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=True).stdout


def without_commas(text: str) -> str:
    """Numbers as digits alone, so that 1,234 and 1234 are the same word."""
    return text.replace(",", "")


@pytest.mark.parametrize("row", ROWS, ids=[row.label for row in ROWS])
def test_a_case_of_the_handout(damage: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path, row: Row) -> None:
    new, note = damage(row.case)
    out = tmp_path / "out"
    names = {**note, "new": str(new), "out": str(out)}
    result = phi4mm(*(word.format(**names) for word in (*row.command, *row.extra)), folder=tmp_path)
    said = result.stdout + result.stderr
    assert result.returncode == row.exit_code, said
    assert "Traceback" not in said
    missing = [word for word in row.words if without_commas(word.format(**names)) not in without_commas(said)]
    assert missing == [], said
    if row.command is EXPORT:
        assert out.exists() == (row.exit_code == 0)


def test_a3_fewer_crops_reach_the_processor(
    damage: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    new, _ = damage("A3")
    assert phi4mm("export", str(new), "-o", "out", folder=tmp_path).returncode == 0
    assert (
        '"max_num_crops": 12' in (tmp_path / "out" / "vision_processor.json").read_text()
        or "12" in (tmp_path / "out" / "vision_processor.json").read_text()
    )


def test_a25_the_turn_s_end_is_found_through_the_tokenizer(
    damage: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    new, _ = damage("A25")
    assert phi4mm("export", str(new), "-o", "out", folder=tmp_path).returncode == 0
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert config["model"]["eos_token_id"] == [200020, 199999]


@pytest.mark.parametrize("case", ["A4", "A16", "A17", "A19"])
def test_what_changes_no_weight_changes_no_byte(
    damage: Callable[[str], tuple[Path, dict[str, Any]]], gated: Path, tmp_path: Path, case: str
) -> None:
    new, _ = damage(case)
    assert phi4mm("export", "-o", "out", "--", str(new), folder=tmp_path).returncode == 0
    for graph in gated.glob("*.onnx*"):
        assert (tmp_path / "out" / graph.name).read_bytes() == graph.read_bytes(), graph.name


@pytest.mark.parametrize(
    ("value", "accepted"), [([200020, 199999, 199999], True), ([199999, 200020], True), (300000, False), ("end", False)]
)
def test_a25_variants_of_the_stop_ids(tiny_checkpoint: Path, tmp_path: Path, value: object, accepted: bool) -> None:
    import shutil

    new = tmp_path / "new"
    shutil.copytree(tiny_checkpoint, new)
    (new / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    result = phi4mm("export", str(new), "-o", "out", folder=tmp_path)
    assert result.returncode == (0 if accepted else 3), result.stderr
    if accepted:
        config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
        assert sorted(config["model"]["eos_token_id"]) == [199999, 200020]
    else:
        assert "eos_token_id" in result.stderr
        assert "generation_config.json" in result.stderr


@pytest.mark.parametrize("case", ["A28"])
def test_undecodable_pictures_are_named_and_end_nothing(
    damage: Callable[[str], tuple[Path, dict[str, Any]]], gated: Path, tmp_path: Path, case: str
) -> None:
    new, _ = damage(case)
    broken = sorted(path for path in new.iterdir() if path.suffix in {".jpg", ".png"})
    assert broken
    for path in broken:
        words = ("run", str(gated), "--prompt", "x", "--image", str(path), "--max-new-tokens", "1")
        result = phi4mm(*words, folder=tmp_path)
        assert result.returncode in (0, 2), result.stderr
        assert "Traceback" not in result.stderr
        if result.returncode:
            assert path.name in result.stderr
