"""JSON that came from outside: read strictly, reported by file and key; and the one form in which we write JSON.

Python's reader takes duplicate keys (the last wins), NaN and Infinity, and numbers beyond float64; all of these are
refused here, because two readers of such a file may see two different values.

A UTF-8 byte order mark is skipped in what people edit (configs, recipes, contracts, expectations) and refused in what
machines write and check (safetensors headers, manifests, locks, statistics): there it means that somebody edited it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from phi4mm_export.errors import CheckpointError, Phi4mmError, SystemLimitError, some
from phi4mm_export.spec.on_disk import is_file, lfs_size

MAX_NBYTES = 256 << 20
"""Largest JSON file that is read; the real tokenizer.json has 16 MB."""
MAX_DEPTH = 100
"""Deepest nesting of objects and arrays; real configs stay below 10."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def parse_json(data: str | bytes, where: str, *, error: type[Phi4mmError] = CheckpointError) -> Any:
    """The value that a JSON text holds; a UTF-8 byte order mark is skipped.

    `where` names the file in messages. Raises `error` for bytes that are not UTF-8, broken syntax, a key that occurs
    twice in one object, NaN or Infinity, text over `MAX_NBYTES`, nesting over `MAX_DEPTH`, and half surrogates.
    """
    text = _decode(data, where, error)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            twice = [key for key, count in Counter(key for key, _ in items).items() if count > 1]
            raise error(
                f"key {some(map(repr, twice))} occurs more than once in one object",
                where=where,
                fix="keep one of the entries",
            )
        return result

    def constant(name: str) -> Any:
        raise error(f"found the number {name}, which JSON does not have", where=where, fix="write a finite number")

    def finite(digits: str) -> float:
        number = float(digits)
        if math.isinf(number):
            raise error(f"the number {digits[:40]} is too large for a float64", where=where)
        return number

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=finite)
    except json.JSONDecodeError as err:
        fix = "save the file again, complete" if text.strip() else "the file is empty; fetch it again"
        raise error(
            f"not valid JSON: {err.msg} at line {err.lineno}, column {err.colno}", where=where, fix=fix
        ) from err
    except RecursionError as err:
        raise error(f"nested deeper than {MAX_DEPTH} levels", where=where) from err
    except ValueError as err:  # an integer of thousands of digits
        raise error(f"not usable JSON: {err}", where=where) from err
    if _depth_exceeds(value, MAX_DEPTH):
        raise error(f"nested deeper than {MAX_DEPTH} levels", where=where)
    if _SURROGATE_ESCAPE.search(text):
        _refuse_half_surrogates(value, where, error)
    return value


def parse_object(data: str | bytes, where: str, *, error: type[Phi4mmError] = CheckpointError) -> dict[str, Any]:
    """Like `parse_json`, for files whose top level must be an object."""
    value = parse_json(data, where, error=error)
    if not isinstance(value, dict):
        raise error(f"expected a JSON object at the top, found {json_kind(value)}", where=where)
    return value


def refuse_byte_order_mark(data: bytes, where: str, *, error: type[Phi4mmError]) -> None:
    """Raise `error` for a file that only machines write and that starts with a UTF-8 byte order mark."""
    if data.startswith(BYTE_ORDER_MARK):
        raise error("starts with a byte order mark", where=where, fix="fetch or write the file again, unedited")


def read_bytes(
    path: Path, *, error: type[Phi4mmError] = CheckpointError, where: str | None = None, most: int = MAX_NBYTES
) -> bytes:
    """The bytes of a small file. Raises `error` if it is missing, no file, over `most` bytes, or a Git LFS pointer;
    SystemLimitError if it may not be read."""
    place = where or path.name
    try:
        nbytes = path.stat().st_size
        if not is_file(path):
            raise error("expected a file, found something else under this name", where=place)
        if nbytes > most:
            raise error(f"the file has {nbytes:,} bytes, expected at most {most:,}", where=place)
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as err:
        raise error("the file is missing", where=place, fix=f"put {path.name} into {path.parent}") from err
    except PermissionError as err:
        raise SystemLimitError("the file may not be read", where=place, fix="give read permission") from err
    size = lfs_size(data)
    if size is not None:
        found = f"found a Git LFS pointer that stands for {size} bytes, expected the file itself"
        raise error(found, where=place, fix="run: git lfs pull")
    return data


def read_object(path: Path, *, error: type[Phi4mmError] = CheckpointError, where: str | None = None) -> dict[str, Any]:
    """The JSON object in a file. Raises `error` as `read_bytes` and `parse_json` do."""
    return parse_object(read_bytes(path, error=error, where=where), where or path.name, error=error)


def json_kind(value: object) -> str:
    """What JSON calls a parsed value: "an object", "a list", "a string", "a number", "true or false", "null"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    for kind, name in (
        (dict, "an object"),
        (list, "a list"),
        (str, "a string"),
        (int, "a number"),
        (float, "a number"),
    ):
        if isinstance(value, kind):
            return name
    return type(value).__name__


def json_bytes(value: Any, *, indent: int = 4) -> bytes:
    """A JSON file as we write it: keys in the order given, UTF-8, one newline at the end."""
    return (json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def _decode(data: str | bytes, where: str, error: type[Phi4mmError]) -> str:
    if len(data) > MAX_NBYTES:
        raise error(f"the text has {len(data):,} bytes, expected at most {MAX_NBYTES:,}", where=where)
    if isinstance(data, str):
        return data.removeprefix("\ufeff")
    if data.startswith(UTF16_MARKS):
        raise error("the text is UTF-16, expected UTF-8", where=where, fix="save the file as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise error(f"the text is not UTF-8 (byte {err.start:,})", where=where, fix="save the file as UTF-8") from err


def _depth_exceeds(value: Any, limit: int) -> bool:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > limit:
            return True
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
    return False


def _refuse_half_surrogates(value: Any, where: str, error: type[Phi4mmError]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as err:
        raise error("a string holds half of a surrogate pair, which no UTF-8 text can carry", where=where) from err
