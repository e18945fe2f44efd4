"""Which files hold a checkpoint's tensors: the index against the shards, both ways."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from phi4mm_export.checkpoint.documents import read_object
from phi4mm_export.checkpoint.header import StoredTensor, read_header
from phi4mm_export.errors import CheckpointError, SystemLimitError, counted, some
from phi4mm_export.spec.json_fields import shown
from phi4mm_export.spec.names import canonical_name, is_recomputed_buffer
from phi4mm_export.spec.on_disk import exists, is_file, is_link

INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE_STEM = "adapter_model"

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.ckpt", "*.h5", "*.msgpack")


@dataclass(frozen=True)
class Shards:
    """Stored name -> its entry and its file's name; what was read; what a user should know."""

    tensors: Mapping[str, tuple[StoredTensor, str]]
    files: tuple[str, ...]
    warnings: tuple[str, ...]


def read_shards(folder: Path) -> Shards:
    """Every tensor of the checkpoint in `folder`, from headers and index alone.

    With an index, the index decides which copy of a tensor counts. Without one, a tensor in two files is an
    error. Raises CheckpointError for missing files, entries without a tensor and tensors without an entry.
    """
    if exists(folder / INDEX_FILE) or is_link(folder / INDEX_FILE):
        return _read_indexed(folder, _weight_map(folder))
    return _read_all(folder)


def _weight_map(folder: Path) -> dict[str, str]:
    """The index's tensor name -> file name; buffers that are never read left out."""
    entries = read_object(folder / INDEX_FILE, INDEX_FILE).get("weight_map")
    place = f"{INDEX_FILE}: weight_map"
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(
            f"weight_map must map tensor names to files, found {shown(entries)}",
            where=place,
            fix="fetch the index again",
        )
    outside = sorted({shown(f) for f in entries.values() if not _stays_inside(f)})
    if outside:
        raise CheckpointError(
            f"expected names of safetensors files inside the checkpoint's folder, found {some(outside)}",
            where=place,
            fix="fetch the index again from a source you trust",
        )
    return {name: file for name, file in entries.items() if not is_recomputed_buffer(canonical_name(name))}


def _stays_inside(file: object) -> bool:
    """Whether an index entry is a plain relative path of a safetensors file."""
    if not isinstance(file, str) or not file.endswith(".safetensors") or not file.isprintable():
        return False
    plain = not set(file) & set("\\:") and str(PurePosixPath(file)) == file
    return plain and not PurePosixPath(file).is_absolute() and ".." not in PurePosixPath(file).parts


def _read_indexed(folder: Path, weight_map: dict[str, str]) -> Shards:
    counts = Counter(weight_map.values())
    missing = sorted(file for file in counts if not exists(folder / file))
    if missing:
        lost = sum(counts[file] for file in missing)
        raise CheckpointError(
            f"missing {len(missing)} of the {counted(len(counts), 'file')} that {INDEX_FILE} names, "
            f"with {counted(lost, 'tensor')}: {some(missing)}" + _unfinished_downloads(folder),
            where=missing[0],
            fix="fetch the missing files, or finish the download",
        )
    found = {file: {t.name: t for t in read_header(folder / file, file)} for file in sorted(counts)}
    absent = sorted(name for name, file in weight_map.items() if name not in found[file])
    if absent:
        raise CheckpointError(
            f"{INDEX_FILE} lists {counted(len(absent), 'tensor')} absent from the file it names: {some(absent)}",
            where=f"{weight_map[absent[0]]}: {absent[0]}",
            fix="fetch index and shards again, from one save",
        )
    unlisted = sorted((name, file) for file, names in found.items() for name in names if name not in weight_map)
    if unlisted:
        raise CheckpointError(
            f"{counted(len(unlisted), 'stored tensor')} not listed in {INDEX_FILE}: "
            + some(name for name, _ in unlisted),
            where=f"{unlisted[0][1]}: {unlisted[0][0]}",
            fix="fetch index and shards again, from one save",
        )
    warnings = _stale_copies(weight_map, {file: set(names) for file, names in found.items()})
    warnings += _unnamed_files(folder, weight_map)
    tensors = {name: (found[file][name], file) for name, file in weight_map.items()}
    return Shards(tensors, (INDEX_FILE, *sorted(counts)), tuple(warnings))


def _stale_copies(weight_map: dict[str, str], names_of: dict[str, set[str]]) -> list[str]:
    """One sentence per file that holds tensors which the index places in another file."""
    warnings = []
    for file, names in sorted(names_of.items()):
        stale = sorted(name for name in names if weight_map.get(name, file) != file)
        if stale:
            homes = sorted({weight_map[name] for name in stale})
            warnings.append(
                f"{file} holds a second copy of {some(stale)}, which is not read: {INDEX_FILE} names {some(homes)}"
            )
    return warnings


def _unnamed_files(folder: Path, weight_map: dict[str, str]) -> list[str]:
    """Sentences on safetensors files beside the shards that the index does not name; they are not read."""
    warnings = []
    for path in sorted(folder.glob("*.safetensors")):
        if path.name in weight_map.values():
            continue
        try:
            names = {t.name for t in read_header(path, path.name)}
        except (CheckpointError, SystemLimitError):
            names = set()
        stale = _stale_copies(weight_map, {path.name: names})
        warnings += stale or [f"{path.name} is not read: {INDEX_FILE} does not name it"]
    return warnings


def _read_all(folder: Path) -> Shards:
    """Without an index, every safetensors file counts, and no order of files may decide anything."""
    paths = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(ADAPTER_FILE_STEM))
    if not paths:
        raise _no_weights(folder)
    _check_numbering(folder, [p.name for p in paths])
    homes: dict[str, list[str]] = defaultdict(list)
    tensors: dict[str, tuple[StoredTensor, str]] = {}
    for path in paths:
        for tensor in read_header(path, path.name):
            homes[tensor.name].append(path.name)
            tensors[tensor.name] = (tensor, path.name)
    doubles = sorted(name for name, files in homes.items() if len(files) > 1)
    if doubles:
        first = homes[doubles[0]]
        raise CheckpointError(
            f"{counted(len(doubles), 'tensor')} stored in more than one file, and no {INDEX_FILE} says which copy "
            f"counts: {some(f'{name} in {some(homes[name])}' for name in doubles)}",
            where=f"{first[0]}: {doubles[0]}",
            fix="remove the stale file, or restore the index",
        )
    ignored = sorted(p.name for p in folder.glob(f"{ADAPTER_FILE_STEM}*.safetensors"))
    warnings = [f"{name} is not read; pass --adapter-path to use an adapter" for name in ignored]
    return Shards(tensors, tuple(p.name for p in paths), tuple(warnings))


def _check_numbering(folder: Path, names: list[str]) -> None:
    """`NAME-00001-of-00003.safetensors`: every number must be there."""
    numbered = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    for stem, count in sorted({(m["stem"], m["count"]) for m in numbered}):
        present = {int(m["number"]) for m in numbered if (m["stem"], m["count"]) == (stem, count)}
        absent = [f"{stem}-{n:05d}-of-{count}.safetensors" for n in range(1, int(count) + 1) if n not in present]
        if absent:
            raise CheckpointError(
                f"missing {len(absent)} of {counted(int(count), 'shard')}, and {INDEX_FILE} with them: {some(absent)}"
                + _unfinished_downloads(folder),
                where=absent[0],
                fix="fetch the missing files, or finish the download",
            )


def _unfinished_downloads(folder: Path) -> str:
    """A remark on `.incomplete` files that downloaders leave beside a checkpoint."""
    places = [folder, folder / ".cache" / "huggingface" / "download"]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.parent / "blobs")
    found = sorted(p.name for place in places for p in place.glob("*.incomplete"))
    return f"; an unfinished download lies beside: {some(found, 2)}" if found else ""


def _no_weights(folder: Path) -> CheckpointError:
    others = sorted(p.name for pattern in _OTHER_FORMATS for p in folder.glob(pattern) if is_file(p))
    adapters = sorted(p.name for p in folder.glob(f"{ADAPTER_FILE_STEM}*.safetensors"))
    what = "no *.safetensors file and no index"
    fix = "pass the folder that holds the checkpoint's safetensors files"
    if others:
        what += f", only {some(others)}"
        fix = "save the model as safetensors: other formats are not read, pickled ones can run code"
    elif adapters:
        what += f", only {some(adapters)}"
        fix = "this is an adapter: pass the full checkpoint, and this folder as --adapter-path"
    return CheckpointError(what + _unfinished_downloads(folder), where=str(folder), fix=fix)
