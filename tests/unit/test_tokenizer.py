"""Tokenizer files of a package: copied, checked, corrected for the runtime."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.json_checkpoint import SPECIAL, edit, write_checkpoint
from support.stub_graphs import VOCAB

from phi4mm_export.errors import CheckpointError
from phi4mm_export.package.tokenizer import TokenizerFiles, added_tokens, corrected_settings, tokenizer_files


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


def files_of(checkpoint: Path) -> TokenizerFiles:
    return tokenizer_files(checkpoint, vocab_size=VOCAB)


def settings_of(checkpoint: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(files_of(checkpoint).files["tokenizer_config.json"])
    return value


def test_files_that_the_runtime_can_read_are_copied_byte_for_byte(checkpoint: Path) -> None:
    (checkpoint / "merges.txt").write_bytes(b"#version: 0.2\n")
    (checkpoint / "special_tokens_map.json").write_bytes(b'{"bos_token":"<|endoftext|>"}')
    (checkpoint / "README.md").write_bytes(b"no tokenizer file")
    names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "merges.txt"]
    assert files_of(checkpoint).files == {name: (checkpoint / name).read_bytes() for name in names}
    assert files_of(checkpoint).special == SPECIAL


@pytest.mark.parametrize("stated", ["AutoTokenizer", "Phi4MMTokenizer", None], ids=str)
def test_a_class_that_the_runtime_does_not_load_becomes_one_that_it_does(checkpoint: Path, stated: str | None) -> None:
    def change(settings: dict[str, Any]) -> None:
        settings["tokenizer_class"] = stated
        if stated is None:
            del settings["tokenizer_class"]

    edit(checkpoint / "tokenizer_config.json", change)
    assert settings_of(checkpoint)["tokenizer_class"] == "GPT2TokenizerFast"
    assert "tokenizer_class" in files_of(checkpoint).warnings[0]


def test_a_list_of_templates_becomes_its_default() -> None:
    listed = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    settings, remarks = corrected_settings({"tokenizer_class": "GPT2Tokenizer", "chat_template": listed}, None)
    assert settings["chat_template"] == "D"
    assert len(remarks) == 1


def test_a_single_named_template_needs_no_default() -> None:
    listed = [{"name": "chat", "template": "C"}]
    settings, _ = corrected_settings({"tokenizer_class": "GPT2Tokenizer", "chat_template": listed}, None)
    assert settings["chat_template"] == "C"


@pytest.mark.parametrize(
    "template",
    [[{"name": "a", "template": "A"}, {"name": "b", "template": "B"}], [{"name": "default"}], ["text"], [], 7],
    ids=str,
)
def test_templates_of_which_none_can_be_chosen_are_refused(template: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        corrected_settings({"tokenizer_class": "GPT2Tokenizer", "chat_template": template}, None)


def test_a_differing_template_file_wins_as_in_transformers(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("NEW", encoding="utf-8")
    assert settings_of(checkpoint)["chat_template"] == "NEW"
    assert files_of(checkpoint).files["chat_template.jinja"] == b"NEW"


def test_a_template_file_alone_changes_nothing() -> None:
    settings = {"tokenizer_class": "GPT2Tokenizer"}
    assert corrected_settings(settings, "NEW") == (settings, ())


def test_a_checkpoint_without_any_template_is_remarked(checkpoint: Path) -> None:
    edit(checkpoint / "tokenizer_config.json", lambda settings: settings.pop("chat_template"))
    assert any("chat template" in remark for remark in files_of(checkpoint).warnings)


def test_byte_order_marks_are_dropped(checkpoint: Path) -> None:
    plain = (checkpoint / "tokenizer.json").read_bytes()
    (checkpoint / "tokenizer.json").write_bytes(b"\xef\xbb\xbf" + plain)
    assert files_of(checkpoint).files["tokenizer.json"] == plain


def swap_placeholder(checkpoint: Path) -> None:
    """`<|endoftext10|>` and `<|user|>` change places in both files."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (checkpoint / name).read_text(encoding="utf-8")
        text = text.replace("<|endoftext10|>", "@@").replace("<|user|>", "<|endoftext10|>").replace("@@", "<|user|>")
        (checkpoint / name).write_text(text, encoding="utf-8")


def test_a_moved_image_placeholder_is_refused_with_both_ids(checkpoint: Path) -> None:
    swap_placeholder(checkpoint)
    with pytest.raises(CheckpointError, match=r"<\|endoftext10\|> has the id 200021.*need 200010"):
        files_of(checkpoint)


def drop_id(document: dict[str, Any]) -> None:
    del document["added_tokens"][0]["id"]


def two_ids(document: dict[str, Any]) -> None:
    document["added_tokens"].append({"id": 5, "content": "<|end|>"})


def two_contents(document: dict[str, Any]) -> None:
    document["added_tokens"].append({"id": 200020, "content": "<|fin|>"})


def not_a_list(document: dict[str, Any]) -> None:
    document["added_tokens"] = {"<|end|>": 200020}


@pytest.mark.parametrize("change", [drop_id, two_ids, two_contents, not_a_list])
def test_added_tokens_that_contradict_one_another_are_refused(
    checkpoint: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    edit(checkpoint / "tokenizer.json", change)
    with pytest.raises(CheckpointError, match="added_tokens"):
        files_of(checkpoint)


def test_the_two_files_must_agree_about_every_token(checkpoint: Path) -> None:
    edit(
        checkpoint / "tokenizer_config.json", lambda s: s["added_tokens_decoder"].update({"9": {"content": "<|end|>"}})
    )
    with pytest.raises(CheckpointError, match=r"<\|end\|>"):
        files_of(checkpoint)


def test_tokens_may_stand_in_either_file() -> None:
    found = added_tokens({}, {"added_tokens_decoder": {"7": {"content": "<x>"}}}, {"<y>": 8})
    assert found == {"<x>": 7, "<y>": 8}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: the file is missing"):
        files_of(checkpoint)


@pytest.mark.parametrize("name", ["tokenizer.json", "special_tokens_map.json"])
def test_broken_json_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_bytes(b'{"a": 1, "a": 2}')
    with pytest.raises(CheckpointError, match=f"{name}: key 'a' occurs more than once"):
        files_of(checkpoint)


def test_tokens_beyond_the_vocabulary_are_remarked(checkpoint: Path) -> None:
    edit(checkpoint / "tokenizer.json", lambda t: t["added_tokens"].append({"id": VOCAB, "content": "<new>"}))
    assert any("200064" in remark for remark in files_of(checkpoint).warnings)


def test_a_vocabulary_with_most_ids_missing_is_remarked(checkpoint: Path) -> None:
    assert any("ids have no token" in remark for remark in files_of(checkpoint).warnings)
