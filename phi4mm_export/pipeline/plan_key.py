"""The content key of a build: one digest over everything that decides its bytes, taken without reading all weights.

It names a cache of finished stages. A cache is never trusted for its name: what it holds is used only after its own
digests agree (package/resume.py). So the key may leave out what is dear to read: of a file of weights it takes the
header and a few blocks spread over it; of a model on the hub the digests that the hub states.
"""

from __future__ import annotations

import glob
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from phi4mm_export.checkpoint.digests import input_files
from phi4mm_export.checkpoint.header import LENGTH_NBYTES, MAX_HEADER_NBYTES
from phi4mm_export.checkpoint.hub import resolve_model
from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.checkpoint.remote import WEIGHT_SUFFIX, open_remote, stated_digests
from phi4mm_export.errors import UsageError
from phi4mm_export.package.resume import code_version
from phi4mm_export.package.tokenizer import OPTIONAL_FILES, REQUIRED_FILES
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import home_expanded, is_file, is_folder

BLOCK_NBYTES = 64 << 10
BLOCKS = 16
"""Blocks taken of a file of weights: a fine-tune changes all of them."""
CHUNK = 4 << 20

Identity = list[str | int]
"""Name, bytes, sha256 of one input."""


def content_key(
    model: str | Path,
    *,
    choices: Mapping[str, Any],
    calibration: str | None = None,
    revision: str | None = None,
    adapter_paths: Mapping[Role, Path] | None = None,
) -> str:
    """sha256 in hex over this version of the code, the choices of the build, its samples and its checkpoint.

    choices: the recipe as plain values. calibration: a file, a folder, a pattern, or a word such as "builtin".
    Neither the folder's place nor the times of its files take part. Raises UsageError for a MODEL or samples that are
    not there, CheckpointError and SystemLimitError as opening does.
    """
    parts = {
        "code": code_version(),
        "choices": dict(choices),
        "samples": _samples(calibration),
        "inputs": _inputs(model, revision, adapter_paths or {}),
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _inputs(model: str | Path, revision: str | None, adapter_paths: Mapping[Role, Path]) -> list[Identity]:
    found = resolve_model(str(model))
    with ExitStack() as stack:
        if isinstance(found, str):
            checkpoint, small = stack.enter_context(open_remote(found, revision=revision, adapter_paths=adapter_paths))
            stated = stated_digests(checkpoint)
            beside = {path.name: path for path in small.iterdir() if is_file(path)}
            files = {name: path for name, path in beside.items() if name not in stated}
            files |= _adapter_files(input_files(checkpoint, adapter_paths=adapter_paths))
        else:
            checkpoint = stack.enter_context(open_checkpoint(found, adapter_paths=adapter_paths))
            stated = {}
            files = input_files(checkpoint, beside=(*REQUIRED_FILES, *OPTIONAL_FILES), adapter_paths=adapter_paths)
        on_disk = [_of_file(name, path) for name, path in files.items()]
        remote: list[Identity] = [[name, nbytes, digest] for name, (nbytes, digest) in stated.items()]
        return sorted([*on_disk, *remote], key=lambda identity: str(identity[0]))


def _adapter_files(files: Mapping[str, Path]) -> dict[str, Path]:
    return {name: path for name, path in files.items() if name.startswith("adapter-")}


def _of_file(name: str, path: Path) -> Identity:
    digest, nbytes = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        if path.suffix == WEIGHT_SUFFIX:
            for start, stop in _sampled(file.read(LENGTH_NBYTES), nbytes):
                file.seek(start)
                digest.update(file.read(stop - start))
        else:
            while piece := file.read(CHUNK):
                digest.update(piece)
    return [name, nbytes, digest.hexdigest()]


def _sampled(head: bytes, nbytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of a file of weights: its header, and blocks at equal distances; the last one ends with the file."""
    length = struct.unpack("<Q", head)[0] if len(head) == LENGTH_NBYTES else 0
    yield 0, min(LENGTH_NBYTES + min(int(length), MAX_HEADER_NBYTES), nbytes)
    last = max(0, nbytes - BLOCK_NBYTES)
    for number in range(BLOCKS):
        start = last * number // (BLOCKS - 1)
        yield start, min(start + BLOCK_NBYTES, nbytes)


def _samples(calibration: str | None) -> list[Identity] | str:
    """Every sample file below its folder or pattern; a word that is no path stands for itself."""
    if calibration is None or calibration == "builtin":
        return calibration or ""
    path = home_expanded(calibration)
    if is_folder(path):
        found = {p.relative_to(path).as_posix(): p for p in path.rglob("*") if is_file(p)}
    elif is_file(path):
        found = {path.name: path}
    else:
        matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207
        found = {match.as_posix(): match for match in matches if is_file(match)}
    if not found:
        raise UsageError("there are no such samples", where=f"--calibration {calibration}", fix="pass their path")
    return [_of_file(name, found[name]) for name in sorted(found)]
