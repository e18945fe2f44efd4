"""The oracle's own check of our packages, run as its owners run it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from phi4mm_export.checkpoint.synth_settings import Size
from phi4mm_export.pipeline.synth import synth

pytestmark = [pytest.mark.shared, pytest.mark.subprocess]

CheckpointOf = Callable[[str], Path]
PackageOf = Callable[[str, str, bool], Path]
DEFAULT_FORM_CASES = "e2e,decoder_limit,vision_,speech_,embedding"
"""Without underscores the names would also match `decoder_short.vision`, which reads logits of earlier rows."""


def check(shared: Path, package: Path, checkpoint: Path, *options: str) -> list[str]:
    """What check.py does not pass, and its last line; an empty list if all is well."""
    command = [sys.executable, str(shared / "oracle" / "check.py"), str(package), str(checkpoint), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    return failed or ([] if result.returncode == 0 else [result.stdout[-500:] + result.stderr[-500:]])


@pytest.mark.parametrize("form", ["gated", "merged"])
def test_a_full_logits_package_passes_the_quick_check(
    shared: Path, oracle_checkpoint: CheckpointOf, oracle_package: PackageOf, form: str
) -> None:
    package = oracle_package(form, "original", True)
    assert check(shared, package, oracle_checkpoint("original"), "--quick") == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", ["original", "native"])
@pytest.mark.parametrize("form", ["gated", "merged", "branch", "adapters"])
def test_a_full_logits_package_passes_every_golden(
    shared: Path, oracle_checkpoint: CheckpointOf, oracle_package: PackageOf, form: str, layout: str
) -> None:
    package = oracle_package(form, layout, True)
    assert check(shared, package, oracle_checkpoint(layout), "--all", "--og") == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", ["gated", "merged", "branch"])
def test_the_default_form_passes_under_og(
    shared: Path, oracle_checkpoint: CheckpointOf, oracle_package: PackageOf, form: str
) -> None:
    package = oracle_package(form, "original", False)
    options = ("--og", "--only", DEFAULT_FORM_CASES)
    assert check(shared, package, oracle_checkpoint("original"), *options) == []


def test_the_oracle_size_of_synth_is_the_oracle_s_checkpoint(oracle_checkpoint: CheckpointOf, tmp_path: Path) -> None:
    synth(tmp_path / "ours", size=Size.ORACLE)
    theirs = oracle_checkpoint("original")
    names = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert names
    assert all((tmp_path / "ours" / name).read_bytes() == (theirs / name).read_bytes() for name in names)
