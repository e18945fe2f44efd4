"""Changes to genai_config.json that remove the cause of a finding, one small function per kind of cause.

A remedy only writes what the graphs, the tokenizer or the runtime leave no choice about; where a person has to decide,
there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phi4mm_export.checks.decoder_facts import decoder_facts
from phi4mm_export.checks.opened import OpenedPackage
from phi4mm_export.checks.report import Finding
from phi4mm_export.checks.section_names import PROCESSOR_FILES, mapped_names
from phi4mm_export.checks.session_options import normalized_provider, provider_names
from phi4mm_export.checks.sizes import PRESENT_KEYS, graph_sizes
from phi4mm_export.package.json_edit import REMOVE, Change, path_of, value_at
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.model import AUDIO_TOKEN_ID, IMAGE_TOKEN_ID

PUBLISHED_CONTEXT = 131072
"""`max_position_embeddings` of the published model."""
DEVICE = "device_id"
_ARENA_STRATEGIES = {"kNextPowerOfTwo": "0", "kSameAsRequested": "1"}
Path = tuple[str | int, ...]
Remedy = Callable[["Sick", Finding, Path], Iterator[Change]]


class Sick:
    """A package in need: the opened package, its config as it stands, and the tokenizer's added tokens."""

    def __init__(self, package: OpenedPackage, tokens: Mapping[str, int]) -> None:
        self.package, self.config, self.tokens = package, package.config, tokens

    def at(self, *path: str | int) -> Any:
        """The config's value at a path, None without one."""
        return value_at(self.config, path)


def config_changes(sick: Sick, finding: Finding) -> tuple[Change, ...]:
    """Changes to genai_config.json against one finding; none where a person has to decide."""
    remedy = REMEDIES.get(finding.code)
    file, _, dotted = finding.where.partition(": ")
    if remedy is None or not file.endswith(".json"):
        return ()
    return tuple(remedy(sick, finding, path_of(sick.config, dotted)))


def _set(value: Any) -> Remedy:
    return lambda _sick, _finding, path: iter([Change(path, value)])


def _remove(_sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    yield Change(path, REMOVE)


def _refused(sick: Sick, finding: Finding, path: Path) -> Iterator[Change]:
    """A key that the parser does not know, or a value of another kind."""
    value = sick.at(*path)
    if finding.what.endswith("this key"):
        nearest = re.fullmatch(r"did you mean '(.+)'\?", finding.fix)
        yield Change(path, REMOVE)
        if nearest and sick.at(*path[:-1], nearest[1]) is None:
            yield Change((*path[:-1], nearest[1]), value)
        return
    if path[-1] == DEVICE and type(value) is int:
        yield Change(path, "0")
        return
    fitting = _as_kind(value, finding.expected)
    yield Change(path, REMOVE if fitting is None else fitting)


def _as_kind(value: Any, expected: str) -> Any:
    """The same value as the kind that is expected, None if it has no such form."""
    if "a string" in expected and isinstance(value, int | float):
        return str(int(value)) if isinstance(value, bool) else str(value)
    if "true or false" in expected and value in (0, 1, "0", "1", "true", "false"):
        return value in (1, "1", "true")
    if ("integer" in expected or "number" in expected) and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return None
        return int(number) if number == int(number) else number
    return None


def _context(sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    longest = _longest(sick) or PUBLISHED_CONTEXT
    yield Change(path, longest)
    length = sick.at("search", "max_length")
    if type(length) is int and length > longest:
        yield Change(("search", "max_length"), longest)


def _longest(sick: Sick) -> int | None:
    decoder = sick.package.graphs.get(Component.DECODER)
    if decoder is None:
        return None
    return decoder_facts(decoder.model, sick.package.mapped(*PRESENT_KEYS).replace("%d", "0")).longest


def _max_length(sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    value, context = sick.at(*path), sick.at("model", "context_length")
    limit = context if type(context) is int and context > 0 else _longest(sick) or PUBLISHED_CONTEXT
    wish = int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 else limit
    yield Change(path, min(wish, limit))


def _stop_ids(sick: Sick, _finding: Finding, _path: Path) -> Iterator[Change]:
    """The turn's end and the text's end first, then what was there; in range, each once."""
    stated, vocab = sick.at("model", "eos_token_id"), sick.at("model", "vocab_size")
    old = stated if isinstance(stated, list) else [] if stated is None else [stated]
    known = [sick.tokens[name] for name in ("<|end|>", "<|endoftext|>") if name in sick.tokens]
    top = vocab if type(vocab) is int else PUBLISHED_CONTEXT * 2
    ids = [item for item in dict.fromkeys([*known, *old]) if type(item) is int and 0 <= item < top]
    yield Change(("model", "eos_token_id"), ids)


def _outside_vocabulary(sick: Sick, finding: Finding, path: Path) -> Iterator[Change]:
    if path[-1] == "eos_token_id":
        yield from _stop_ids(sick, finding, path)
    elif "<|endoftext|>" in sick.tokens:
        yield Change(path, sick.tokens["<|endoftext|>"])


def _built_in_id(_sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    yield Change(path, IMAGE_TOKEN_ID if path[-1] == "image_token_id" else AUDIO_TOKEN_ID)


def _size(sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    """A size as the graphs have it."""
    real = getattr(graph_sizes(sick.package), str(path[-1]), None)
    if path[-1] == "num_attention_heads":
        decoder = sick.package.graphs[Component.DECODER]
        real = decoder_facts(decoder.model, sick.package.mapped(*PRESENT_KEYS).replace("%d", "0")).num_heads
    if real is not None:
        yield Change(path, real)


def _one_provider_each(sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    entries = sick.at(*path[:-1])
    if isinstance(entries, list):
        parts = [{name: options} for entry in entries if isinstance(entry, dict) for name, options in entry.items()]
        yield Change(path[:-1], parts)


def _provider(sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    """A provider under another name; one that there is none for goes."""
    entries, index = sick.at(*path[:-2]), path[-2]
    if not isinstance(entries, list) or not isinstance(index, int):
        return
    near = {"gpu": "cuda", "nvidia": "cuda", "cudaexecution": "cuda", "tensorrt": "cuda"}.get(str(path[-1]).lower())
    kept = [entry for i, entry in enumerate(entries) if i != index]
    if near is not None and normalized_provider(near) and near not in provider_names(sick.package):
        kept.insert(index, {near: {**(sick.at(*path) or {}), **({DEVICE: "0"} if near == "cuda" else {})}})
    yield Change(path[:-2], kept)


def _arena(sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    yield Change(path, _ARENA_STRATEGIES.get(str(sick.at(*path)), REMOVE))


def _decoder_providers(sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    entries = sick.at("model", "decoder", "session_options", "provider_options")
    yield Change((*path, "provider_options"), entries)


def _shrinkage(sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    section = str(path[1])
    yield Change(path, "gpu:0" if "cuda" in provider_names(sick.package, section) else "cpu:0")


def _slashes(sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    yield Change(path, str(sick.at(*path)).replace("\\", "/"))


def _names(sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    """The tensors that the graph has, under the runtime's keys."""
    component = Component(str(path[1]))
    graph = sick.package.graphs.get(component)
    names = mapped_names(component, graph) if graph is not None else None
    found = (names.get(str(path[2])) or {}).get(str(path[3])) if names and len(path) == 4 else None
    if found is not None and found != sick.at(*path):
        yield Change(path, found)


def _section(sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    """A whole section, where one of the folder's other graphs is that component."""
    component = Component(str(path[1]))
    for graph in sick.package.others:
        names = mapped_names(component, graph)
        if names is not None:
            yield Change(path[:2], names)
            return
    if component is Component.SPEECH:
        yield Change(path[:2], {"filename": "", "config_filename": ""})


def _processor_file(_sick: Sick, _finding: Finding, path: Path) -> Iterator[Change]:
    """The published name of a tower's processor file."""
    yield Change(path, PROCESSOR_FILES[Component(str(path[1]))])


REMEDIES: Mapping[str, Remedy] = {
    "C302": _refused,
    "C311": _set("phi4mm"),
    "C312": _context,
    "C313": _section,
    "C314": _remove,
    "C315": _size,
    "C316": _stop_ids,
    "C317": _outside_vocabulary,
    "C318": _stop_ids,
    "C319": _built_in_id,
    "C320": _max_length,
    "C321": _set(0),
    "C322": _set(1),
    "C323": _set(1),
    "C324": _remove,
    "C325": _remove,
    "C326": _set(1),
    "C330": _one_provider_each,
    "C331": _provider,
    "C332": _set({}),
    "C333": _set("0"),
    "C334": _arena,
    "C335": _decoder_providers,
    "C336": _remove,
    "C337": _shrinkage,
    "C338": _remove,
    "C343": _slashes,
    "C344": _names,
    "C345": _remove,
    "C347": _names,
    "C349": _processor_file,
    "C350": _size,
    "C351": _size,
    "C352": _set(False),
    "C370": _context,
    "C506": _stop_ids,
}
