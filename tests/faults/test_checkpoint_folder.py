"""One crafted folder per fault: index against shards, JSON files, names, shapes, the output head."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import checkpoints as ck

from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.errors import CheckpointError, ExitCode, UsageError

FIRST, LAST = ck.shard_name(1), ck.shard_name(2)
NORM = "model.norm.weight"


def refusal(folder: Path, **options: object) -> CheckpointError:
    """The one-sentence error that opening `folder` raises."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, **options)  # type: ignore[arg-type]
    error = caught.value
    assert error.exit_code is ExitCode.CHECKPOINT
    assert error.where
    assert error.fix
    assert "\n" not in str(error)
    return error


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return ck.original().write(tmp_path / "model")


# ------------------------------------------------------------------ the folder itself


def test_a_path_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found nothing"):
        open_checkpoint(tmp_path / "gone")


def test_a_file_in_place_of_a_folder_is_a_usage_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="found a file"):
        open_checkpoint(folder / "config.json")


def test_an_empty_folder_lacks_config_json(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path).what


def test_an_exported_package_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text("{}")
    assert "exported package" in refusal(tmp_path).fix


def test_an_adapter_folder_is_recognised(tmp_path: Path) -> None:
    ck.write_adapter(tmp_path / "a")
    assert "--adapter-path" in refusal(tmp_path / "a").fix


def test_other_weight_formats_are_named_and_never_opened(tmp_path: Path) -> None:
    ck.write_json(tmp_path / "config.json", ck.original().config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    error = refusal(tmp_path)
    assert "pytorch_model.bin" in error.what
    assert "safetensors" in error.fix


# ------------------------------------------------------------------ index against shards


def test_a_missing_shard_is_named_with_its_tensor_count_and_the_index(folder: Path) -> None:
    lost = sum(file == LAST for file in ck.read_index(folder).values())
    (folder / LAST).unlink()
    error = refusal(folder)
    assert error.where == LAST
    assert f"missing 1 of the 2 files that {ck.INDEX} names, with {lost} tensors" in error.what


def test_an_unfinished_download_in_the_hubs_cache_is_mentioned(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--owner--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs" / "0123abcd.incomplete").touch()
    (folder / LAST).unlink()
    for parent, mentioned in (("snapshots", True), ("copies", False), ("tmp", False)):
        (cache / parent).mkdir()
        copy = folder.rename(cache / parent / "f00d")
        assert ("0123abcd.incomplete" in refusal(copy).what) == mentioned
        copy.rename(folder)


def test_an_unfinished_download_beside_a_missing_shard_is_mentioned(folder: Path) -> None:
    (folder / LAST).rename(folder / f"{LAST}.incomplete")
    assert f"{LAST}.incomplete" in refusal(folder).what


def test_without_an_index_a_gap_in_the_numbering_is_noticed(folder: Path) -> None:
    (folder / ck.INDEX).unlink()
    (folder / FIRST).unlink()
    error = refusal(folder)
    assert error.where == FIRST
    assert "missing 1 of 2 shards" in error.what


def test_without_an_index_a_tensor_in_two_files_names_both(tmp_path: Path) -> None:
    folder = ck.original().write(tmp_path / "m")
    (folder / ck.INDEX).unlink()
    ck.write_safetensors(folder / "old.safetensors", {NORM: ck.Stored((ck.WIDTH,))})
    error = refusal(folder)
    assert NORM in error.what
    assert "old.safetensors" in error.what
    assert FIRST in str(error) or LAST in str(error)


def test_an_index_entry_that_no_shard_holds_is_named(folder: Path) -> None:
    ck.write_index(folder, {**ck.read_index(folder), "model.extra.weight": LAST})
    error = refusal(folder)
    assert error.where == f"{LAST}: model.extra.weight"
    assert "1 tensor absent" in error.what


def test_a_stored_tensor_that_the_index_does_not_list_is_named(folder: Path) -> None:
    weight_map = ck.read_index(folder)
    home = weight_map.pop(NORM)
    ck.write_index(folder, weight_map)
    assert refusal(folder).where == f"{home}: {NORM}"


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "a/../../outside.safetensors",
        "/etc/outside.safetensors",
        "C:\\outside.safetensors",
        "..\\outside.safetensors",
        "./a.safetensors",
        "a//b.safetensors",
        "config.json",
        "",
        7,
        None,
        ["a.safetensors"],
    ],
)
def test_an_index_that_leaves_the_folder_or_names_other_files_is_refused(folder: Path, file: object) -> None:
    ck.write_safetensors(folder.parent / "outside.safetensors", {"x": ck.Stored((1,))})
    ck.write_index(folder, {**ck.read_index(folder), NORM: file})
    error = refusal(folder)
    assert error.where == f"{ck.INDEX}: weight_map"
    assert json.dumps(file) in error.what


@pytest.mark.parametrize("weight_map", [None, {}, [], "model.safetensors"])
def test_an_index_without_a_weight_map_is_refused(folder: Path, weight_map: object) -> None:
    ck.write_json(folder / ck.INDEX, {"weight_map": weight_map})
    assert refusal(folder).where == f"{ck.INDEX}: weight_map"


def test_the_index_may_be_a_pointer_too(folder: Path) -> None:
    (folder / ck.INDEX).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    error = refusal(folder)
    assert error.where == ck.INDEX
    assert "12345" in error.what


def test_a_shard_cut_short_is_found_before_anything_else(folder: Path) -> None:
    size = (folder / LAST).stat().st_size
    os.truncate(folder / LAST, size - 8)
    error = refusal(folder)
    assert error.where.startswith(LAST)
    assert f"expected {size} bytes, found {size - 8}" in error.what


# ------------------------------------------------------------------ JSON files


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "preprocessor_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"a": 1, "a": 2}', "\x00", "[" * 50_000])
def test_a_json_file_that_is_no_object_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    assert refusal(folder).where == name


def test_a_json_file_in_another_encoding_is_named(folder: Path) -> None:
    (folder / "config.json").write_bytes('{"a": "é"}'.encode("latin-1"))
    assert "not UTF-8" in refusal(folder).what


def test_a_byte_order_mark_is_tolerated(folder: Path) -> None:
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    with open_checkpoint(folder) as marked:
        assert marked.config.num_layers > 0


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"generation": {"eos_token_id": 200064}}, "generation_config.json: eos_token_id"),
        ({"preprocessor": {"dynamic_hd": 0}}, "preprocessor_config.json: dynamic_hd"),
        ({"config": {"eos_token_id": "199999"}}, "config.json: eos_token_id"),
        ({"config": {"embd_layer": "default"}}, "config.json: embd_layer"),
        ({"config": {"vision_lora": {"r": "4", "lora_alpha": 8}}}, "config.json: vision_lora.r"),
    ],
)
def test_a_bad_value_names_file_and_key(tmp_path: Path, value: dict[str, dict[str, object]], place: str) -> None:
    draft = ck.original()
    for part, keys in value.items():
        setattr(draft, part, {**getattr(draft, part), **keys})
    assert refusal(draft.write(tmp_path / "m")).where == place


def test_the_newer_processor_file_is_read_and_named(tmp_path: Path) -> None:
    draft = ck.original()
    draft.preprocessor = None
    folder = draft.write(tmp_path / "m")
    ck.write_json(folder / "processor_config.json", {"image_processor": {"dynamic_hd": 12}})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.config.dynamic_hd == 12
    ck.write_json(folder / "processor_config.json", {"image_processor": {"dynamic_hd": "12"}})
    assert refusal(folder).where == "processor_config.json: image_processor: dynamic_hd"


# ------------------------------------------------------------------ names and shapes


def edited(tmp_path: Path, edit: Callable[[dict[str, ck.Stored]], object], make: Callable[[], ck.Draft]) -> Path:
    draft = make()
    edit(draft.tensors)
    return draft.write(tmp_path / "edited")


def test_missing_tensors_are_counted_and_the_first_few_named(tmp_path: Path) -> None:
    def drop(tensors: dict[str, ck.Stored]) -> None:
        for name in [n for n in tensors if ".layers.1.mlp." in n and "img_processor" not in n and "lora" not in n]:
            del tensors[name]
        del tensors[NORM]

    error = refusal(edited(tmp_path, drop, ck.original))
    assert "3 tensors missing" in error.what
    assert NORM in error.what


def test_an_unknown_tensor_is_named_with_the_nearest_missing_one(tmp_path: Path) -> None:
    def rename(tensors: dict[str, ck.Stored]) -> None:
        tensors["model.layers.0.input_layer_norm.weight"] = tensors.pop("model.layers.0.input_layernorm.weight")

    error = refusal(edited(tmp_path, rename, ck.original))
    assert "model.layers.0.input_layer_norm.weight" in error.what
    assert "model.layers.0.input_layernorm.weight" in error.fix


@pytest.mark.parametrize("suffix", ["weight_scale", "SCB", "weight.absmax", "qweight"])
def test_quantized_weights_are_refused_as_unknown_tensors(tmp_path: Path, suffix: str) -> None:
    name = f"model.layers.0.mlp.down_proj.{suffix}"
    error = refusal(edited(tmp_path, lambda t: t.update({name: ck.Stored((16,), "F32")}), ck.original))
    assert name in error.what
    assert "quantized" in error.fix


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    error = refusal(edited(tmp_path, lambda t: t.update({NORM: ck.Stored((ck.WIDTH + 1,))}), ck.original))
    assert NORM in error.where
    assert "is [17], expected [16]" in error.what


def test_two_spellings_of_one_tensor_are_refused_by_both_names(tmp_path: Path) -> None:
    both = f"module.{NORM}"
    error = refusal(edited(tmp_path, lambda t: t.update({both: ck.Stored((ck.WIDTH,))}), ck.original))
    assert NORM in error.what
    assert both in error.what


def test_wrapper_prefixes_on_every_name_are_no_fault(tmp_path: Path) -> None:
    draft = ck.original()
    draft.tensors = {f"module.base_model.model.{name}": tensor for name, tensor in draft.tensors.items()}
    with open_checkpoint(draft.write(tmp_path / "m")) as checkpoint:
        assert checkpoint.tensors[NORM].stored_name == f"module.base_model.model.{NORM}"


def test_the_towers_unused_tensors_may_be_absent_where_the_config_states_its_depth(tmp_path: Path) -> None:
    def drop(tensors: dict[str, ck.Stored]) -> None:
        unused = (f"img_processor.encoder.layers.{ck.VISION_LAYERS - 1}.", "post_layernorm.", "img_processor.head.")
        for name in [n for n in tensors if any(u in n for u in unused)]:
            del tensors[name]

    open_checkpoint(edited(tmp_path, drop, ck.native)).close()


def test_more_embedding_rows_than_the_vocabulary_name_key_and_both_numbers(tmp_path: Path) -> None:
    rows = {"model.embed_tokens.weight": ck.Stored((ck.VOCAB + 64, ck.WIDTH))}
    error = refusal(edited(tmp_path, lambda t: t.update(rows), ck.original))
    assert error.where == "config.json: vocab_size"
    assert "200064" in error.what
    assert "200128" in error.what


def test_both_layouts_of_one_model_give_the_same_names_and_shapes(tmp_path: Path) -> None:
    with (
        open_checkpoint(ck.original().write(tmp_path / "o")) as original,
        open_checkpoint(ck.native().write(tmp_path / "n")) as native,
    ):
        shapes = [{name: t.shape for name, t in c.tensors.items()} for c in (original, native)]
    assert shapes[0] == shapes[1]


# ------------------------------------------------------------------ the output head


def with_head(tmp_path: Path, *, rows: int, drift: float, tie: bool | None) -> Path:
    """A checkpoint that stores a head: zeros as the table, but `drift` in one value."""
    draft = ck.original()
    values = np.zeros((rows, ck.WIDTH), np.float32)
    values[5, 3] = drift
    draft.tensors["lm_head.weight"] = ck.stored_f32(values)
    if tie is None:
        del draft.config["tie_word_embeddings"]
    else:
        draft.config["tie_word_embeddings"] = tie
    return draft.write(tmp_path / "headed")


def test_a_tied_head_that_differs_is_refused_with_key_difference_and_both_ways_on(tmp_path: Path) -> None:
    error = refusal(with_head(tmp_path, rows=ck.VOCAB, drift=0.25, tie=True))
    assert "lm_head.weight" in error.where
    assert "tie_word_embeddings" in error.where
    assert "1 value, by up to 0.25" in error.what
    assert "--head stored" in error.fix
    assert "--head tied" in error.fix


@pytest.mark.parametrize(("choice", "tied"), [("stored", False), ("tied", True)])
def test_a_stated_choice_decides_which_head_counts(tmp_path: Path, choice: str, tied: bool) -> None:
    folder = with_head(tmp_path, rows=ck.VOCAB, drift=0.25, tie=True)
    with open_checkpoint(folder, head=choice) as checkpoint:  # type: ignore[arg-type]
        assert checkpoint.config.tied_head is tied
        assert ("lm_head.weight" in checkpoint.tensors) is not tied


def test_a_tied_head_that_equals_the_table_is_read_once(tmp_path: Path) -> None:
    with open_checkpoint(with_head(tmp_path, rows=ck.VOCAB, drift=0.0, tie=True)) as checkpoint:
        assert checkpoint.config.tied_head
        assert "lm_head.weight" not in checkpoint.tensors


@pytest.mark.parametrize("tie", [False, None])
def test_a_stored_head_counts_where_the_config_does_not_tie_it(tmp_path: Path, tie: bool | None) -> None:
    with open_checkpoint(with_head(tmp_path, rows=ck.VOCAB, drift=0.25, tie=tie)) as checkpoint:
        assert not checkpoint.config.tied_head
        assert "lm_head.weight" in checkpoint.tensors


def test_an_untied_model_without_a_stored_head_is_refused(tmp_path: Path) -> None:
    draft = ck.original()
    draft.config["tie_word_embeddings"] = False
    error = refusal(draft.write(tmp_path / "m"))
    assert error.where == "config.json: tie_word_embeddings"
    assert "lm_head.weight is not stored" in error.what
    assert "--head tied" in error.fix


def test_a_head_with_other_rows_is_refused_tied_or_not(tmp_path: Path) -> None:
    assert "200065" in refusal(with_head(tmp_path / "a", rows=ck.VOCAB + 1, drift=0.0, tie=True)).what
    assert "200065" in refusal(with_head(tmp_path / "b", rows=ck.VOCAB + 1, drift=0.0, tie=False)).what


# ------------------------------------------------------------------ while it is open


def test_reading_after_the_with_block_is_an_error(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        tensor = checkpoint.tensors[NORM]
        tensor.whole()
    with pytest.raises(CheckpointError, match="closed"):
        tensor.whole()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files through /proc")
def test_no_file_stays_open_after_a_refusal_or_a_with_block(folder: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with open_checkpoint(folder):
        assert len(list(Path("/proc/self/fd").iterdir())) > before
    config = json.loads((folder / "config.json").read_text())
    ck.write_json(folder / "config.json", {**config, "hidden_size": 32})
    refusal(folder)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_nothing_is_written_into_the_checkpoint(folder: Path) -> None:
    def state() -> list[tuple[str, int, int]]:
        return sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir())

    before = state()
    open_checkpoint(folder).close()
    assert state() == before
