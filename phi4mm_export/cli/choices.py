"""Option values that are not yet what the pipelines take: adapters, their folders and methods."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from phi4mm_export.errors import UsageError
from phi4mm_export.spec.build_recipe import AdapterChoice
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import is_folder


class EncoderPrecision(StrEnum):
    """Values of --encoder-precision."""

    FP16 = "fp16"
    FP32 = "fp32"


def adapter_role(name: AdapterChoice | None) -> Role | None:
    """The adapter of the merged and branch forms: vision unless something else was asked for."""
    if name is AdapterChoice.NONE:
        return None
    return Role(name or AdapterChoice.VISION)


def adapter_paths(given: Sequence[str] | None, adapter: AdapterChoice | None) -> dict[Role, Path]:
    """`[ROLE=]DIR` texts by role; a bare DIR takes the role of --adapter. Raises UsageError for a role given twice."""
    found: dict[Role, Path] = {}
    for text in given or ():
        name, separator, folder = text.partition("=")
        named = bool(separator) and name in set(Role)
        role = Role(name) if named else adapter_role(adapter)
        if role is None:
            raise UsageError(
                "--adapter none bakes no adapter, so this folder has no role",
                where=f"--adapter-path {text}",
                fix="write vision=DIR or speech=DIR",
            )
        if role in found:
            raise UsageError(f"two folders for the {role} adapter", where=f"--adapter-path {text}", fix="name one")
        path = Path(folder if named else text)
        if not is_folder(path):
            raise UsageError("expected a PEFT adapter folder, found none", where=str(path), fix="check the path")
        found[role] = path
    return found


class QuantMethod(StrEnum):
    """Values of --method."""

    GPTQ = "gptq"
    RTN = "rtn"
    NONE = "none"
    K_QUANT = "k_quant"
    HQQ = "hqq"
