"""Which keys the configuration parser of onnxruntime-genai takes, and of which JSON kind.

Below the top level the parser refuses every key it does not know and every value of another kind; the table in
spec/data/genai-keys.json was read from its source and checked key by key against the 0.18.0 parser.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from phi4mm_export.spec.json_text import json_kind

OPTIMIZATION_LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
_INT32 = range(-(2**31), 2**31)
_KIND_NAMES = {"integer": "an integer", "number": "a number", "bool": "true or false", "string": "a string"}


class KeyFault(NamedTuple):
    """One refused key or value. `path` is dotted, list positions in brackets; `nearest` is a known key alike."""

    path: str
    what: str
    expected: str
    found: str
    nearest: str = ""


@cache
def sections() -> dict[str, dict[str, str]]:
    """Section name -> key -> accepted kinds, as spec/data/genai-keys.json explains them."""
    text = resources.files("phi4mm_export.spec").joinpath("data", "genai-keys.json").read_text("utf-8")
    table: dict[str, dict[str, str]] = json.loads(text)["sections"]
    return table


def refused_keys(config: dict[str, Any]) -> Iterator[KeyFault]:
    """Every key and value of a genai_config.json that the runtime's parser refuses."""
    yield from _section(config, "root", "")


def _section(value: dict[str, Any], section: str, path: str) -> Iterator[KeyFault]:
    table = sections()[section]
    for key, item in value.items():
        place = f"{path}.{key}" if path else key
        kinds = table.get(key) or table.get("*")
        if kinds is None or (section == "root" and key not in table and isinstance(item, dict | list)):
            near = difflib.get_close_matches(key, [name for name in table if name != "*"], 1)
            known = ", ".join(name for name in table if name != "*")
            yield KeyFault(place, "the runtime refuses this key", f"one of {known}", repr(key), near[0] if near else "")
        else:
            yield from _value(item, kinds.split("|"), place)


def _value(item: Any, kinds: list[str], place: str) -> Iterator[KeyFault]:
    for kind in kinds:
        name, _, rest = kind.partition(":")
        if name == "object" and isinstance(item, dict):
            yield from _section(item, rest, place)
            return
        if name == "array" and isinstance(item, list):
            for index, child in enumerate(item):
                yield from _value(child, [rest], f"{place}[{index}]")
            return
        if _is_scalar(item, name):
            return
    expected = " or ".join(_kind_name(kind) for kind in kinds)
    yield KeyFault(place, "the runtime refuses a value of this kind", expected, f"{json_kind(item)}: {item!r:.60}")


def _is_scalar(item: Any, kind: str) -> bool:
    number = isinstance(item, int | float) and not isinstance(item, bool)
    if kind == "string":
        return isinstance(item, str)
    if kind == "bool":
        return isinstance(item, bool)
    if kind == "number":
        return number
    if kind == "integer":
        return number and item == int(item) and int(item) in _INT32
    if kind == "optimization":
        return item in OPTIMIZATION_LEVELS
    return kind == "scalar" and not isinstance(item, dict | list)


def _kind_name(kind: str) -> str:
    name, _, rest = kind.partition(":")
    if name == "object":
        return "an object"
    if name == "array":
        return f"a list ({_kind_name(rest)} each)"
    if name == "optimization":
        return " or ".join(OPTIMIZATION_LEVELS)
    return _KIND_NAMES.get(name, name)
