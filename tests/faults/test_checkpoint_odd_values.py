"""Every key of every small file with every odd value: a sentence or a result, never another exception."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from support import checkpoints as ck

from phi4mm_export.checkpoint.adapters import parse_settings
from phi4mm_export.errors import CheckpointError
from phi4mm_export.spec.config_json import parse_config
from phi4mm_export.spec.json_fields import Fields
from phi4mm_export.spec.names import canonical_name

ODD: tuple[object, ...] = (
    None, True, 0, -1, 1, 7, 10**30, -0.0, 0.5, 1e308,
    float("nan"), float("inf"), "", "x", "1", [], [1], [[]], {}, {"a": 1},
)  # fmt: skip
Keys = tuple[str, ...]


def paths(value: dict[str, Any], above: Keys = ()) -> Iterator[Keys]:
    """Every key, nested ones included."""
    for key, inner in value.items():
        yield (*above, key)
        if isinstance(inner, dict):
            yield from paths(inner, (*above, key))


def with_value(value: dict[str, Any], path: Keys, odd: object) -> dict[str, Any]:
    changed = copy.deepcopy(value)
    section = changed
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = odd
    return changed


@pytest.mark.parametrize("make", [ck.original, ck.native])
def test_any_odd_value_in_config_json_is_refused_or_harmless(make: Callable[[], ck.Draft]) -> None:
    draft = make()
    shapes = {canonical_name(name): t.shape for name, t in draft.tensors.items() if ".lora_" not in name}
    refused = 0
    for path in paths(draft.config):
        for odd in ODD:
            config = with_value(draft.config, path, odd)
            with suppress(CheckpointError):
                parse_config(config, shapes, preprocessor=None, generation=None)
                continue
            refused += 1
    assert refused > 300


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id", "pad_token_id", "dynamic_hd"])
def test_any_odd_value_in_the_side_files_is_refused_or_harmless(key: str) -> None:
    draft = ck.original()
    shapes = {canonical_name(name): t.shape for name, t in draft.tensors.items() if ".lora_" not in name}
    for odd in ODD:
        with suppress(CheckpointError):
            parsed = parse_config(draft.config, shapes, preprocessor={key: odd}, generation={key: odd})
            assert parsed.hidden_size == draft.config["hidden_size"]


def test_any_odd_value_in_adapter_config_json_is_refused_or_gives_a_finite_scale() -> None:
    full = ck.adapter_config(rank_pattern={"qkv_proj": 4}, alpha_pattern={"qkv_proj": 8})
    for path in paths(full):
        for odd in ODD:
            with suppress(CheckpointError):
                settings = parse_settings(Fields(with_value(full, path, odd), "adapter_config.json"))
                assert abs(settings.scale_of("model.layers.0.self_attn.qkv_proj")) < float("inf")
