"""Folders that `phi4mm quantize` and `phi4mm build` read Hessians from or keep something in, judged before any work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from phi4mm_export.errors import UsageError
from phi4mm_export.package.given_folders import WORK_DIR, check_folder
from phi4mm_export.pipeline.quantize_engines import Engine
from phi4mm_export.quant.graph import read_graph
from phi4mm_export.quant.settings import Method, QuantSettings
from phi4mm_export.quant.sites import find_sites
from phi4mm_export.quant.statistics import SavedStatistics

STATISTICS, SAVE_STATISTICS = "--statistics", "--save-statistics"


def check_quantize_places(
    graph: Path,
    settings: QuantSettings,
    engine: Engine,
    *,
    statistics: Path | None,
    save_statistics: Path | None,
    work_dir: Path | None,
) -> None:
    """Judge the three folders of a quantization of `graph`. Raises as `check_statistics` and `check_folder` do."""
    if work_dir is not None:
        check_folder(work_dir, WORK_DIR)
    given = STATISTICS if statistics is not None else SAVE_STATISTICS if save_statistics is not None else None
    if given is None:
        return
    if settings.method is not Method.GPTQ or engine is not Engine.NATIVE:
        raise UsageError(
            f"only gptq by the native engine takes or makes Hessians, found {settings.method} by {engine}",
            where=given,
            fix=f"leave {given} out",
        )
    labels = None
    if statistics is not None:
        sites, _ = find_sites(read_graph(graph), settings)
        labels = [site.label for site in sites]
    check_statistics(statistics, save_statistics, labels=labels)


def check_statistics(kept: Path | None, place: Path | None, *, labels: Iterable[str] | None = None) -> None:
    """Judge a folder of kept Hessians, and one to keep them in; labels: the layers to quantize, where they are known.

    Raises UsageError for both together, for statistics that are missing or of other layers, and for a folder that holds
    finished ones already; SystemLimitError for one that cannot be written.
    """
    if kept is not None and place is not None:
        raise UsageError(
            f"the Hessians come from {STATISTICS}, so there are none to keep",
            where=f"{SAVE_STATISTICS} {place}",
            fix="give one of the two",
        )
    if kept is not None:
        SavedStatistics(kept).check(labels)
    if place is not None:
        check_folder(place, SAVE_STATISTICS)
        if SavedStatistics(place).finished:
            raise UsageError(
                "the folder holds statistics already", where=f"{SAVE_STATISTICS} {place}", fix="name another folder"
            )
