"""Recipes from TOML, read strictly: every fault names file and key, what was expected and what was found.

tomllib refuses duplicate keys and broken syntax; other encodings than UTF-8, size, unknown keys, wrong types, NaN and
infinity are refused here. Nothing in a recipe is ever executed or looked up on a network.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from phi4mm_export.errors import Phi4mmError, UsageError, some
from phi4mm_export.spec.build_recipe import (
    BuildRecipe,
    CardChoices,
    EvaluateChoices,
    ExportChoices,
    QuantizeChoices,
)
from phi4mm_export.spec.build_recipe_kinds import QUANTIZE, TABLES, TOP, Kind, WrongValueError
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.json_fields import shown
from phi4mm_export.spec.json_text import UTF16_MARKS
from phi4mm_export.spec.on_disk import home_expanded

MAX_NBYTES = 64 << 10
"""Largest recipe file; the shipped ones have 1 KB."""
MOST_SHOWN = 200
RECIPE_VERSION = 1
NAMED = "phi4mm_export.spec"
_BARE_KEY = re.compile("[A-Za-z0-9_-]+")


def recipe_names() -> tuple[str, ...]:
    """The named recipes, sorted."""
    folder = resources.files(NAMED) / "data" / "recipes"
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def read_recipe(source: str | Path, settings: Sequence[str] = ()) -> BuildRecipe:
    """A recipe by name or from a file, with `key=value` settings put over it.

    Raises UsageError for a file that cannot be used, a name that no recipe has, and every fault in either.
    """
    text = str(source)
    names = recipe_names()
    if text in names:
        data = (resources.files(NAMED) / "data" / "recipes" / f"{text}.toml").read_bytes()
        where, folder = f"{text}.toml", None
    else:
        path = home_expanded(source)
        data, where, folder = _file_bytes(path, names), path.name, path.absolute().parent
    values = parse_toml(data, where)
    for setting in settings:
        put(values, setting)
    return recipe_of(values, where, folder=folder)


def parse_toml(data: bytes, where: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises UsageError for anything that is not one, or over MAX_NBYTES."""
    if len(data) > MAX_NBYTES:
        raise UsageError(f"expected at most {MAX_NBYTES:,} bytes, found {len(data):,}", where=where)
    if data.startswith(UTF16_MARKS):
        raise UsageError("the text is UTF-16, expected UTF-8", where=where, fix="save the file as UTF-8")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as err:
        raise UsageError(f"the text is not UTF-8 (byte {err.start:,})", where=where, fix="save it as UTF-8") from err
    except tomllib.TOMLDecodeError as err:
        what = f"not valid TOML: {' '.join(str(err).split())[:200]}"
        raise UsageError(what, where=where, fix="keep each key once, and texts in quotes") from err
    except RecursionError as err:
        raise UsageError("nested too deeply", where=where, fix="a recipe has tables of two levels") from err
    except ValueError as err:  # an integer of thousands of digits
        raise UsageError(f"not usable TOML: {err}", where=where) from err


def put(values: dict[str, Any], setting: str) -> None:
    """Put one `key=value` into the tables, the key dotted; the value is TOML, or else a text without quotes.

    Raises UsageError for a setting without `=` or with a key that leads through a value.
    """
    key, separator, text = setting.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise UsageError(
            f"expected key=value, found {setting!r}", where="--set", fix="write for example --set export.precision=int4"
        )
    table = values
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UsageError(f"{part} is a value, not a table", where=f"--set {setting}", fix="name a key")
    table[parts[-1]] = _value_of(text.strip())


def _value_of(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if set(found) == {"value"} else text


def recipe_of(
    values: Mapping[str, Any], where: str, *, folder: Path | None = None, error: type[Phi4mmError] = UsageError
) -> BuildRecipe:
    """A recipe from its tables; all faults are reported together. Raises `error`."""
    faults: list[tuple[str, str]] = []
    rest = dict(values)
    version = rest.pop("recipe_version", RECIPE_VERSION)
    if isinstance(version, bool) or version != RECIPE_VERSION:
        faults.append(("recipe_version", f"expected {RECIPE_VERSION}, found {_found(version)}"))
    known = {*TOP, *TABLES, "quantize", "recipe_version"}
    top = _table({key: rest[key] for key in rest if key in TOP}, TOP, "", faults)
    faults += [(key, _unknown(key, known)) for key in rest if key not in known]
    tables = {name: _section(rest, name, name, kinds, faults) for name, kinds in TABLES.items()}
    quantize = _quantize(rest, faults)
    if faults:
        raise _refusal(faults, where, error)
    return BuildRecipe(
        **{"name": where.removesuffix(".toml"), **top},
        export=ExportChoices(**tables["export"]),
        quantize={part: QuantizeChoices(**quantize[part]) for part in Component if part in quantize},
        evaluate=EvaluateChoices(**tables["evaluate"]),
        card=CardChoices(**tables["card"]),
        folder=folder,
    )  # fmt: skip


def _quantize(rest: Mapping[str, Any], faults: list[tuple[str, str]]) -> dict[Component, dict[str, Any]]:
    parts = rest.get("quantize", {})
    if not isinstance(parts, dict):
        faults.append(("quantize", f"expected tables such as [quantize.vision], found {_found(parts)}"))
        return {}
    known = {component.value for component in Component}
    faults += [(f"quantize.{name}", _unknown(name, known)) for name in parts if name not in known]
    return {
        Component(name): _section(parts, name, f"quantize.{name}", QUANTIZE, faults) for name in parts if name in known
    }


def _section(
    parent: Mapping[str, Any], name: str, place: str, kinds: Mapping[str, Kind], faults: list[tuple[str, str]]
) -> dict[str, Any]:
    table = parent.get(name, {})
    if not isinstance(table, dict):
        faults.append((place, f"expected a table [{place}], found {_found(table)}"))
        return {}
    return _table(table, kinds, f"{place}.", faults)


def _table(
    values: Mapping[str, Any], kinds: Mapping[str, Kind], prefix: str, faults: list[tuple[str, str]]
) -> dict[str, Any]:
    read = {}
    for key, value in values.items():
        if key not in kinds:
            faults.append((f"{prefix}{key}", _unknown(key, set(kinds))))
            continue
        try:
            read[key] = kinds[key].read(value)
        except WrongValueError as err:
            faults.append((f"{prefix}{key}", f"expected {err}, found {_found(value)}"))
    return read


def _unknown(key: str, known: set[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), 1)
    return "unknown key" + (f", did you mean {near[0]}" if near else f", known are {', '.join(sorted(known))}")


def _refusal(faults: list[tuple[str, str]], where: str, error: type[Phi4mmError]) -> Phi4mmError:
    first, what = faults[0]
    if len(faults) > 1:
        what = f"{len(faults)} keys cannot be used: {some((f'{shown_key(key)}: {text}' for key, text in faults), 3)}"
    return error(what, where=f"{where}: {shown_key(first)}", fix="phi4mm build --show NAME prints a whole recipe")


def shown_key(key: str) -> str:
    """A key as one line of bounded length."""
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in key[:80])
    return text if len(key) <= 80 else f"{text}..."


def _found(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict | list) and len(str(value)) > MOST_SHOWN:
        return "a table" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, str | int | float | list | dict):
        return shown(value)
    return f"the {type(value).__name__} {value}"


def _file_bytes(path: Path, names: Sequence[str]) -> bytes:
    """A recipe file's bytes. Raises UsageError for a file that is missing, none, or too large."""
    try:
        status = path.stat()
    except (OSError, ValueError) as err:
        near = difflib.get_close_matches(path.name.removesuffix(".toml"), names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(
            f"expected a recipe file or one of {', '.join(names)}, found neither",
            where=str(path),
            fix=f"{hint}phi4mm build --list names them",
        ) from err
    if not stat.S_ISREG(status.st_mode):
        raise UsageError("expected a recipe file, found something else under this name", where=str(path))
    if status.st_size > MAX_NBYTES:
        raise UsageError(f"expected at most {MAX_NBYTES:,} bytes, found {status.st_size:,}", where=path.name)
    return path.read_bytes()


def toml_text(values: Mapping[str, Any]) -> str:
    """Tables of plain values as TOML: scalars first, then one table after the other."""
    return "\n".join(_toml_lines(values, "")) + "\n"


def _toml_lines(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in values.items():
        if not isinstance(value, Mapping):
            yield f"{_toml_key(key)} = {_toml_value(value)}"
    for key, value in values.items():
        if isinstance(value, Mapping):
            name = f"{prefix}{_toml_key(key)}"
            if not value or any(not isinstance(inner, Mapping) for inner in value.values()):
                yield f"\n[{name}]"
            yield from _toml_lines(value, f"{name}.")


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml_string(key)


def _toml_string(text: str) -> str:
    """A basic string: the escapes of JSON, and one for delete, which TOML does not take as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    return repr(value)
