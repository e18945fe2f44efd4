"""Which output head counts: the stored `lm_head.weight`, or the embedding table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from phi4mm_export.checkpoint.source import TensorSource
from phi4mm_export.checkpoint.values import largest_difference
from phi4mm_export.errors import CheckpointError, counted
from phi4mm_export.spec.config_json import CONFIG_FILE
from phi4mm_export.spec.model import ModelConfig
from phi4mm_export.spec.names import EMBEDDING_TABLE, OUTPUT_HEAD

HeadChoice = Literal["stored", "tied"]
TIE_KEY = "tie_word_embeddings"


def settle_head(
    config: ModelConfig, tensors: Mapping[str, TensorSource], choice: HeadChoice | None
) -> tuple[ModelConfig, dict[str, TensorSource]]:
    """The config with `tied_head` settled, and the tensors without a head that is the embedding table.

    Raises CheckpointError where key and tensors contradict one another and `choice` does not decide.
    """
    stored, table = tensors.get(OUTPUT_HEAD), tensors.get(EMBEDDING_TABLE)
    if stored is None:
        if choice == "stored" or (choice is None and not config.tied_head):
            said = f"{TIE_KEY} is false" if choice is None else "the stored head was asked for"
            raise CheckpointError(
                f"{said}, but {OUTPUT_HEAD} is not stored",
                where=f"{CONFIG_FILE}: {TIE_KEY}",
                fix="restore the tensor, or use the embedding table with --head tied",
            )
        return dataclasses.replace(config, tied_head=True), dict(tensors)
    tied = config.tied_head if choice is None else choice == "tied"
    if choice is None and tied and table is not None:
        _refuse_drifted(stored, table)
    kept = {name: source for name, source in tensors.items() if not (tied and name == OUTPUT_HEAD)}
    return dataclasses.replace(config, tied_head=tied), kept


def _refuse_drifted(stored: TensorSource, table: TensorSource) -> None:
    if stored.shape != table.shape:
        raise CheckpointError(
            f"{TIE_KEY} is true, but {OUTPUT_HEAD} has shape {list(stored.shape)} and {EMBEDDING_TABLE} "
            f"{list(table.shape)}",
            where=f"{stored.where} against {CONFIG_FILE}: {TIE_KEY}",
            fix="save the model anew, or use the embedding table with --head tied",
        )
    count, largest = largest_difference(stored, table)
    if count:
        raise CheckpointError(
            f"{TIE_KEY} is true, but {OUTPUT_HEAD} differs from {EMBEDDING_TABLE} in "
            f"{counted(count, 'value')}, by up to {largest:.4g}",
            where=f"{stored.where} against {CONFIG_FILE}: {TIE_KEY}",
            fix="choose: --head stored uses the stored head, --head tied the embedding table",
        )
