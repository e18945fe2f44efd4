"""Which files and which copies of tensors count."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support import checkpoints as ck

from phi4mm_export.checkpoint.header import read_header
from phi4mm_export.checkpoint.shards import read_shards
from phi4mm_export.checkpoint.source import DType

A, B = ck.Stored((2, 3)), ck.Stored((4,), "F32")


def test_a_header_gives_names_types_shapes_and_file_offsets(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    ck.write_safetensors(path, {"m.a": A, "m.b": B})
    a, b = read_header(path, "a.safetensors")
    start = path.stat().st_size - A.nbytes - B.nbytes
    assert (a.name, a.dtype, a.shape, a.offset) == ("m.a", DType.BF16, (2, 3), start)
    assert (b.name, b.dtype, b.shape, b.offset) == ("m.b", DType.F32, (4,), start + A.nbytes)


def test_tensors_come_in_the_order_of_their_bytes_not_of_the_header(tmp_path: Path) -> None:
    entries = ck.header_of({"m.a": A, "m.b": B})
    ck.write_safetensors(
        tmp_path / "a.safetensors", {"m.a": A, "m.b": B}, json.dumps(dict(reversed(list(entries.items()))))
    )
    assert [t.name for t in read_header(tmp_path / "a.safetensors", "a")] == ["m.a", "m.b"]


def test_recomputed_buffers_of_any_type_are_left_out(tmp_path: Path) -> None:
    position_ids = "model.embed_tokens_extend.image_embed.img_processor.embeddings.position_ids"
    ck.write_safetensors(tmp_path / "a.safetensors", {"m.a": A, position_ids: ck.Stored((1, 4), "I64"), "m.b": B})
    assert [t.name for t in read_header(tmp_path / "a.safetensors", "a")] == ["m.a", "m.b"]


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    ck.write_safetensors(tmp_path / "model.safetensors", {"m.a": A, "m.b": B})
    shards = read_shards(tmp_path)
    assert {name: file for name, (_, file) in shards.tensors.items()} == {
        "m.a": "model.safetensors",
        "m.b": "model.safetensors",
    }
    assert shards.files == ("model.safetensors",)


def test_several_files_without_an_index_are_read_together(tmp_path: Path) -> None:
    ck.write_safetensors(tmp_path / ck.shard_name(1), {"m.a": A})
    ck.write_safetensors(tmp_path / ck.shard_name(2), {"m.b": B})
    assert set(read_shards(tmp_path).tensors) == {"m.a", "m.b"}


def test_the_index_decides_which_copy_counts_and_the_stale_file_is_named_once(tmp_path: Path) -> None:
    ck.write_safetensors(tmp_path / ck.shard_name(1), {"m.a": A, "m.b": B})
    ck.write_safetensors(tmp_path / ck.shard_name(2), {"m.b": ck.Stored((4,), "F16")})
    ck.write_index(tmp_path, {"m.a": ck.shard_name(1), "m.b": ck.shard_name(2)})
    shards = read_shards(tmp_path)
    assert shards.tensors["m.b"][1] == ck.shard_name(2)
    assert shards.tensors["m.b"][0].dtype is DType.F16
    (warning,) = shards.warnings
    assert "m.b" in warning
    assert warning.startswith(ck.shard_name(1))


def test_files_the_index_does_not_name_are_not_read_but_mentioned(tmp_path: Path) -> None:
    ck.write_safetensors(tmp_path / "new.safetensors", {"m.a": A})
    ck.write_safetensors(tmp_path / "old.safetensors", {"m.a": B})
    (tmp_path / "torn.safetensors").write_bytes(b"12")
    ck.write_index(tmp_path, {"m.a": "new.safetensors"})
    shards = read_shards(tmp_path)
    assert shards.tensors["m.a"][0].shape == A.shape
    assert shards.files == ("model.safetensors.index.json", "new.safetensors")
    stale, unnamed = shards.warnings
    assert stale.startswith("old.safetensors holds a second copy of m.a")
    assert unnamed.startswith("torn.safetensors is not read")


def test_an_index_may_name_files_in_a_folder_below(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    ck.write_safetensors(tmp_path / "weights" / "a.safetensors", {"m.a": A})
    ck.write_index(tmp_path, {"m.a": "weights/a.safetensors"})
    assert read_shards(tmp_path).tensors["m.a"][1] == "weights/a.safetensors"


def test_index_entries_of_recomputed_buffers_are_left_out(tmp_path: Path) -> None:
    ck.write_safetensors(tmp_path / "a.safetensors", {"m.a": A})
    ck.write_index(tmp_path, {"m.a": "a.safetensors", "model.rotary_emb.inv_freq": "gone.safetensors"})
    assert set(read_shards(tmp_path).tensors) == {"m.a"}


def test_an_adapter_file_beside_the_shards_is_not_mixed_in(tmp_path: Path) -> None:
    ck.write_safetensors(tmp_path / "model.safetensors", {"m.a": A})
    ck.write_safetensors(tmp_path / "adapter_model.safetensors", {"m.b": B})
    shards = read_shards(tmp_path)
    assert set(shards.tensors) == {"m.a"}
    assert "--adapter-path" in shards.warnings[0]


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
def test_links_into_a_store_of_blobs_keep_their_own_names(tmp_path: Path) -> None:
    store, folder = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    folder.mkdir()
    ck.write_safetensors(store / "0f3a", {"m.a": A})
    (folder / "model.safetensors").symlink_to(Path("..") / "blobs" / "0f3a")
    assert read_shards(folder).tensors["m.a"][1] == "model.safetensors"
