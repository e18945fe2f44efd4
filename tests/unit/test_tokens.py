"""Stop, pad and begin ids: where they come from, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from phi4mm_export.errors import CheckpointError
from phi4mm_export.spec.tokens import NamedJson, TokenIds, check_placeholders, choose_token_ids, runtime_knows_class

SPECIAL = {"<|endoftext|>": 199999, "<|end|>": 200020, "<|endoftext10|>": 200010, "<|endoftext11|>": 200011}
ORIGINAL = TokenIds(bos=199999, eos=(200020, 199999), pad=199999)


def chosen(
    generation: dict[str, Any] | None, model: dict[str, Any] | None = None, special: dict[str, int] | None = None
) -> TokenIds:
    return choose_token_ids(
        SPECIAL if special is None else special,
        generation=None if generation is None else NamedJson("generation_config.json", generation),
        model=NamedJson("config.json", model or {}),
        vocab_size=200064,
    )


@pytest.mark.parametrize(
    "eos", [[200020, 199999], [199999, 200020], [200020, 200020, 199999], 199999, 200020, None, []], ids=str
)
def test_the_end_of_turn_and_the_end_of_text_come_first_in_one_order_without_doubles(eos: Any) -> None:
    assert chosen({"eos_token_id": eos}).eos == (200020, 199999)


def test_the_end_of_turn_is_found_through_the_tokenizer_when_the_generation_config_is_gone() -> None:
    assert chosen(None, {"eos_token_id": 199999, "bos_token_id": 199999, "pad_token_id": 199999}) == ORIGINAL


def test_further_stop_ids_follow_in_ascending_order() -> None:
    assert chosen({"eos_token_id": [200027, 199999, 200022]}).eos == (200020, 199999, 200022, 200027)


def test_a_moved_end_of_turn_token_keeps_its_new_id() -> None:
    moved = {**SPECIAL, "<|end|>": 200030}
    assert chosen({"eos_token_id": [200030, 199999]}, special=moved).eos == (200030, 199999)


def test_the_generation_config_goes_before_the_model_config() -> None:
    ids = chosen({"bos_token_id": 1, "pad_token_id": 2}, {"bos_token_id": 3, "pad_token_id": 4, "eos_token_id": 5})
    assert (ids.bos, ids.pad, ids.eos) == (1, 2, (200020, 199999, 5))


def test_ids_that_no_file_states_are_those_of_the_end_of_text() -> None:
    assert chosen({}) == ORIGINAL


@pytest.mark.parametrize("value", [200064, -1, "199999", 199999.0, True, [200020, None]], ids=str)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_id_beyond_the_vocabulary_or_no_integer_is_refused_with_file_and_key(value: Any, file: str) -> None:
    body = {"eos_token_id": value}
    with pytest.raises(CheckpointError) as caught:
        chosen(body) if file == "generation_config.json" else chosen({}, body)
    assert caught.value.where == f"{file}: eos_token_id"
    assert caught.value.exit_code == 3


def test_without_an_end_of_turn_token_two_stated_ids_are_enough() -> None:
    special = {"<|endoftext|>": 199999}
    assert chosen({"eos_token_id": [7, 199999]}, special=special).eos == (199999, 7)


def test_without_any_end_of_turn_the_checkpoint_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"<\|end\|>"):
        chosen({"eos_token_id": 199999}, special={"<|endoftext|>": 199999})


def test_placeholders_at_the_ids_of_the_runtime_are_fine() -> None:
    check_placeholders(SPECIAL, where="tokenizer.json")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"<|endoftext10|>": 200021, "<|user|>": 200010}, "has the id 200021.*need 200010.*is <|user|>"),
        ({"<|endoftext11|>": 200012}, "has the id 200012.*need 200011"),
    ],
)
def test_a_moved_placeholder_is_refused_with_its_id_and_the_one_needed(change: dict[str, int], part: str) -> None:
    with pytest.raises(CheckpointError, match=part.replace("<|user|>", r"<\|user\|>")):
        check_placeholders({**SPECIAL, **change}, where="tokenizer.json")


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "GPT2TokenizerFast", "TokenizersBackend", "Phi3Tokenizer"])
def test_classes_that_the_runtime_loads_are_known(name: str) -> None:
    assert runtime_knows_class(name)


@pytest.mark.parametrize("name", ["AutoTokenizer", "Phi4MMTokenizer", "CLIPTokenizer", "gpt2tokenizer", "", None, 1])
def test_other_classes_are_not(name: Any) -> None:
    assert not runtime_knows_class(name)
