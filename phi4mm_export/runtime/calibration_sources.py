"""Which files a calibration argument means: one file, a folder, a glob, a list file or a zip archive.

Nothing is decoded here; every fault of a source is a UsageError before the first sample is read.
"""

from __future__ import annotations

import glob
import hashlib
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath, PureWindowsPath

from phi4mm_export.errors import UsageError, some
from phi4mm_export.runtime.media import MAX_NBYTES, read_medium
from phi4mm_export.spec.on_disk import exists, home_expanded, is_file, is_folder

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".gif", ".bmp", ".tif", ".tiff")
AUDIO_SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aif", ".aiff", ".aifc", ".au", ".caf", ".w64")
TEXT_SUFFIXES = (".txt", ".md")
LIST_SUFFIXES = (".txt", ".lst", ".list")
MAX_FILES = 1_000_000
MAX_LIST_NBYTES = 64 << 20
MAX_ARCHIVE_NBYTES = 64 << 30
"""Most bytes that all entries of a zip may unpack to; entries are read one at a time, never written to disk."""
_ENCRYPTED = 0x1


class SampleKind(StrEnum):
    """What the files of a source hold."""

    IMAGE = "picture"
    AUDIO = "sound"
    ARRAYS = ".npz"
    PROMPT = "prompt"


SUFFIXES: dict[SampleKind, tuple[str, ...]] = {
    SampleKind.IMAGE: IMAGE_SUFFIXES,
    SampleKind.AUDIO: AUDIO_SUFFIXES,
    SampleKind.ARRAYS: (".npz",),
    SampleKind.PROMPT: (*TEXT_SUFFIXES, ".jsonl", *IMAGE_SUFFIXES, *AUDIO_SUFFIXES),
}


@dataclass(frozen=True)
class CalibrationFile:
    """One file of a source. `name` is how messages call it; `read` gives its bytes or raises UsageError."""

    name: str
    read: Callable[[], bytes] = field(compare=False, repr=False)
    folder: Path | None = None
    """Where the file's own references (in a .jsonl) are looked up; None inside an archive."""

    @property
    def suffix(self) -> str:
        """The name's ending in lower case, with its dot."""
        return PurePosixPath(self.name.replace("\\", "/")).suffix.lower()


@dataclass(frozen=True)
class FoundFiles:
    """The files of a source in their order, and the names that were passed over because they cannot be samples."""

    files: tuple[CalibrationFile, ...]
    ignored: tuple[str, ...] = ()


def find_files(source: Path | str, kind: SampleKind, *, option: str = "--calibration") -> FoundFiles:
    """Resolve a source.

    A folder is read with its subfolders in the order of the names; hidden files and files whose ending is no sample's
    are passed over (and listed). A list file (.txt, .lst, .list; UTF-8) names one file a line, relative to itself;
    blank lines and lines that begin with # do not count. A glob (`*`, `?`, `[...]`, `**`) is sorted.

    Raises UsageError for a source that does not exist, a list line whose file is missing (list, line number and path),
    an archive with names that lead out of it or too much inside, and a source without a single sample.
    """
    text = str(source)
    path = home_expanded(source)
    if not text.strip():
        raise UsageError("the source of the samples is empty", where=option)
    if is_folder(path):
        found = _folder(path, kind)
    elif exists(path):
        found = _file(path, kind)
    elif any(sign in text for sign in "*?["):
        found = _glob(text, kind)
    else:
        raise UsageError("the file or folder does not exist", where=f"{option} {text}", fix="check the path")
    if not found.files:
        passed = f" ({len(found.ignored):,} others: {some(found.ignored)})" if found.ignored else ""
        raise UsageError(
            f"expected {kind} files, found none{passed}",
            where=f"{option} {text}",
            fix=f"give files that end in {', '.join(SUFFIXES[kind][:6])}",
        )
    if len(found.files) > MAX_FILES:
        raise UsageError(f"found {len(found.files):,} files, expected at most {MAX_FILES:,}", where=f"{option} {text}")
    return found


def holds_arrays(source: Path | str) -> bool:
    """Whether a source is .npz files: a folder, list, glob or archive whose samples are all of that kind."""
    path = home_expanded(source)
    try:
        if is_folder(path):
            suffixes = {file.suffix.lower() for file in path.rglob("*") if not _is_hidden(file, path)}
        else:
            suffixes = {file.suffix for file in find_files(source, SampleKind.ARRAYS).files}
    except UsageError:
        return False
    return ".npz" in suffixes and suffixes.isdisjoint((*IMAGE_SUFFIXES, *AUDIO_SUFFIXES, ".jsonl"))


def choose(names: Sequence[str], count: int | None, seed: int) -> list[int]:
    """Numbers of `count` of the names, ascending. Which ones depends on the seed and the names, not on their order."""
    if count is not None and count < 1:
        raise UsageError(f"{count} samples were asked for, expected at least 1", where="--num-samples")
    if count is None or count >= len(names):
        return list(range(len(names)))

    def rank(index: int) -> tuple[bytes, int]:
        name = PurePosixPath(names[index].replace("\\", "/")).name
        return hashlib.sha256(f"{seed}:{name}".encode()).digest(), index

    return sorted(sorted(range(len(names)), key=rank)[:count])


def _folder(folder: Path, kind: SampleKind) -> FoundFiles:
    paths = [path for path in folder.rglob("*") if not _is_hidden(path, folder) and not is_folder(path)]
    named = sorted((path.relative_to(folder).as_posix(), path) for path in paths)
    kept = [(name, path) for name, path in named if path.suffix.lower() in SUFFIXES[kind]]
    ignored = tuple(name for name, path in named if path.suffix.lower() not in SUFFIXES[kind])
    return FoundFiles(tuple(_on_disk(path, str(path)) for _, path in kept), ignored)


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _file(path: Path, kind: SampleKind) -> FoundFiles:
    suffix = path.suffix.lower()
    if suffix in SUFFIXES[kind] and not (kind is SampleKind.PROMPT and suffix in LIST_SUFFIXES):
        return FoundFiles((_on_disk(path, str(path)),))
    if suffix == ".zip":
        return _archive(path, kind)
    if suffix in LIST_SUFFIXES:
        return FoundFiles(tuple(_listed(path)))
    if kind in (SampleKind.IMAGE, SampleKind.AUDIO):
        return FoundFiles((_on_disk(path, str(path)),))  # a picture under a foreign name: the screen judges its bytes
    raise UsageError(
        f"expected a folder, a list (.txt), a .zip or {', '.join(SUFFIXES[kind][:4])}, found a file ending in "
        f"{suffix or 'nothing'}",
        where=str(path),
    )


def _glob(pattern: str, kind: SampleKind) -> FoundFiles:
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))  # noqa: PTH207
    files = [path for path in paths if not is_folder(path)]
    if not files:
        raise UsageError("no file matches the pattern", where=pattern, fix="check it, and quote it in the shell")
    del kind  # what a pattern names was meant: nothing is passed over
    return FoundFiles(tuple(_on_disk(path, str(path)) for path in files))


def _listed(path: Path) -> list[CalibrationFile]:
    """The files of a list, in its order. Raises UsageError naming list, line number and path of what is missing."""
    found: list[CalibrationFile] = []
    missing: list[tuple[int, str]] = []
    for number, line in enumerate(_lines(path), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        target = path.parent / home_expanded(entry)
        if not exists(target) and "\\" in entry:
            target = path.parent / PureWindowsPath(entry).as_posix()
        if not is_file(target):
            missing.append((number, entry))
        else:
            found.append(_on_disk(target, str(target)))
    if missing:
        listed = some(f"line {number}: {entry}" for number, entry in missing)
        what = "a file" if len(missing) == 1 else f"{len(missing):,} files"
        raise UsageError(
            f"the list names {what} that do{'es' if len(missing) == 1 else ''} not exist ({listed})",
            where=str(path),
            fix="correct the lines or take them out; paths are relative to the list, one a line",
        )
    return found


def _lines(path: Path) -> list[str]:
    try:
        nbytes = path.stat().st_size
        if nbytes > MAX_LIST_NBYTES:
            raise UsageError(f"the list has {nbytes:,} bytes, expected at most {MAX_LIST_NBYTES:,}", where=str(path))
        data = path.read_bytes()
    except OSError as err:
        raise UsageError(f"the list cannot be read: {err.strerror}", where=str(path)) from err
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return data.decode(encoding).splitlines()
    except UnicodeDecodeError as err:
        raise UsageError(
            f"the list is not UTF-8 text (byte {err.start:,})", where=str(path), fix="save it as UTF-8"
        ) from err


def _on_disk(path: Path, name: str) -> CalibrationFile:
    return CalibrationFile(name, lambda: read_medium(path), path.parent)


def _archive(path: Path, kind: SampleKind) -> FoundFiles:
    """The entries of a zip in the order of their names. Entries stay inside: they are read, never unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as err:
        raise UsageError(f"not a readable zip archive ({err})", where=str(path), fix="make it again") from err
    _refuse_unsafe(path, entries)
    seen = sorted((entry.filename, entry) for entry in entries if not _is_litter(entry.filename))
    kept = [(name, entry) for name, entry in seen if PurePosixPath(name).suffix.lower() in SUFFIXES[kind]]
    ignored = tuple(name for name, _ in seen if PurePosixPath(name).suffix.lower() not in SUFFIXES[kind])
    return FoundFiles(tuple(_entry(path, entry) for _, entry in kept), ignored)


def _is_litter(name: str) -> bool:
    """Hidden files, and the resource forks that macOS packs along."""
    return any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(name).parts)


def _refuse_unsafe(path: Path, entries: Iterable[zipfile.ZipInfo]) -> None:
    listed = list(entries)
    escaping = [e.filename for e in listed if _leads_out(e.filename) or stat.S_ISLNK(e.external_attr >> 16)]
    if escaping:
        raise UsageError(
            f"the archive holds names that lead out of it, or links: {some(map(repr, escaping))}",
            where=str(path),
            fix="pack the files again with plain relative names",
        )
    twice = [name for name, count in Counter(e.filename for e in listed).items() if count > 1]
    if twice:
        raise UsageError(f"the archive holds {some(map(repr, twice))} more than once", where=str(path))
    locked = [e.filename for e in listed if e.flag_bits & _ENCRYPTED]
    if locked:
        raise UsageError(f"the archive is encrypted ({some(locked)})", where=str(path), fix="pack it without password")
    total = sum(e.file_size for e in listed)
    large = [e.filename for e in listed if e.file_size > MAX_NBYTES]
    if large or total > MAX_ARCHIVE_NBYTES:
        raise UsageError(
            f"the archive unpacks to {total:,} bytes ({some(large) if large else 'all entries together'}), expected at "
            f"most {MAX_NBYTES:,} an entry and {MAX_ARCHIVE_NBYTES:,} in all",
            where=str(path),
        )


def _leads_out(name: str) -> bool:
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    return posix.is_absolute() or bool(windows.drive or windows.root) or ".." in (*posix.parts, *windows.parts)


def _entry(path: Path, entry: zipfile.ZipInfo) -> CalibrationFile:
    name = f"{path}: {entry.filename}"

    def read() -> bytes:
        try:
            with zipfile.ZipFile(path) as archive, archive.open(entry) as file:
                data = file.read(MAX_NBYTES + 1)
        except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, EOFError, zlib.error) as err:
            raise UsageError(f"the entry cannot be unpacked ({err})", where=name) from err
        if len(data) > MAX_NBYTES:
            raise UsageError(f"the entry has more than {MAX_NBYTES:,} bytes", where=name)
        if not data:
            raise UsageError("the file is empty", where=name)
        return data

    return CalibrationFile(name, read)
