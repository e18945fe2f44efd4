"""Changes to processor and tokenizer files that remove the cause of a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phi4mm_export.checks.report import Finding
from phi4mm_export.package.json_edit import REMOVE, Change, path_of, value_at
from phi4mm_export.spec.model import IMAGE_SIZE
from phi4mm_export.spec.processors import (
    SPEECH_PROCESSOR_FILE,
    VISION_PROCESSOR_FILE,
    ProcessorValues,
    speech_processor,
    vision_processor,
)
from phi4mm_export.spec.tokens import SAFE_TOKENIZER_CLASS

MAX_CROPS = 36
"""`dynamic_hd` of the published model."""
AUDIO_RATE = 8
Path = tuple[str | int, ...]
Remedy = Callable[[Any, Path], Iterator[Change]]


def file_changes(document: Any, finding: Finding) -> tuple[Change, ...]:
    """Changes to a parsed processor or tokenizer file against one finding; none where a person has to decide."""
    remedy = REMEDIES.get(finding.code)
    _, _, dotted = finding.where.partition(": ")
    return () if remedy is None else tuple(remedy(document, path_of(document, dotted)))


def published_processor(name: str) -> dict[str, Any] | None:
    """The processor file of the published model under its usual name; None for other names."""
    if name.rpartition("/")[2] == VISION_PROCESSOR_FILE:
        return vision_processor(ProcessorValues())
    if name.rpartition("/")[2] == SPEECH_PROCESSOR_FILE:
        return speech_processor(ProcessorValues())
    return None


def _set(value: Any) -> Remedy:
    return lambda _document, path: iter([Change(path, value)])


def _remove(_document: Any, path: Path) -> Iterator[Change]:
    yield Change(path, REMOVE)


def _aligner(_document: Any, path: Path) -> Iterator[Change]:
    yield Change(path, "phi4-vision-aligner" if path[0] == "processor" else "phi4-audio-aligner")


def _crops(document: Any, path: Path) -> Iterator[Change]:
    value = value_at(document, path)
    whole = isinstance(value, float) and value >= 1 and value == int(value)
    yield Change(path, int(value) if whole else MAX_CROPS)


def _kind(document: Any, path: Path) -> Iterator[Change]:
    """Fractions where the runtime wants them; else the published value of the same attribute."""
    value = value_at(document, path)
    if path[-1] in ("mean", "std"):
        numbers = value if isinstance(value, list) else []
        fits = len(numbers) == 3 and all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
        yield Change(path, [float(n) for n in numbers] if fits else [0.5, 0.5, 0.5])
        return
    published = value_at(speech_processor(ProcessorValues()), path)
    if published is not None:
        yield Change(path, published)


def _operators(_document: Any, path: Path) -> Iterator[Change]:
    """The published list of operators."""
    vision = path[0] == "processor"
    published = vision_processor(ProcessorValues()) if vision else speech_processor(ProcessorValues())
    yield Change(path[:2], value_at(published, path[:2]))


def _one_template(document: Any, path: Path) -> Iterator[Change]:
    """Of named chat templates the default one, else the first."""
    value = value_at(document, path)
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    named = {entry.get("name"): entry.get("template") for entry in entries}
    template = named.get("default") or next(iter(named.values()), None)
    if isinstance(template, str):
        yield Change(path, template)


REMEDIES: Mapping[str, Remedy] = {
    "C401": _operators,
    "C402": _operators,
    "C403": _aligner,
    "C404": _set(IMAGE_SIZE),
    "C405": _set([8000, 16000]),
    "C406": _set(0),
    "C407": _set(AUDIO_RATE),
    "C408": _set("RGB"),
    "C413": _set("CUBIC"),
    "C410": _remove,
    "C411": _crops,
    "C412": _kind,
    "C502": _set(SAFE_TOKENIZER_CLASS),
    "C503": _one_template,
}
