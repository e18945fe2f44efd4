"""Single values of a JSON text replaced, added or removed, with everything else left as it was written.

No library edits JSON without writing it anew; a patch that people can read needs the original lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]  # not in the stubs
from typing import Any

Step = str | int
_BLANK = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[^\s,\]}]+")


class _Remove:
    """The type of REMOVE."""

    def __repr__(self) -> str:
        return "REMOVE"


REMOVE = _Remove()
"""In place of a value: take the key or the list's item away."""


@dataclass(frozen=True)
class Change:
    """A new value at a path of keys and positions; missing objects on the way are created."""

    path: tuple[Step, ...]
    value: Any


@dataclass(frozen=True)
class _Node:
    """A value's place in the text. members: (key or position, start of the member, the value's node)."""

    start: int
    end: int
    members: tuple[tuple[Step, int, _Node], ...] | None = field(default=None)
    is_object: bool = False

    def member(self, step: Step) -> _Node | None:
        return next((node for key, _, node in self.members or () if key == step), None)


def edited(text: str, changes: Iterable[Change]) -> str:
    """The text after all changes, in order. `text` must be valid JSON; a change to what is not there, and cannot be
    created, is left out."""
    for change in changes:
        text = _apply(text, change)
    return text


def value_at(document: Any, path: Sequence[Step]) -> Any:
    """The value at a path, None where there is none."""
    for step in path:
        in_list = isinstance(document, list) and isinstance(step, int) and 0 <= step < len(document)
        if not in_list and not (isinstance(document, dict) and step in document):
            return None
        document = document[step]
    return document


def path_of(document: Any, dotted: str) -> tuple[Step, ...]:
    """Steps of a path such as `a.b[0].c`; keys that hold dots themselves are found in the document."""
    steps: list[Step] = []
    rest = dotted
    while rest:
        position = re.match(r"\[(\d+)\]\.?", rest)
        if position:
            step: Step = int(position[1])
            rest = rest[position.end() :]
        else:
            known = (
                [key for key in document if rest == key or rest.startswith((f"{key}.", f"{key}["))]
                if isinstance(document, dict)
                else []
            )
            step = max(known, key=len) if known else re.split(r"[.\[]", rest, maxsplit=1)[0]
            rest = rest[len(step) :].removeprefix(".") if step else ""
        steps.append(step)
        document = value_at(document, [step])
    return tuple(steps)


def _apply(text: str, change: Change) -> str:
    root = _scan(text, _BLANK.match(text).end())  # type: ignore[union-attr]  # the pattern matches the empty text
    node, parents = root, [root]
    for depth, step in enumerate(change.path):
        child = node.member(step)
        if child is None:
            if change.value is REMOVE or not node.is_object or not isinstance(step, str):
                return text
            value = change.value
            for missing in reversed(change.path[depth + 1 :]):
                value = {missing: value}
            return _inserted(text, node, step, value)
        node = child
        parents.append(node)
    if change.value is REMOVE:
        return _removed(text, parents[-2], change.path[-1]) if len(parents) > 1 else text
    return text[: node.start] + _written(text, change.value, node.start) + text[node.end :]


def _scan(text: str, at: int) -> _Node:
    if text[at] == '"':
        return _Node(at, scanstring(text, at + 1, True)[1])
    if text[at] not in "{[":
        match = _SCALAR.match(text, at)
        return _Node(at, match.end() if match else at)
    members: list[tuple[Step, int, _Node]] = []
    is_object, position = text[at] == "{", _after(text, at + 1)
    while text[position] not in "}]":
        start, key = position, len(members)  # type: tuple[int, Step]
        if is_object:
            key, position = scanstring(text, position + 1, True)
            position = _after(text, _after(text, position) + 1)
        child = _scan(text, position)
        members.append((key, start, child))
        position = _after(text, child.end)
        if text[position] == ",":
            position = _after(text, position + 1)
    return _Node(at, position + 1, tuple(members), is_object)


def _after(text: str, at: int) -> int:
    """The next position that is no blank."""
    match = _BLANK.match(text, at)
    return match.end() if match else at


def _inserted(text: str, parent: _Node, key: str, value: Any) -> str:
    name = json.dumps(key, ensure_ascii=False)
    if not parent.members:
        pad = "\n" + _indent_of(text, parent.start) + _unit(text) if "\n" in text else ""
        close = "\n" + _indent_of(text, parent.start) if pad else ""
        shown = _dumped(value, _unit(text), pad.removeprefix("\n"))
        return f"{text[: parent.start]}{{{pad}{name}: {shown}{close}}}{text[parent.end :]}"
    _, start, last = parent.members[-1]
    before = re.search(r"[ \t]*$", text[:start])
    own_line = text[:start].rstrip(" \t").endswith("\n")
    pad = before[0] if before else ""
    gap = f"\n{pad}" if own_line else " "
    shown = _dumped(value, _unit(text), pad) if own_line else json.dumps(value, ensure_ascii=False)
    return f"{text[: last.end]},{gap}{name}: {shown}{text[last.end :]}"


def _removed(text: str, parent: _Node, step: Step) -> str:
    members = parent.members or ()
    index = next(i for i, (key, _, _) in enumerate(members) if key == step)
    if index + 1 < len(members):  # from this member to the next one
        return text[: members[index][1]] + text[members[index + 1][1] :]
    if index:  # the last: from the end of the one before
        return text[: members[index - 1][2].end] + text[members[index][2].end :]
    return text[: parent.start + 1] + text[parent.end - 1 :]


def _written(text: str, value: Any, at: int) -> str:
    """A value as it stands at a position: nested lines indented like the line it is on."""
    return _dumped(value, _unit(text), _indent_of(text, at))


def _dumped(value: Any, unit: str, pad: str) -> str:
    if isinstance(value, dict) and value and unit:
        lines = [
            f"{pad}{unit}{json.dumps(k, ensure_ascii=False)}: {_dumped(v, unit, pad + unit)}" for k, v in value.items()
        ]
        return "{\n" + ",\n".join(lines) + f"\n{pad}}}"
    if isinstance(value, list) and unit and any(isinstance(item, dict | list) for item in value):
        lines = [f"{pad}{unit}{_dumped(item, unit, pad + unit)}" for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{pad}]"
    return json.dumps(value, ensure_ascii=False)


def _indent_of(text: str, at: int) -> str:
    """The blanks at the start of the line of a position."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str) -> str:
    """The indentation of one level; empty for a text on one line."""
    match = re.search(r"\n([ \t]+)\S", text)
    return match[1] if match else ""
