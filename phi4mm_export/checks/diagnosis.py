"""Causes behind what is wrong with a package: the checks' findings and the manifest's faults, explained.

What only a diagnosis asks, beside the checks: LFS pointers in place of data, a vision graph in 4 bits, the memory that
max_length reserves, arenas that keep theirs. Codes D8xx.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from phi4mm_export.checks.causes import cause_of
from phi4mm_export.checks.claims import FaultKind, FileFault
from phi4mm_export.checks.opened import CONFIG_FILE, OpenedPackage
from phi4mm_export.checks.report import Finding, Severity, error, note, warning
from phi4mm_export.checks.session_options import provider_names
from phi4mm_export.checks.sizes import PAST_KEYS, graph_sizes
from phi4mm_export.package.manifest import Manifest
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.on_disk import POINTER_NBYTES, is_file, lfs_size
from phi4mm_export.spec.sizes import format_bytes

MUCH_CACHE = 4 << 30
"""A cache above this is worth a remark: a third of a 12 GB card."""
SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_FILE_CODES = {
    FaultKind.CHANGED: "D801",
    FaultKind.MISSING: "D802",
    FaultKind.EXTRA: "D803",
    FaultKind.LINKED: "D804",
    FaultKind.MANIFEST: "D805",
}


@dataclass(frozen=True)
class Diagnosis:
    """A finding and what stands behind it. `repair` says what --fix does about it, empty where it cannot."""

    finding: Finding
    cause: str
    symptom: str = ""
    upstream: tuple[str, ...] = ()
    repair: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain data with a fixed key order."""
        return {
            "cause": self.cause,
            "symptom": self.symptom,
            "upstream": list(self.upstream),
            "repair": self.repair,
            **asdict(self.finding),
        }


def diagnose(findings: Iterable[Finding]) -> list[Diagnosis]:
    """One diagnosis for each finding, in their order."""
    result = []
    for finding in findings:
        cause = cause_of("C302 device_id" if _is_device(finding) else finding.code)
        if cause is None:
            result.append(Diagnosis(finding, finding.what))
        else:
            result.append(Diagnosis(finding, cause.title, cause.symptom, cause.upstream))
    return result


def _is_device(finding: Finding) -> bool:
    return finding.code == "C302" and finding.where.endswith(".device_id")


def file_findings(faults: Iterable[FileFault], findings: Iterable[Finding]) -> Iterator[Finding]:
    """The manifest's faults as findings; files whose absence a check reported already are left out.

    That a file was changed is a mere note where a check says what is wrong with it.
    """
    findings = list(findings)
    wrong = [finding.where for finding in findings if finding.severity is not Severity.NOTE]
    told = {word for f in findings if f.code in ("C201", "C203", "C342") for word in (f.where, f.expected)}
    for fault in faults:
        code = _FILE_CODES.get(fault.kind)
        known = fault.kind is FaultKind.MISSING and any(fault.name in word for word in told)
        if code is not None and not known:
            explained = code == "D801" and any(place.partition(": ")[0] == fault.name for place in wrong)
            made = note if explained else error
            yield made(code, fault.name, fault.what, expected=fault.expected, found=fault.found, fix=fault.fix)


def further_findings(package: OpenedPackage, manifest: Manifest | None) -> Iterator[Finding]:
    """What only a diagnosis asks."""
    yield from _lfs_pointers(package)
    yield from _coarse_vision(package, manifest)
    yield from _reserved_cache(package)
    yield from _kept_arenas(package)


def _lfs_pointers(package: OpenedPackage) -> Iterator[Finding]:
    for path in sorted(package.folder.rglob("*")):
        if path.suffix in (".onnx", ".json") or not is_file(path) or path.stat().st_size > POINTER_NBYTES:
            continue
        text = path.read_bytes()
        size = lfs_size(text)
        if size is not None:
            name = path.relative_to(package.folder).as_posix()
            what = "a Git LFS pointer stands in place of the file"
            yield error(
                "D810", name, what, expected=f"{size} bytes", found=f"{len(text)} bytes", fix="run: git lfs pull"
            )


def _coarse_vision(package: OpenedPackage, manifest: Manifest | None) -> Iterator[Finding]:
    graph = package.graphs.get(Component.VISION)
    if graph is None:
        return
    entries = manifest.quantization if manifest else ()
    if any(entry.get("component") == Component.VISION and entry.get("method") == "gptq" for entry in entries):
        return
    coarse = sum(
        node.op_type == "MatMulNBits" and any(a.name == "bits" and a.i < 8 for a in node.attribute)
        for node in graph.model.graph.node
    )
    if coarse:
        yield warning(
            "D811",
            graph.file,
            f"{coarse} weights of the vision graph have fewer than 8 bits, and nothing says that they were calibrated",
            expected="float16, 8 bits, or GPTQ with a quality gate",
            found=f"{coarse} MatMulNBits nodes",
            fix="measure it with phi4mm evaluate; make it anew with phi4mm quantize --method gptq",
        )


def _reserved_cache(package: OpenedPackage) -> Iterator[Finding]:
    search = package.config.get("search")
    length = search.get("max_length") if isinstance(search, dict) else None
    shared = isinstance(search, dict) and search.get("past_present_share_buffer") is True
    decoder, sizes = package.graphs.get(Component.DECODER), graph_sizes(package)
    if decoder is None or not shared or type(length) is not int:
        return
    first = decoder.io.input(package.mapped(*PAST_KEYS).replace("%d", "0"))
    parts = (sizes.num_hidden_layers, sizes.num_key_value_heads, sizes.head_size)
    if first is None or None in parts:
        return
    each = 2 * (4 if first.dtype == "float" else 2)
    for part in parts:
        each *= part or 0
    if length * each > MUCH_CACHE:
        yield note(
            "D812",
            f"{CONFIG_FILE}: search.max_length",
            f"a Generator reserves {format_bytes(length * each)} for {length:,} tokens before it reads the first",
            expected=f"what the card has free; {MUCH_CACHE // each:,} tokens take {format_bytes(MUCH_CACHE)}",
            found=length,
            fix="write a smaller max_length, or phi4mm config --memory-budget BYTES",
        )


def _kept_arenas(package: OpenedPackage) -> Iterator[Finding]:
    for name in ("vision", "speech"):
        if "cuda" not in provider_names(package, name) or not package.section(name):
            continue
        options = package.section(name).get("run_options")
        if not isinstance(options, dict) or SHRINKAGE not in options:
            yield note(
                "D813",
                f"{CONFIG_FILE}: model.{name}.run_options",
                f"the {name} session keeps what its largest request took",
                expected=f'"{SHRINKAGE}": "gpu:0"',
                found="no key",
                fix="add the run option if memory runs out after a picture; it costs time at each request",
            )


def is_blocking(diagnosis: Diagnosis) -> bool:
    """Whether the package cannot be used as it is."""
    return diagnosis.finding.severity is Severity.ERROR
