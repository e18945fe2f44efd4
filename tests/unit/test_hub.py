"""Hub ids and folders: what a MODEL argument means, and downloads from a server on the loopback interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import checkpoints as ck
from support.hub_server import COMMIT, Hub, serving

from phi4mm_export.checkpoint.hub import fetch_checkpoint, resolve_model, snapshot_commit
from phi4mm_export.errors import MissingExtraError, UsageError

MODEL = "someone/phi-4-fine-tune"
FETCH = """
import json, sys
from phi4mm_export.checkpoint.hub import fetch_checkpoint, snapshot_commit
from phi4mm_export.errors import Phi4mmError
seen = []
try:
    path = fetch_checkpoint(sys.argv[1], revision=sys.argv[2] or None, progress=lambda *pair: seen.append(pair))
    result = {"path": str(path), "commit": snapshot_commit(path), "progress": seen}
except Phi4mmError as error:
    result = {"error": type(error).__name__, "text": str(error), "exit_code": int(error.exit_code)}
print(json.dumps(result))
"""


# ------------------------------------------------------------------ folder or hub id


def test_a_folder_wins_over_a_hub_id_of_the_same_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "microsoft" / "phi").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("microsoft/phi") == Path("microsoft/phi")


def test_owner_and_name_are_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model("microsoft/Phi-4-multimodal-instruct") == "microsoft/Phi-4-multimodal-instruct"


def test_a_home_relative_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model("~/model") == tmp_path / "model"


@pytest.mark.parametrize(
    "text",
    [
        "/no/such/folder",
        "./model",
        "../model/x",
        "~/model",
        "~nobody-by-this-name/model",
        "model",
        "model/",
        "a/b/c",
        "a\\b",
        "C:\\model",
        "a/b/",
        "a/..",
        "a/.b",
        "a b/c",
        "a/b--c",
        "",
        "https://hub/a/b",
        "models/gone",
    ],
)
def test_a_path_that_is_not_there_is_a_usage_error_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        resolve_model(text)


def test_a_file_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(UsageError, match="found a file"):
        resolve_model(str(file))


def test_only_a_snapshot_folder_has_a_commit() -> None:
    assert snapshot_commit(Path("models--a--b/snapshots") / COMMIT) == COMMIT
    assert snapshot_commit(Path("elsewhere") / COMMIT) is None
    assert snapshot_commit(Path("snapshots/main")) is None


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r'pip install "phi4mm\[hub\]"'):
        fetch_checkpoint(MODEL)


# ------------------------------------------------------------------ downloads


def fetch(hub: Hub, home: Path, model: str = MODEL, revision: str = "", **environment: str) -> dict[str, Any]:
    """What `fetch_checkpoint` returns or raises in a process of its own: the library reads HF_* when imported."""
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", FETCH, model, revision],
        capture_output=True, text=True, timeout=120, env={**kept, **settings}, check=True,
    )  # fmt: skip
    assert "it/s" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """What lies on the hub: a checkpoint, and files that no export reads."""
    pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")
    folder = ck.native().write(tmp_path / "stored")
    ck.write_safetensors(folder / ck.shard_name(1), {"model.norm.weight": ck.Stored((16,))})
    ck.write_safetensors(folder / ck.shard_name(2), {"model.x.weight": ck.Stored((16,))})
    ck.write_adapter(folder / "vision-lora")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text(f'{{"file": "{name}"}}')
    for name in ("modeling_phi4mm.py", "pytorch_model.bin", "README.md", "vision-lora/adapter_model.bin"):
        (folder / name).write_text("x")
    return folder


@pytest.mark.subprocess
@pytest.mark.network
def test_a_download_takes_only_what_an_export_reads_and_names_the_commit(stored: Path, tmp_path: Path) -> None:
    with serving(Hub(MODEL, stored)) as hub:
        result = fetch(hub, tmp_path / "home")
    path = Path(result["path"])
    assert result["commit"] == COMMIT
    assert path.is_relative_to(tmp_path / "home")
    assert (path / "config.json").read_bytes() == (stored / "config.json").read_bytes()
    assert (path / "vision-lora" / "adapter_config.json").is_file()
    assert hub.fetched() == {
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        ck.INDEX,
        ck.shard_name(1),
        ck.shard_name(2),
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "vision-lora/adapter_config.json",
        "vision-lora/adapter_model.safetensors",
    }
    done, total = result["progress"][-1]
    assert done == total > 0


@pytest.mark.subprocess
@pytest.mark.network
def test_a_fetched_model_is_found_again_offline_without_a_request(stored: Path, tmp_path: Path) -> None:
    with serving(Hub(MODEL, stored)) as hub:
        online = fetch(hub, tmp_path / "home")
        hub.requests.clear()
        offline = fetch(hub, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert offline["path"] == online["path"]
    assert hub.requests == []


@pytest.mark.subprocess
@pytest.mark.network
def test_offline_without_a_cached_copy_is_a_system_error(stored: Path, tmp_path: Path) -> None:
    with serving(Hub(MODEL, stored)) as hub:
        result = fetch(hub, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert result["exit_code"] == 6
    assert "HF_HUB_OFFLINE" in result["text"]
    assert hub.requests == []


@pytest.mark.subprocess
@pytest.mark.network
def test_a_hub_that_does_not_answer_is_a_system_error(stored: Path, tmp_path: Path) -> None:
    with serving(Hub(MODEL, stored)) as hub:
        pass
    result = fetch(hub, tmp_path / "home")
    assert result["exit_code"] == 6
    assert "\n" not in result["text"]


@pytest.mark.subprocess
@pytest.mark.network
@pytest.mark.parametrize(
    ("model", "revision", "gated", "expected"),
    [
        ("someone/else", "", False, "no such model"),
        (MODEL, "v9", False, "no such revision"),
        (MODEL, "", True, "gated"),
    ],
)
def test_a_model_that_cannot_be_had_is_a_usage_error(
    stored: Path, tmp_path: Path, model: str, revision: str, gated: bool, expected: str
) -> None:
    with serving(Hub(MODEL, stored, gated=gated)) as hub:
        result = fetch(hub, tmp_path / "home", model, revision)
    assert result["exit_code"] == 2, result
    assert expected in result["text"]
    assert "\n" not in result["text"]
