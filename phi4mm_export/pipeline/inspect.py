"""`phi4mm inspect`: say what a checkpoint, a package or an ONNX file is. Reads headers only."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phi4mm_export.checks.opened import CONFIG_FILE, NO_CONFIG, OpenedPackage, open_file, open_package
from phi4mm_export.checks.report import Finding
from phi4mm_export.errors import CheckpointError, PackageError, UsageError
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.on_disk import exists, is_file, is_folder, real_path

if TYPE_CHECKING:
    from phi4mm_export.checkpoint.head import HeadChoice
    from phi4mm_export.checkpoint.open import Checkpoint
    from phi4mm_export.checks.summary import PackageSummary


@dataclass(frozen=True)
class AdapterSummary:
    """One adapter of a checkpoint: its ranks and scales by how many modules have them."""

    role: str
    source: str
    modules: int
    ranks: tuple[tuple[int, int], ...]
    scales: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint. `dtypes` is (type, tensors, bytes), adapters left out."""

    layout: str
    model: dict[str, Any]
    dtypes: tuple[tuple[str, int, int], ...]
    tensors: int
    nbytes: int
    shards: tuple[tuple[str, int], ...]
    adapters: tuple[AdapterSummary, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """What stands at a path: exactly one of checkpoint and package is set; a single graph is a package of one.

    `kind`: checkpoint, package, part (some of a package's graphs, without genai_config.json) or graph.
    `findings` are faults of the external data, and what could not be read.
    """

    kind: str
    name: str
    checkpoint: CheckpointSummary | None = None
    package: PackageSummary | None = None
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The inspection as plain data with a fixed key order."""
        body: dict[str, Any] = {"kind": self.kind, "name": self.name}
        if self.checkpoint is not None:
            body |= asdict(self.checkpoint)
        if self.package is not None:
            body |= asdict(self.package)
        return body | {"findings": [asdict(finding) for finding in self.findings]}


def inspect(path: str | os.PathLike[str], *, head: HeadChoice | None = None) -> Inspection:
    """Describe a checkpoint folder, a package folder or an .onnx file.

    head: which one counts where a checkpoint says that it is tied and stores another.

    Raises UsageError for a path that is none of these, CheckpointError for a checkpoint or an ONNX file that cannot
    be used.
    """
    place = Path(path)
    if is_file(place):
        return _file(place)
    if not is_folder(place):
        raise UsageError(
            "expected a checkpoint folder, a package folder or an .onnx file, found nothing",
            where=str(place),
            fix="check the path",
        )
    if exists(place / CONFIG_FILE):
        return _package(place)
    if exists(place / "config.json") or any(place.glob("*.safetensors")):
        return _checkpoint(place, head)
    if any(place.rglob("*.onnx")):
        return _package(place)
    raise UsageError(
        "found neither a checkpoint (config.json, *.safetensors) nor a package (genai_config.json, *.onnx)",
        where=str(place),
        fix="give one of these folders",
    )


def _file(path: Path) -> Inspection:
    if path.suffix.lower() != ".onnx":
        raise UsageError(
            f"expected an .onnx file or a folder, found a file named {path.name}",
            where=str(path),
            fix="give the folder that holds the file",
        )
    try:
        opened = open_file(path)
    except PackageError as err:
        raise CheckpointError(err.what, where=err.where, fix=err.fix) from err
    except OSError as err:
        raise CheckpointError(f"the file cannot be read: {err.strerror or err}", where=path.name) from err
    return _described("graph", path.name, opened)


def _package(folder: Path) -> Inspection:
    opened = open_package(folder)
    if opened.graphs and set(opened.graphs) != set(Component) and not exists(folder / CONFIG_FILE):
        known = tuple(finding for finding in opened.findings if finding.code != NO_CONFIG)
        return _described("part", real_path(folder).name, replace(opened, findings=known))
    return _described("package", real_path(folder).name, opened)


def _described(kind: str, name: str, opened: OpenedPackage) -> Inspection:
    from phi4mm_export.checks.contract import detect_contract
    from phi4mm_export.checks.integrity import check_integrity
    from phi4mm_export.checks.session_options import provider_names
    from phi4mm_export.checks.summary import summarize_package

    summary = summarize_package(opened, detect_contract(opened) if kind == "package" else "", provider_names(opened))
    return Inspection(kind, name, package=summary, findings=(*opened.findings, *check_integrity(opened)))


def _checkpoint(folder: Path, head: HeadChoice | None) -> Inspection:
    from phi4mm_export.checkpoint.open import open_checkpoint

    with open_checkpoint(folder, head=head) as checkpoint:
        return Inspection("checkpoint", real_path(folder).name, checkpoint=_summary(checkpoint))


def _summary(checkpoint: Checkpoint) -> CheckpointSummary:
    config = checkpoint.config
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        counts[tensor.dtype.value] += 1
        sizes[tensor.dtype.value] += tensor.nbytes
    shards = {t.file.name: t.file.stat().st_size for t in checkpoint.tensors.values()}
    adapters = []
    for role, adapter in sorted(checkpoint.adapters.items()):
        pairs = list(adapter.pairs.values())
        ranks = Counter(pair.rank for pair in pairs)
        scales = Counter(pair.scale for pair in pairs)
        adapters.append(
            AdapterSummary(
                role.value, adapter.source, len(pairs), tuple(sorted(ranks.items())), tuple(sorted(scales.items()))
            )
        )
    model = {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "tied_head": config.tied_head,
        "max_positions": config.rope.max_positions,
        "original_max_positions": config.rope.original_max_positions,
        "vision_layers": config.vision.num_layers,
        "audio_blocks": config.audio.num_blocks,
        "dynamic_hd": config.dynamic_hd,
    }
    return CheckpointSummary(
        layout=config.layout.value,
        model=model,
        dtypes=tuple((name, counts[name], sizes[name]) for name in sorted(counts)),
        tensors=len(checkpoint.tensors),
        nbytes=sum(sizes.values()),
        shards=tuple(sorted(shards.items())),
        adapters=tuple(adapters),
        warnings=checkpoint.warnings,
    )
