"""Amounts of memory as people write them: "12GiB", "16 GB", "512M", "1.5e9"."""

from __future__ import annotations

import re
from fractions import Fraction

from phi4mm_export.errors import UsageError

_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE | re.ASCII)
_STEPS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
MAX_NBYTES = 1 << 60


def parse_bytes(text: str, *, where: str = "--memory-budget") -> int:
    """Bytes of a text such as "12GiB" (powers of 1024), "12GB" (powers of 1000) or a plain number of bytes.

    A letter alone, as in "16G", means powers of 1024, as in Docker and systemd. Raises UsageError for anything
    else, for zero and for more than 2^60.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise UsageError(
            f"{text!r} is no amount of memory; expected for example 12GiB, 16GB or 8589934592",
            where=where,
            fix="write a number and a unit: B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)",
        )
    digits, letter, binary, byte = match.groups()
    base = 1000 if letter and byte and not binary else 1024
    nbytes = int(Fraction(digits) * base ** _STEPS[letter.lower()])
    if not 1 <= nbytes <= MAX_NBYTES:
        raise UsageError(f"{text!r} is out of range; expected 1 byte to 2^60 bytes", where=where)
    return nbytes


def format_bytes(nbytes: int) -> str:
    """Bytes for reading, in powers of 1024 with one decimal: "512 B", "128.0 KiB", "16.0 GiB"."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
