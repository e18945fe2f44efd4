"""The line on which a key of a JSON text stands, for remarks that point into the file.

Python's reader keeps no positions. This scanner only locates: what it makes of a text that is not valid JSON does not
matter, `json_text` judges that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_ROOT = ""


def line_of(text: str, path: str) -> int | None:
    """The line (from 1) of the key or element at `path`, such as `model.eos_token_id[1]`.

    A key that is not there stands for the nearest one around it; None where not even the first part of the path is
    found. Keys that hold dots are found as well: paths are compared as they are written.
    """
    best, length = None, 0
    for found, line in key_lines(text):
        if found == path:
            return line
        inside = path.startswith(found) and path[len(found) : len(found) + 1] in (".", "[")
        if inside and len(found) > length:
            best, length = line, len(found)
    return best


def key_lines(text: str) -> Iterator[tuple[str, int]]:
    """Path and line of every key of an object and every element of a list, in the order of the text."""
    stack: list[tuple[str, int | None]] = []  # path of the container; number of the next element, None in an object
    here, wants_key, line, at = _ROOT, False, 1, 0
    for match in _TOKEN.finditer(text):
        line, at = line + text.count("\n", at, match.start()), match.start()
        token = match.group()
        if wants_key and token.startswith('"'):
            here, wants_key = _joined(stack[-1][0], token), False
            yield here, line
            continue
        if token not in "]}," and stack and stack[-1][1] is not None:
            container, number = stack[-1]
            here = f"{container}[{number}]"
            yield here, line
        if token in "{[":
            stack.append((here, 0 if token == "[" else None))
            wants_key = token == "{"
        elif token in "}]" and stack:
            here, _ = stack.pop()
            wants_key = False
        elif token == "," and stack:
            container, count = stack[-1]
            stack[-1] = (container, None if count is None else count + 1)
            wants_key = count is None


def _joined(container: str, token: str) -> str:
    try:
        key = str(json.loads(token, strict=False))
    except ValueError:
        key = token[1:-1]
    return f"{container}.{key}" if container else key
