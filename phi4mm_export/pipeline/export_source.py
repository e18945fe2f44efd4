"""Where an export reads from: a folder, a hub model fetched to disk, or a hub model read in ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.checkpoint.digests import InputDigest
from phi4mm_export.checkpoint.head import HeadChoice
from phi4mm_export.checkpoint.hub import fetch_checkpoint, resolve_model
from phi4mm_export.checkpoint.open import Checkpoint, open_checkpoint
from phi4mm_export.checkpoint.remote import open_remote, stated_digests
from phi4mm_export.errors import UsageError
from phi4mm_export.spec.model import Role


@dataclass(frozen=True)
class OpenedModel:
    """An opened checkpoint; the folder that tells its commit; digests of files that are not on disk to be hashed."""

    checkpoint: Checkpoint
    folder: Path
    stated: Mapping[str, InputDigest]

    def digests(self, hashed: tuple[InputDigest, ...]) -> tuple[InputDigest, ...]:
        """Those taken on disk and those stated, sorted by name."""
        return tuple(sorted((*hashed, *self.stated.values()), key=lambda digest: digest.name))


@contextmanager
def open_model(
    model: str | Path,
    *,
    revision: str | None,
    adapter_paths: Mapping[Role, Path],
    head: HeadChoice | None,
    stream: bool,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[OpenedModel]:
    """The checkpoint that `model` names. stream: a hub id is read in ranges, with no copy of its weights on disk.

    Raises UsageError for a folder with `stream`, else as `fetch_checkpoint`, `open_checkpoint` and `open_remote`.
    """
    found = resolve_model(str(model), revision=revision)
    if isinstance(found, Path) and stream:
        raise UsageError("expected a hub id, found a folder", where=f"--stream {model}", fix="leave --stream out")
    if isinstance(found, str) and stream:
        with open_remote(found, revision=revision, adapter_paths=adapter_paths, head=head) as (checkpoint, small):
            stated = {
                name: InputDigest(name, nbytes, sha256) for name, (nbytes, sha256) in stated_digests(checkpoint).items()
            }
            yield OpenedModel(checkpoint, small, stated)
        return
    folder = found if isinstance(found, Path) else fetch_checkpoint(found, revision=revision, progress=progress)
    with open_checkpoint(folder, adapter_paths=adapter_paths, head=head) as checkpoint:
        yield OpenedModel(checkpoint, folder, {})
