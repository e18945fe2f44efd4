"""A hub model built without a copy of its weights on disk: the same bytes as from a fetched one, manifest included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.hub_server import Hub, serving

from phi4mm_export.errors import UsageError
from phi4mm_export.pipeline.build import BuildSettings, build

MODEL, RECIPE = "someone/model", "cpu-int8"
MIB = 1 << 20


def _build(hub: Hub, folder: Path, home: str, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads HF_* when it is imported."""
    settings = {"HF_HOME": str(folder / home), "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-m", "phi4mm_export", *words]
    return subprocess.run(command, cwd=folder, env={**keep, **settings}, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.subprocess
def test_a_streamed_build_has_every_byte_of_one_from_a_fetched_model(tiny_checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")
    with serving(Hub(MODEL, tiny_checkpoint)) as hub:
        streamed = _build(hub, tmp_path, "first", "build", RECIPE, "--model", MODEL, "-o", "a", "--stream", "-q")
        fetched = _build(hub, tmp_path, "second", "build", RECIPE, "--model", MODEL, "-o", "b", "-q")
        again = _build(hub, tmp_path, "first", "rebuild", "a", "--stream")
    assert (streamed.returncode, fetched.returncode) == (0, 0), streamed.stderr + fetched.stderr
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert again.stdout.startswith("same bytes: "), again.stderr
    cached = sum(path.stat().st_size for path in (tmp_path / "first").rglob("*") if path.is_file())
    assert cached < 10 * MIB


def test_a_streamed_model_cannot_be_compared_with_and_the_sentence_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no weights on disk .* --against none"):
        build(
            RECIPE,
            tmp_path / "package",
            model=MODEL,
            set_values=["evaluate.against=model"],
            settings=BuildSettings(stream=True),
        )
