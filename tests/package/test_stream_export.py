"""A hub model exported without a copy of its weights on disk: the same bytes as from a folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import Hub, serving
from typer.testing import CliRunner

from phi4mm_export.cli.app import app
from phi4mm_export.pipeline.export import ExportSettings, export
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.recipe import Recipe

MODEL = "someone/phi-4-fine-tune"
MIB = 1 << 20


def _stream(hub: Hub, home: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """`phi4mm` in a process of its own, against the loopback hub: huggingface_hub reads HF_* when imported."""
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-m", "phi4mm_export", *map(str, words)],
        capture_output=True, text=True, timeout=280, env={**kept, **settings}, check=False,
    )  # fmt: skip


def _files(folder: Path) -> dict[str, bytes]:
    """Everything but the manifest, which names the hub id, and the list that holds the manifest's digest."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in ("phi4mm.json", "SHA256SUMS")}


def _manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "phi4mm.json").read_text()))


@pytest.fixture(autouse=True)
def _needs_the_hub_library() -> None:
    pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")


@pytest.mark.network
@pytest.mark.subprocess
def test_a_streamed_export_has_the_bytes_of_one_from_disk_and_leaves_no_copy(
    tiny_checkpoint: Path, gated_package: Path, tmp_path: Path
) -> None:
    with serving(Hub(MODEL, tiny_checkpoint)) as hub:
        done = _stream(hub, tmp_path / "home", "export", MODEL, "-o", tmp_path / "p", "--stream", "-q")
    assert done.returncode == 0, done.stderr
    assert _files(tmp_path / "p") == _files(gated_package)
    assert _manifest(tmp_path / "p")["source"]["files"] == _manifest(gated_package)["source"]["files"]
    cached = sum(p.stat().st_size for p in (tmp_path / "home").rglob("*") if p.is_file() and not p.is_symlink())
    assert cached < 10 * MIB
    assert len(hub.range_requests) < 60


@pytest.mark.network
@pytest.mark.subprocess
def test_adapter_folders_of_the_native_layout_are_streamed_too(
    tiny_native: Path, gated_package: Path, tmp_path: Path
) -> None:
    words = ("export", MODEL, "-o", tmp_path / "p", "--stream", "--component", "decoder", "-q")
    with serving(Hub(MODEL, tiny_native)) as hub:
        done = _stream(hub, tmp_path / "home", *words)
    assert done.returncode == 0, done.stderr
    name = "phi-4-mm-text.onnx.data"
    assert (tmp_path / "p" / name).read_bytes() == (gated_package / name).read_bytes()


@pytest.mark.network
@pytest.mark.subprocess
def test_faults_on_the_way_change_no_byte(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = Recipe.resolve(components=(Component.SPEECH,))
    export(tiny_checkpoint, tmp_path / "plain", recipe=recipe, settings=ExportSettings())
    faults = {3: "503", 5: "short", 6: "reset"}
    with serving(Hub(MODEL, tiny_checkpoint, fault=lambda number: faults.get(number, ""))) as hub:
        words = ("export", MODEL, "-o", tmp_path / "p", "--stream", "--component", "speech", "-q")
        done = _stream(hub, tmp_path / "home", *words)
    assert done.returncode == 0, done.stderr
    assert _files(tmp_path / "p") == _files(tmp_path / "plain")


@pytest.mark.network
@pytest.mark.subprocess
def test_a_server_without_ranges_is_refused_and_nothing_is_left(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with serving(Hub(MODEL, tiny_checkpoint, ranges=False)) as hub:
        done = _stream(hub, tmp_path / "home", "export", MODEL, "-o", tmp_path / "p", "--stream", "-q")
    assert done.returncode == 6
    assert "--no-stream" in done.stderr
    assert not (tmp_path / "p").exists()


@pytest.mark.network
@pytest.mark.subprocess
def test_a_file_that_changes_on_the_way_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with serving(Hub(MODEL, tiny_checkpoint, fault=lambda number: "etag" if number == 6 else "")) as hub:
        done = _stream(hub, tmp_path / "home", "export", MODEL, "-o", tmp_path / "p", "--stream", "-q")
    assert done.returncode == 3
    assert "the remote file changed" in done.stderr


@pytest.mark.network
@pytest.mark.subprocess
def test_a_plan_of_a_hub_model_reads_headers_only(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with serving(Hub(MODEL, tiny_checkpoint)) as hub:
        done = _stream(hub, tmp_path / "home", "plan", MODEL, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == MODEL
    assert all(start == 0 and stop <= MIB for _, start, stop in hub.range_requests)


def test_streaming_a_folder_is_a_usage_error(tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(tiny_checkpoint), "-o", str(tmp_path / "p"), "--stream"])
    assert result.exit_code == 2
    assert "expected a hub id, found a folder" in result.stderr


@pytest.mark.network
@pytest.mark.subprocess
def test_config_takes_a_hub_id_and_fetches_its_small_files_only(
    tiny_checkpoint: Path, gated_package: Path, tmp_path: Path
) -> None:
    package = tmp_path / "p"
    package.mkdir()
    for file in gated_package.glob("*.onnx"):
        shutil.copyfile(file, package / file.name)
    with serving(Hub(MODEL, tiny_checkpoint)) as hub:
        done = _stream(hub, tmp_path / "home", "config", MODEL, "--package", package, "-q")
    assert done.returncode == 0, done.stderr
    assert (package / "genai_config.json").read_bytes() == (gated_package / "genai_config.json").read_bytes()
    assert not any(name.endswith(".safetensors") for name in hub.fetched())
    assert not hub.range_requests
