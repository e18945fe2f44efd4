"""Input digests: every file that an export reads, hashed in the background, under the checkpoint's own names."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import pytest

from phi4mm_export.checkpoint import digests as module
from phi4mm_export.checkpoint.digests import InputDigests, input_files
from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.errors import CheckpointError
from phi4mm_export.package.manifest_read import read_manifest
from phi4mm_export.pipeline.export import export
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.recipe import Recipe


def test_digests_are_sorted_by_name_and_those_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"bb")
    (tmp_path / "a").write_bytes(b"")
    with InputDigests({"b": tmp_path / "b", "a": tmp_path / "a"}) as digests:
        found = [(item.name, item.nbytes, item.sha256) for item in digests.result()]
    assert found == [("a", 0, hashlib.sha256(b"").hexdigest()), ("b", 2, hashlib.sha256(b"bb").hexdigest())]


def test_leaving_the_block_early_stops_the_reading(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(64 << 30)
    with pytest.raises(ZeroDivisionError), InputDigests({"large": tmp_path / "large"}):
        raise ZeroDivisionError
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("input-digests")]


def test_a_file_that_changes_while_it_is_hashed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"x" * 10)
    seen: list[Path] = []
    identity = module._identity

    def changing(file: Path) -> tuple[int, int]:
        seen.append(file)
        return (identity(file)[0], len(seen))

    monkeypatch.setattr(module, "_identity", changing)
    with InputDigests({"shard": path}) as digests, pytest.raises(CheckpointError, match="shard: the file changed"):
        digests.result()


def test_the_manifest_of_an_export_names_every_file_of_the_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    export(tiny_checkpoint, tmp_path / "p", recipe=Recipe.resolve(components=(Component.SPEECH,)))
    source = read_manifest(tmp_path / "p").source
    assert source is not None
    found = {entry.name: entry.sha256 for entry in source.files}
    assert found == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tiny_checkpoint.iterdir() if path.is_file()
    }
    assert (source.model, source.commit) == (None, None)


def test_links_are_named_as_the_checkpoint_names_them(tiny_checkpoint: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for number, path in enumerate(sorted(tiny_checkpoint.iterdir())):
        blob = tmp_path / f"blob{number}"
        blob.write_bytes(path.read_bytes())
        (linked / path.name).symlink_to(blob)
    with open_checkpoint(linked) as checkpoint:
        names = set(input_files(checkpoint, beside=("tokenizer.json", "absent.json")))
    assert "tokenizer.json" in names
    assert not [name for name in names if "blob" in name or name == "absent.json"]


def test_an_adapter_folder_is_named_by_its_role_and_not_by_its_path(tiny_native: Path) -> None:
    folder = tiny_native / "vision-lora"
    with open_checkpoint(tiny_native, adapter_paths={Role.VISION: folder}) as checkpoint:
        files = input_files(checkpoint, adapter_paths={Role.VISION: folder})
    assert files["adapter-vision/adapter_model.safetensors"] == folder / "adapter_model.safetensors"


def test_nothing_of_the_machine_is_in_the_manifest(tiny_checkpoint: Path, tmp_path: Path) -> None:
    export(tiny_checkpoint, tmp_path / "p", recipe=Recipe.resolve(components=(Component.SPEECH,)))
    text = (tmp_path / "p" / "phi4mm.json").read_text("utf-8")
    assert str(tmp_path) not in text
    assert str(tiny_checkpoint.parent) not in text
    assert json.loads(text)["source"]["model"] is None
