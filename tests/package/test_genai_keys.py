"""The table of configuration keys against the parser of the installed onnxruntime-genai, by key and by kind."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phi4mm_export.runtime.ort import import_genai
from phi4mm_export.spec.genai_keys import refused_keys, sections

pytest.importorskip("onnxruntime_genai", reason="needs the extra cpu")

BASE: dict[str, Any] = {"model": {"type": "phi4mm", "context_length": 4096, "vocab_size": 100}}
VALUES: dict[str, Any] = {
    "a string": "x",
    "an integer": 3,
    "a whole fraction": 3.0,
    "a fraction": 2.5,
    "a bool": True,
    "null": None,
    "integers": [3],
    "strings": ["x"],
    "objects": [{}],
    "an object": {},
}
LENIENT = {
    ("provider_options", "a string"),  # becomes a session config entry
    ("device_filtering_options", "a string"),  # becomes a provider option
    ("hardware_device_type", "a string"),  # any string but CPU, GPU, NPU fails later
    ("gpu_utilization_factor", "an integer"),  # right kind, out of range
    ("gpu_utilization_factor", "a whole fraction"),
    ("gpu_utilization_factor", "a fraction"),
}
"""Where the kind is not the whole story; none of these keys belongs in a package of ours."""


def _paths(section: str = "root", path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """One path to every section that can occur in a phi4mm package; 0 stands for the first entry of a list."""
    yield section, path
    for key, kinds in sections()[section].items():
        for kind in kinds.split("|"):
            listed, plain = kind.startswith("array:"), kind.removeprefix("array:")
            if plain.startswith("object:") and not listed | ("pipeline" in key):
                yield from _paths(plain.removeprefix("object:"), (*path, "cuda" if key == "*" else key))
            elif plain.startswith("object:") and key == "provider_options":
                yield from _paths(plain.removeprefix("object:"), (*path, key, 0))


def _with(path: tuple[str | int, ...], key: str, value: object) -> dict[str, Any]:
    document = copy.deepcopy(BASE)
    place: Any = document
    for step, following in zip(path, (*path[1:], ""), strict=True):
        if step != 0:
            fresh: Any = [{}] if following == 0 else {}
            place = place.setdefault(step, fresh)
        place = place[0] if following == 0 else place
    place[key] = value
    return document


REACHED = {section: path for section, path in _paths() if section != "root"}


@pytest.mark.parametrize("section", REACHED)
def test_the_runtime_refuses_what_the_table_refuses(tmp_path: Path, section: str) -> None:
    og = import_genai()
    differing = []
    for key in [*sections()[section], "no_such_key"]:
        for kind, value in VALUES.items():
            if key == "*" or (key, kind) in LENIENT:
                continue
            document = _with(REACHED[section], key, value)
            if section == "model" and key == "context_length":
                continue
            (tmp_path / "genai_config.json").write_text(json.dumps(document))
            try:
                og.Config(str(tmp_path))
                accepted = True
            except Exception:  # noqa: BLE001 - og raises RuntimeError subclasses of its own
                accepted = False
            if accepted != (not list(refused_keys(document))):
                differing.append((key, kind, accepted))
    assert differing == []


def test_every_section_of_a_package_is_reached() -> None:
    assert {"model", "decoder", "vision.inputs", "speech.outputs", "session_options", "provider", "search"} <= set(
        REACHED
    )
