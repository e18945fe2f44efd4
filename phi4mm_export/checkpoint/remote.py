"""A checkpoint on the hub, opened without fetching its weights: they are read in ranges while they are used.

The small files are fetched as usual. Of every shard only the header is fetched; a stand-in with that header and a hole
of the shard's size lets every check of a checkpoint on disk run unchanged, and the weights' reads go to the server.
The commit is settled once, and every answer must come from the file with the ETag that was seen then.
"""

from __future__ import annotations

import fnmatch
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from phi4mm_export.checkpoint.head import HeadChoice
from phi4mm_export.checkpoint.header import LENGTH_NBYTES, MAX_HEADER_NBYTES
from phi4mm_export.checkpoint.hub import FETCHED_FILES, SKIPPED_FILES, fetch_checkpoint, hub_faults, snapshot_commit
from phi4mm_export.checkpoint.open import Checkpoint, open_checkpoint
from phi4mm_export.checkpoint.ranges import Address, Patience, RemoteFile
from phi4mm_export.checkpoint.read_ahead import ReadAhead
from phi4mm_export.checkpoint.source import ShardFile
from phi4mm_export.checkpoint.stand_in import write_stand_in
from phi4mm_export.errors import CheckpointError
from phi4mm_export.spec.model import Role

WEIGHT_SUFFIX = ".safetensors"
SMALL_FILES = tuple(pattern for pattern in FETCHED_FILES if not pattern.endswith(WEIGHT_SUFFIX))
FIRST_READ_NBYTES = 1 << 20
"""A shard's header has about 100 KB: one request brings it whole."""
SHA256_DIGITS = 64


class RemoteShard(ShardFile):
    """A shard whose header lies on disk and whose weights lie on a server."""

    def __init__(self, path: Path, label: str, remote: RemoteFile, blocks: ReadAhead) -> None:
        super().__init__(path, label)
        self.remote, self._blocks, self.stated_digest = remote, blocks, remote.etag

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from the server. Raises CheckpointError and SystemLimitError as `RemoteFile.read`."""
        self._blocks.read_into(self.remote, buffer, offset)


@contextmanager
def open_remote(
    model_id: str,
    *,
    revision: str | None = None,
    adapter_paths: Mapping[Role, Path] | None = None,
    head: HeadChoice | None = None,
    patience: Patience | None = None,
) -> Iterator[tuple[Checkpoint, Path]]:
    """The checkpoint `model_id` of the hub, and the folder of its small files in the hub's cache, named by the commit.

    Raises as `fetch_checkpoint`, `open_checkpoint` and `RemoteFile.read`.
    """
    small = fetch_checkpoint(model_id, revision=revision, patterns=SMALL_FILES)
    commit = str(snapshot_commit(small))
    with tempfile.TemporaryDirectory(prefix="phi4mm-remote-") as temporary, ReadAhead() as blocks:
        folder = Path(temporary)
        shutil.copytree(small, folder, dirs_exist_ok=True)
        remotes: dict[Path, RemoteFile] = {}
        for name in weight_files(model_id, commit):
            remote = RemoteFile(name, _resolver(model_id, commit, name), patience)
            write_stand_in(folder / name, _head(remote), remote.nbytes)
            remotes[folder / name] = remote

        def open_shard(path: Path, label: str) -> ShardFile:
            remote = remotes.get(path)
            return ShardFile(path, label) if remote is None else RemoteShard(path, label, remote, blocks)

        with open_checkpoint(folder, adapter_paths=adapter_paths, head=head, open_shard=open_shard) as checkpoint:
            yield checkpoint, small


def weight_files(model_id: str, commit: str) -> list[str]:
    """The safetensors files of a commit that an export reads, sorted."""
    import huggingface_hub

    with hub_faults(f"{model_id} at {commit}"):
        names = huggingface_hub.HfApi().list_repo_files(model_id, revision=commit)
    wanted = [pattern for pattern in FETCHED_FILES if pattern.endswith(WEIGHT_SUFFIX)]
    return sorted(name for name in names if _matches(name, wanted) and not _matches(name, SKIPPED_FILES))


def stated_digests(checkpoint: Checkpoint) -> dict[str, tuple[int, str]]:
    """Label -> size and sha256 of every remote file of an opened checkpoint, as the hub states them.

    Raises CheckpointError where the hub states another kind of digest: the file is not stored as a large file.
    """
    shards = {s.shard.label: s.shard.remote for s in checkpoint.sources if isinstance(s.shard, RemoteShard)}
    for label, remote in shards.items():
        if len(remote.etag) != SHA256_DIGITS:
            raise CheckpointError(
                f"the hub states no sha256 for the file, only {remote.etag!r}",
                where=label,
                fix="fetch the checkpoint to disk instead: --no-stream",
            )
    return {label: (remote.nbytes, remote.etag) for label, remote in sorted(shards.items())}


def _head(remote: RemoteFile) -> bytes:
    """Length and text of the shard's header; what is no such header is left to the checks of the stand-in."""
    first = remote.read(0, min(FIRST_READ_NBYTES, remote.nbytes)) if remote.nbytes else b""
    if len(first) < LENGTH_NBYTES:
        return first
    (length,) = struct.unpack("<Q", first[:LENGTH_NBYTES])
    end = min(LENGTH_NBYTES + int(length), remote.nbytes)
    if length > MAX_HEADER_NBYTES or end <= len(first):
        return first[:end]
    return first + remote.read(len(first), end)


def _resolver(model_id: str, commit: str, name: str) -> Any:
    """A function that asks the hub where a file's bytes are now. The token goes to the hub only."""
    import huggingface_hub
    from huggingface_hub.utils import build_hf_headers

    url = huggingface_hub.hf_hub_url(model_id, name, revision=commit)

    def resolve() -> Address:
        with hub_faults(f"{model_id}: {name}"):
            found = huggingface_hub.get_hf_file_metadata(url)
        same_host = urlsplit(found.location).netloc == urlsplit(url).netloc
        headers = build_hf_headers() if same_host else {}
        return Address(found.location, headers, str(found.etag), int(found.size or 0))

    return resolve


def _matches(name: str, patterns: tuple[str, ...] | list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
