"""Reading a PEFT folder: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter, pair_up, parse_settings
from phi4mm_export.checkpoint.documents import read_object
from phi4mm_export.checkpoint.header import read_header
from phi4mm_export.checkpoint.source import OpenShard, ShardFile, TensorSource
from phi4mm_export.errors import CheckpointError
from phi4mm_export.spec.json_fields import Fields
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.names import canonical_name, split_lora
from phi4mm_export.spec.on_disk import exists

PEFT_DEFAULT_NAME = "default"
"""What PEFT calls an adapter that nobody named; raw state dicts keep the name inside the keys."""


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter, the files it was read from, and the open weights file."""

    adapter: Adapter
    files: tuple[Path, ...]
    shard: ShardFile


def open_adapter_folder(
    folder: Path,
    role: Role,
    modules: Mapping[str, tuple[int, int]],
    *,
    label: str,
    open_shard: OpenShard = ShardFile,
) -> OpenedAdapter:
    """The adapter in a PEFT folder; `label` stands for the folder in messages.

    modules: canonical module -> (out, in) of every projection that may carry an adapter. The caller closes
    the shard. Raises CheckpointError as `parse_settings` and `pair_up` do, and for missing files.
    """
    config_label, weights_label = f"{label}/{ADAPTER_CONFIG}", f"{label}/{ADAPTER_WEIGHTS}"
    weights = folder / ADAPTER_WEIGHTS
    if not exists(weights) and exists(folder / "adapter_model.bin"):
        raise CheckpointError(
            f"no {ADAPTER_WEIGHTS}, only adapter_model.bin",
            where=label,
            fix="save the adapter as safetensors: pickled files can run code and are not read",
        )
    settings = parse_settings(Fields(read_object(folder / ADAPTER_CONFIG, config_label), config_label))
    entries = read_header(weights, weights_label)
    shard = open_shard(weights, weights_label)
    try:
        sources = [
            TensorSource(_in_role(entry.name, role, weights_label), entry.name, weights, entry.dtype, entry.shape,
                         entry.offset, shard)
            for entry in entries
        ]  # fmt: skip
        adapter = pair_up(sources, role, settings, modules, source=label)
    except BaseException:
        shard.close()
        raise
    return OpenedAdapter(adapter, (folder / ADAPTER_CONFIG, weights), shard)


def _in_role(stored: str, role: Role, label: str) -> str:
    """The canonical name with the role in it: `MODULE.lora_A.ROLE.weight`; other names as they are."""
    name = canonical_name(stored)
    lora = split_lora(name)
    if lora is None:
        return name
    if lora.adapter not in (None, PEFT_DEFAULT_NAME, role.value):
        raise CheckpointError(
            f"{stored} belongs to an adapter named {lora.adapter!r}, expected one {role} adapter",
            where=f"{label}: {stored}",
            fix="save the adapter alone with PEFT's save_pretrained",
        )
    return f"{lora.module}.lora_{lora.half}.{role}.weight"
