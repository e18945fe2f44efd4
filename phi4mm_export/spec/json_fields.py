"""Typed reads of a JSON object that came from outside; every fault names file, key, expected and found value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import NoReturn

from phi4mm_export.errors import CheckpointError, Phi4mmError

MAX_INTEGER = 2**31 - 1
"""No dimension, rank, length or count of a model comes near it; runtimes keep them in 32 bits."""

JsonObject = Mapping[str, object]


def shown(value: object, limit: int = 60) -> str:
    """A JSON value as a reader would find it in the file, cut to `limit` characters."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= limit else f"{text[:limit]}..."


def is_integer(value: object) -> bool:
    """Whether a JSON value is an integer (true and false are not, 4096.0 is not)."""
    return isinstance(value, int) and not isinstance(value, bool)


class Fields:
    """One JSON object with the place it came from.

    An absent key takes the default; where no default is given, it is an error. `null` counts as a value
    unless a method says otherwise. `error` is the class that every method raises.
    """

    def __init__(
        self, raw: JsonObject, file: str, path: str = "", *, error: type[Phi4mmError] = CheckpointError
    ) -> None:
        self.raw, self.file, self.path, self.error = raw, file, path, error

    def __contains__(self, key: str) -> bool:
        return key in self.raw

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def get(self, key: str) -> object:
        """The value as it stands, None when absent."""
        return self.raw.get(key)

    @property
    def place(self) -> str:
        """File and, for a nested object, its dotted key."""
        return f"{self.file}: {self.path.rstrip('.')}" if self.path else self.file

    def where(self, key: str) -> str:
        """File and dotted key, as errors show it."""
        return f"{self.file}: {self.path}{key}"

    def refuse(self, key: str, expected: str, *, fix: str = "") -> NoReturn:
        """Raise: the key's value is not what was expected."""
        found = shown(self.raw[key]) if key in self.raw else "no such key"
        raise self.error(
            f"{self.path}{key} must be {expected}, found {found}",
            where=self.where(key),
            fix=fix or f"correct {self.path}{key} in {self.file}",
        )

    def section(self, key: str) -> Fields:
        """A nested object; empty when absent or null."""
        value = self.raw.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return Fields(value, self.file, f"{self.path}{key}.", error=self.error)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum` and at most MAX_INTEGER."""
        value = self.raw.get(key, default) if key in self.raw or default is not None else None
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= MAX_INTEGER:
            limit = f" and at most {MAX_INTEGER}" if is_integer(value) else ""
            self.refuse(key, f"an integer of at least {minimum}{limit}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number, positive unless `positive` is False."""
        value = self.raw.get(key, default) if key in self.raw or default is not None else None
        wanted = "a positive finite number" if positive else "a finite number"
        if not _is_finite(value) or (positive and float(value) <= 0):  # type: ignore[arg-type]  # _is_finite says so
            self.refuse(key, wanted)
        return float(value)  # type: ignore[arg-type]  # _is_finite says so

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of exactly `length` positive finite numbers."""
        value = self.raw.get(key)
        if not isinstance(value, list):
            self.refuse(key, f"a list of {length} numbers")
        if len(value) != length:
            raise self.error(
                f"{self.path}{key} must hold {length} numbers, found {len(value)}",
                where=self.where(key),
                fix=f"correct {self.path}{key} in {self.file}",
            )
        for position, item in enumerate(value):
            if not _is_finite(item) or item <= 0:
                raise self.error(
                    f"{self.path}{key}[{position}] must be a positive finite number, found {shown(item)}",
                    where=self.where(f"{key}[{position}]"),
                    fix=f"correct {self.path}{key} in {self.file}",
                )
        return tuple(float(item) for item in value)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false; `default` when absent."""
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
