"""What values each key of a recipe takes, table by table."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from phi4mm_export.errors import UsageError
from phi4mm_export.spec.build_recipe import AdapterChoice, HeadOfTwo
from phi4mm_export.spec.contract import PackageLayout, Provider
from phi4mm_export.spec.quantization import Method, Order
from phi4mm_export.spec.recipe import BLOCK_SIZES, LoraForm, Precision
from phi4mm_export.spec.sizes import parse_bytes

MAX_TEXT = 1024
MAX_LIST = 1000
MAX_INTEGER = 2**31 - 1


class WrongValueError(Exception):
    """What was expected; the caller adds key and value."""


@dataclass(frozen=True)
class Kind:
    """What values a key takes: `expected` in words, `read` turns a TOML value into ours or raises WrongValueError."""

    expected: str
    read: Callable[[Any], Any]


def _one_of(choices: type[StrEnum], *left_out: StrEnum) -> Kind:
    known = [choice for choice in choices if choice not in left_out]
    expected = "one of " + ", ".join(f'"{choice}"' for choice in known)

    def read(value: Any) -> StrEnum:
        if not isinstance(value, str) or value not in known:
            near = difflib.get_close_matches(str(value), known, 1)
            raise WrongValueError(expected + (f' (did you mean "{near[0]}"?)' if near else ""))
        return choices(value)

    return Kind(expected, read)


def _number(low: float, high: float, expected: str, *, whole: bool) -> Kind:
    def read(value: Any) -> int | float:
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            raise WrongValueError(expected)
        return value if whole else float(value)

    return Kind(expected, read)


def _integer(low: int, high: int = MAX_INTEGER) -> Kind:
    bound = f" and at most {high}" if high != MAX_INTEGER else ""
    return _number(low, high, f"an integer of at least {low}{bound}", whole=True)


def _choice(values: Sequence[int]) -> Kind:
    expected = f"one of {', '.join(map(str, values))}"

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value not in values:
            raise WrongValueError(expected)
        return value

    return Kind(expected, read)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise WrongValueError(TEXT.expected)
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_LIST:
        raise WrongValueError(TEXTS.expected)
    try:
        return tuple(_text(item) for item in value)
    except WrongValueError as err:
        raise WrongValueError(TEXTS.expected) from err


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise WrongValueError(TRUTH.expected)
    return value


def _amount(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**60:
        return value
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except UsageError as err:
            raise WrongValueError(AMOUNT.expected) from err
    raise WrongValueError(AMOUNT.expected)


TEXT = Kind(f"a text of 1 to {MAX_TEXT} characters in one line", _text)
TEXTS = Kind(f"a list of at most {MAX_LIST} texts", _texts)
TRUTH = Kind("true or false", _truth)
AMOUNT = Kind('an amount of memory such as "4GiB"', _amount)
SHARE = _number(1e-9, 0.999, "a number between 0 and 1", whole=False)
COSINE = _number(-1, 1, "a number from -1 to 1", whole=False)
LIMIT = _number(0, 1e9, "a number of at least 0", whole=False)
ABOVE_ZERO = _number(1e-9, 1e9, "a number above 0", whole=False)

TOP = {
    "name": TEXT,
    "description": TEXT,
    "model": TEXT,
    "revision": TEXT,
    "output": TEXT,
    "calibration": TEXT,
}
EXPORT = {
    "ep": _one_of(Provider),
    "precision": _one_of(Precision),
    "encoder_precision": _one_of(Precision, Precision.INT8, Precision.INT4),
    "embedding_precision": _one_of(Precision),
    "lora_precision": _one_of(Precision),
    "block_size": _choice(BLOCK_SIZES),
    "accuracy_level": _integer(0, 4),
    "rotate": TRUTH,
    "lora": _one_of(LoraForm),
    "adapter": _one_of(AdapterChoice),
    "layout": _one_of(PackageLayout),
    "full_logits": TRUTH,
    "max_length": _integer(1),
    "memory_budget": AMOUNT,
    "release_arena": TRUTH,
    "original_audio_limit": TRUTH,
    "head": _one_of(HeadOfTwo),
}
QUANTIZE = {
    "method": _one_of(Method, Method.NONE),
    "bits": _choice((4, 8)),
    "block_size": _choice(BLOCK_SIZES),
    "symmetric": TRUTH,
    "num_samples": _integer(1),
    "damp": SHARE,
    "order": _one_of(Order),
    "sequential": TRUTH,
    "bias_correction": TRUTH,
    "rotate": TRUTH,
    "include": TEXTS,
    "exclude": TEXTS,
    "accuracy_level": _integer(0, 4),
    "seed": _integer(0),
    "torch_device": TEXT,
    "max_rel_l2": ABOVE_ZERO,
    "calibration": TEXT,
}
EVALUATE = {
    "against": TEXT,
    "images": TEXTS,
    "audio": TEXTS,
    "prompts": TEXTS,
    "text": TEXTS,
    "num_samples": _integer(1),
    "seed": _integer(0),
    "max_new_tokens": _integer(1),
    "max_text_tokens": _integer(2),
    "min_cosine": COSINE,
    "max_rel_l2": LIMIT,
    "max_kl": LIMIT,
}
CARD = {
    "title": TEXT,
    "license": TEXT,
    "base_model": TEXT,
    "library_name": TEXT,
    "pipeline_tag": TEXT,
    "tags": TEXTS,
}
TABLES = {"export": EXPORT, "evaluate": EVALUATE, "card": CARD}
