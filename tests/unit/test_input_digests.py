"""Input digests: every file that an export reads, hashed in the background, under the checkpoint's own names."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from pathlib import Path

import pytest

from phi4mm_export.checkpoint.digests import InputDigests, input_files
from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.checkpoint.source import DType, ShardFile, TensorSource
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


def _grow(path: Path, by: int) -> None:
    with path.open("ab") as file:
        file.write(bytes(by))


def _tensors(path: Path) -> list[TensorSource]:
    """Two tensors of 40 bytes, with 8 bytes before and between them and 12 after."""
    shard = ShardFile(path, path.name)
    return [TensorSource(name, name, path, DType.F32, (10,), offset, shard) for name, offset in (("a", 8), ("b", 56))]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    (tmp_path / "shard").write_bytes(bytes(range(108)))
    return tmp_path / "shard"


def test_a_file_that_changed_since_it_was_opened_is_named(shard: Path) -> None:
    tensors = _tensors(shard)
    _grow(shard, 1)
    with InputDigests({"shard": shard}, tensors) as digests:
        with pytest.raises(CheckpointError, match="shard: the file changed"):
            digests.result()
        with pytest.raises(CheckpointError, match="shard: the file changed"):
            digests.content_of(tensors[1])


def test_a_shard_is_hashed_as_it_was_opened_even_when_its_path_leads_elsewhere(shard: Path) -> None:
    tensors, old = _tensors(shard), shard.read_bytes()
    shard.unlink()
    shard.write_bytes(b"new")
    with InputDigests({"shard": shard}, tensors) as digests:
        assert digests.result()[0].sha256 == hashlib.sha256(old).hexdigest()


def test_a_tensors_content_is_told_by_its_file_up_to_its_end(shard: Path) -> None:
    first, second = _tensors(shard)
    data = shard.read_bytes()
    with InputDigests({"shard": shard}, (first, second)) as digests:
        told = (digests.content_of(second), digests.content_of(first))
    assert told == (f"{hashlib.sha256(data[:96]).hexdigest()} at 56", f"{hashlib.sha256(data[:48]).hexdigest()} at 8")


@pytest.mark.parametrize(
    ("byte", "told"), [(0, "neither"), (10, "neither"), (50, "first"), (56, "first"), (100, "both")]
)
def test_a_changed_byte_shows_in_every_tensor_after_it(shard: Path, byte: int, told: str) -> None:
    def contents() -> list[str]:
        tensors = _tensors(shard)
        with InputDigests({"shard": shard}, tensors) as digests:
            return [digests.content_of(tensor) for tensor in tensors]

    before, data = contents(), bytearray(shard.read_bytes())
    data[byte] ^= 1
    shard.write_bytes(data)
    same = [old == new for old, new in zip(before, contents(), strict=True)]
    assert same == {"neither": [False, False], "first": [True, False], "both": [True, True]}[told]


def test_a_tensor_of_no_hashed_file_has_no_content_to_tell(tmp_path: Path, shard: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(108))
    with InputDigests({"shard": shard}) as digests, pytest.raises(ValueError, match="other: a is not among"):
        digests.content_of(_tensors(tmp_path / "other")[0])


def test_every_file_is_read_once(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()
    read_into = ShardFile.read_into

    def counted(self: ShardFile, buffer: memoryview, offset: int) -> None:
        if threading.current_thread().name.startswith("input-digests"):
            read[self.label] += len(buffer)
        read_into(self, buffer, offset)

    monkeypatch.setattr(ShardFile, "read_into", counted)
    export(tiny_checkpoint, tmp_path / "p", recipe=Recipe.resolve(components=(Component.SPEECH,)))
    assert read == {path.name: path.stat().st_size for path in tiny_checkpoint.iterdir() if path.is_file()}


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
