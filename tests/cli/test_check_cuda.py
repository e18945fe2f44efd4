"""`scripts/check_cuda.py` on a machine without a GPU says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnxruntime_genai as og
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_cuda.py"


@pytest.mark.subprocess
@pytest.mark.skipif(og.is_cuda_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize(("options", "code"), [((), 0), (("--require",), 6)])
def test_without_a_cuda_device_it_says_so_and_checks_nothing(options: tuple[str, ...], code: int) -> None:
    command = [sys.executable, str(SCRIPT), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (code, "")
    assert result.stdout.startswith("no CUDA device: ")
