"""What `doctor` would change: new texts of JSON files, files under other names, dead bytes."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phi4mm_export.checks.config_graphs import check_config_against_graphs
from phi4mm_export.checks.config_values import check_values
from phi4mm_export.checks.opened import CONFIG_FILE, OpenedPackage
from phi4mm_export.checks.remedies import Sick, config_changes
from phi4mm_export.checks.remedies_files import file_changes, published_processor
from phi4mm_export.checks.report import Finding
from phi4mm_export.checks.session_options import check_session_options
from phi4mm_export.checks.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from phi4mm_export.errors import CheckpointError, PackageError
from phi4mm_export.package.file_names import is_junk
from phi4mm_export.package.json_edit import edited
from phi4mm_export.package.manifest import Manifest
from phi4mm_export.package.tokenizer import added_tokens
from phi4mm_export.spec.json_text import BYTE_ORDER_MARK, json_bytes, parse_json, read_object
from phi4mm_export.spec.on_disk import is_file

MOST_ROUNDS = 5
"""A repair may bring another fault to light; configs need two rounds at most."""
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


@dataclass
class Repairs:
    """texts: file -> new bytes. renamed: new name -> old name. repacked: data files with dead bytes. dropped: files
    that stay behind. why: what is done about a finding."""

    texts: dict[str, bytes] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    repacked: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    why: dict[Finding, str] = field(default_factory=dict)

    @property
    def any(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.texts or self.renamed or self.repacked or self.dropped)


def plan_repairs(package: OpenedPackage, findings: Iterable[Finding], manifest: Manifest | None) -> Repairs:
    """Every repair that leaves no choice to a person."""
    repairs, listed = Repairs(), list(findings)
    _repair_config(package, listed, repairs)
    for finding in listed:
        file, _, rest = finding.where.partition(": ")
        if finding.code[:2] in ("C4", "C5") and finding.code not in ("C506",):
            _repair_document(package, file, finding, repairs)
        elif finding.code == "C342":
            _restore_processor(finding, manifest, repairs)
        elif finding.code == "C203":
            near = re.match(r"(.+) has that size: rename it to ", finding.fix)
            folder = file.rpartition("/")[0]
            if near:
                new, old = (f"{folder}/{name}".lstrip("/") for name in (rest, near[1]))
                repairs.renamed[new] = old
                repairs.why[finding] = f"{old} becomes {new}"
        elif finding.code == "C220":
            repairs.repacked.add(file)
            repairs.why[finding] = "the file is written without its dead bytes"
        elif finding.code == "C221" or (finding.code == "D803" and is_junk(file)):
            repairs.dropped.add(file)
            repairs.why[finding] = "the file stays behind"
    for finding in listed:
        if finding.code in ("C221", "D803") and finding.where in repairs.renamed.values():
            repairs.why[finding] = "this is the missing file under another name"
    repairs.dropped -= set(repairs.renamed.values())
    return repairs


def unified_patch(package: Path, repairs: Repairs) -> str:
    """The changes to text files as one unified diff, for `patch -p1` in the package."""
    lines: list[str] = []
    for name, data in sorted(repairs.texts.items()):
        old = (package / name).read_bytes() if is_file(package / name) else None
        before = (old or b"").decode("utf-8", "replace").splitlines(keepends=True)
        after = data.decode("utf-8").splitlines(keepends=True)
        source = "/dev/null" if old is None else f"a/{name}"
        for line in difflib.unified_diff(before, after, source, f"b/{name}"):
            lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)


def _repair_config(package: OpenedPackage, findings: list[Finding], repairs: Repairs) -> None:
    """genai_config.json, round by round until no remedy applies."""
    path = package.folder / CONFIG_FILE
    if not package.config:
        return
    original = path.read_bytes()
    text = original.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    if any(finding.code == "C303" for finding in findings):
        text = _without_escapes(text)
    for finding in findings:
        if finding.code in ("C301", "C303"):
            repairs.why[finding] = f"patch to {CONFIG_FILE}"
    tokens, rounds = _tokens(package), findings
    for _ in range(MOST_ROUNDS):
        before = text
        for finding in rounds:
            sick = Sick(replace(package, config=json.loads(text)), tokens)
            changes = config_changes(sick, finding)
            if changes and (changed := edited(text, changes)) != text:
                text = changed
                repairs.why.setdefault(finding, f"patch to {CONFIG_FILE}")
        if text == before:
            break
        rounds = list(_config_findings(replace(package, config=json.loads(text))))
    if text.encode("utf-8") != original:
        repairs.texts[CONFIG_FILE] = text.encode("utf-8")


def _config_findings(package: OpenedPackage) -> Iterator[Finding]:
    yield from check_values(package)
    yield from check_session_options(package)
    yield from check_config_against_graphs(package)


def _without_escapes(text: str) -> str:
    """Characters in place of their escapes, where JSON allows the character itself."""
    whole = json.loads(text)

    def character(match: re.Match[str]) -> str:
        code = int(match[1], 16)
        return match[0] if code < 0x20 or chr(code) in '"\\' else chr(code)

    try:
        pairs = _ESCAPE.sub(character, text).encode("utf-16-le", "surrogatepass")
        plain = pairs.decode("utf-16-le")
        if json.loads(plain) == whole:
            return plain
    except ValueError:  # half of a pair
        return text
    return json_bytes(whole).decode("utf-8")  # an escaped backslash stood before a u


def _tokens(package: OpenedPackage) -> Mapping[str, int]:
    """The tokenizer's added tokens; none where its files cannot be read."""
    found: list[dict[str, Any]] = []
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
        try:
            found.append(read_object(package.folder / name, error=PackageError))
        except PackageError:
            found.append({})
    try:
        return added_tokens(found[0], found[1], None)
    except CheckpointError:
        return {}


def _repair_document(package: OpenedPackage, file: str, finding: Finding, repairs: Repairs) -> None:
    """A processor or tokenizer file; one that cannot be read at all is written as published, if it is a processor."""
    path = package.folder / file
    if not is_file(path):
        return
    data = repairs.texts.get(file, path.read_bytes())
    try:
        document = parse_json(data, file, error=PackageError)
    except PackageError:
        published = published_processor(file)
        if published is not None:
            repairs.texts[file] = json_bytes(published)
            repairs.why[finding] = f"{file} is written with the published values"
        return
    changes = file_changes(document, finding)
    text = data.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    if changes and (new := edited(text, changes)) != text:
        repairs.texts[file] = new.encode("utf-8")
        repairs.why[finding] = f"patch to {file}"


def _restore_processor(finding: Finding, manifest: Manifest | None, repairs: Repairs) -> None:
    name = finding.expected
    section = finding.where.partition("model.")[2].partition(".")[0]
    published = published_processor(name) or published_processor(f"{section}_processor.json")
    if published is None:
        return
    data = json_bytes(published)
    entry = manifest.by_name.get(name) if manifest else None
    if entry is None:
        kind = "with the published values: check dynamic_hd against the original"
    elif entry.sha256 == hashlib.sha256(data).hexdigest():
        kind = "with the very bytes that the manifest lists"
    else:
        kind = "with the published values, which are not those that the manifest lists"
    repairs.texts[name] = data
    repairs.why[finding] = f"{name} is written {kind}"
