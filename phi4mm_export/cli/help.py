"""How `phi4mm COMMAND --help` reads: names in capitals for what is to be filled in, examples that can be copied.

Contexts and formatters are `Any`: Typer carries its own copy of click and does not export their classes.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

NUMBERS = {"int": "N", "int range": "N", "float": "X", "float range": "X"}
"""Typer's names for kinds of numbers, and what help shows instead."""
AT_LEAST = ("x>=", "at least ")
"""How Typer states a lower bound, and how we do."""
EXAMPLE = "Example: "
_SHOWN_TYPE = re.compile(r" <(?:list\[)?([^<>\]]+)\]?>")


class HelpfulCommand(TyperCommand):
    """A command whose help has no angle brackets, braces or wrapped examples."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        del ctx
        for paragraph in (self.help or "").strip().split("\n\n"):
            line = " ".join(paragraph.split())
            formatter.write_paragraph()
            with formatter.indentation():
                if line.startswith(EXAMPLE):
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
                else:
                    formatter.write_text(line)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                name, text = record
                rows[param.param_type_name].append((_plain(name, param.param_type_name), text.replace(*AT_LEAST)))
        for kind, listed in rows.items():
            if listed:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(listed)


def _plain(name: str, kind: str) -> str:
    """The left column of a row: no type beside an argument's name, a letter or the choices beside an option's."""
    if kind == "argument":
        return _SHOWN_TYPE.sub("", name)
    return _SHOWN_TYPE.sub(lambda found: " " + NUMBERS.get(found[1], found[1]), name)
