"""What the model card of the source says: licence, names and task, read from its front matter and config.

A small reader of its own: a YAML library would be a dependency for a dozen lines `key: text`. Nested values are not
read; what is not plainly there is unknown.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phi4mm_export.errors import Phi4mmError
from phi4mm_export.package.write import WrittenFile
from phi4mm_export.spec.config_json import CONFIG_FILE
from phi4mm_export.spec.json_text import parse_json
from phi4mm_export.spec.on_disk import is_file

CARD_FILE = "README.md"
LICENSE_FILES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "COPYING")
"""Where a source keeps the text of its licence; the first that is there counts."""
MAX_NBYTES = 1 << 20
"""Larger cards are not read."""
MAX_TEXT = 200
_LINE = re.compile(r"([A-Za-z_][\w-]*):[ \t]+(\S.*)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class SourceCard:
    """None where the source does not say. `file` is the card that was read, None if there is none; `license_text` the
    name and bytes of the source's licence."""

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    base_model: str | None = None
    pipeline_tag: str | None = None
    file: WrittenFile | None = None
    license_text: tuple[str, bytes] | None = None


def read_source_card(folder: Path) -> SourceCard:
    """The card of a checkpoint folder. Never raises: a card is a description, and a broken one says nothing."""
    data = _plain_file(folder / CARD_FILE)
    said = front_matter(data) if data is not None else {}
    config = _config(folder / CONFIG_FILE)
    named = config.get("_name_or_path")
    return SourceCard(
        license=said.get("license") or _short(config.get("license")),
        license_name=said.get("license_name"),
        license_link=said.get("license_link"),
        base_model=named if isinstance(named, str) and _HUB_ID.fullmatch(named) else None,
        pipeline_tag=said.get("pipeline_tag"),
        file=None if data is None else WrittenFile(CARD_FILE, len(data), hashlib.sha256(data).hexdigest()),
        license_text=_license_text(folder),
    )


def _license_text(folder: Path) -> tuple[str, bytes] | None:
    found = ((name, _plain_file(folder / name)) for name in LICENSE_FILES)
    return next(((name, data) for name, data in found if data), None)


def front_matter(data: bytes) -> dict[str, str]:
    """The top-level texts between the two `---` lines at the start of a card."""
    lines = data.decode("utf-8", "replace").removeprefix("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return {}
    found: dict[str, str] = {}
    for line in lines[1:]:
        if line.rstrip() == "---":
            return found
        match = _LINE.fullmatch(line.rstrip())
        if match is not None and match[1] not in found and (text := _scalar(match[2])):
            found[match[1]] = text
    return {}


def _scalar(text: str) -> str | None:
    """A plain or quoted YAML text of one line; None for anything else (lists, maps, anchors, blocks)."""
    text = text.strip()
    if text[0] in "\"'":
        inner = text[1:-1]
        if len(text) < 2 or text[-1] != text[0] or text[0] in inner or "\\" in inner:
            return None
        return _short(inner)
    text = re.split(r"\s#", text)[0].rstrip()
    return None if not text or text[0] in "[{&*!|>%@`#-" or ": " in text else _short(text)


def _short(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable() else None


def _config(path: Path) -> Mapping[str, Any]:
    data = _plain_file(path)
    if data is None:
        return {}
    try:
        value = parse_json(data, path.name)
    except Phi4mmError:
        return {}
    return value if isinstance(value, dict) else {}


def _plain_file(path: Path) -> bytes | None:
    try:
        return path.read_bytes() if is_file(path) and path.stat().st_size <= MAX_NBYTES else None
    except OSError:
        return None
