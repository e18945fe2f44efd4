"""The part of GitHub's expression language that action.yml uses, so that a rehearsal follows its wiring.

Strings in single quotes, names with dots, calls without arguments, ==, !=, !, && and ||, parentheses. Everything else
is refused: an expression that the rehearsal cannot follow has not been rehearsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_TOKEN = re.compile(r"\s*('(?:[^']|'')*'|==|!=|&&|\|\||[!()]|[A-Za-z_][\w.-]*)")
_PLACE = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)

Names = Mapping[str, Any]
"""Nested mappings: inputs, steps, runner, github; a missing name is an empty text, as on a runner."""
Calls = Mapping[str, Callable[[], bool]]


def substituted(text: str, names: Names) -> str:
    """The text with every ${{ expression }} replaced by its value."""
    return _PLACE.sub(lambda found: _shown(evaluated(found.group(1), names, {})), text)


def evaluated(text: str, names: Names, calls: Calls) -> Any:
    """The value of an expression. Raises ValueError for what this module does not know."""
    parser = _Parser(text, names, calls)
    value = parser.either()
    if parser.rest():
        raise ValueError(f"cannot follow the expression {text.strip()!r} from {parser.rest()[0]!r} on")
    return value


def truth(value: Any) -> bool:
    """What counts as true: everything but false, zero and an empty text."""
    return value not in (False, 0, "", None)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Parser:
    def __init__(self, text: str, names: Names, calls: Calls) -> None:
        self._tokens, self._names, self._calls = _tokens(text), names, calls

    def rest(self) -> list[str]:
        return self._tokens

    def either(self) -> Any:
        value = self._both()
        while self._take("||"):
            other = self._both()
            value = value if truth(value) else other
        return value

    def _both(self) -> Any:
        value = self._equal()
        while self._take("&&"):
            other = self._equal()
            value = other if truth(value) else value
        return value

    def _equal(self) -> Any:
        value = self._single()
        for sign in ("==", "!="):
            if self._take(sign):
                return (value == self._single()) is (sign == "==")
        return value

    def _single(self) -> Any:
        if self._take("!"):
            return not truth(self._single())
        if self._take("("):
            value = self.either()
            if not self._take(")"):
                raise ValueError("a parenthesis is not closed")
            return value
        token = self._tokens.pop(0) if self._tokens else ""
        if token.startswith("'"):
            return token[1:-1].replace("''", "'")
        if self._take("("):
            if token not in self._calls or not self._take(")"):
                raise ValueError(f"cannot follow a call of {token!r}")
            return self._calls[token]()
        if not token or not (token[0].isalpha() or token[0] == "_"):
            raise ValueError(f"expected a value, found {token!r}")
        return self._looked_up(token)

    def _looked_up(self, name: str) -> Any:
        value: Any = self._names
        first, *more = name.split(".")
        if first not in value:
            raise ValueError(f"unknown context {first!r}")
        for part in (first, *more):
            value = value.get(part, "") if isinstance(value, Mapping) else ""
        return value

    def _take(self, token: str) -> bool:
        if self._tokens[:1] == [token]:
            del self._tokens[0]
            return True
        return False


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"cannot follow the expression {text!r} from {text[at:]!r} on")
        found.append(match.group(1))
        at = match.end()
    return found
