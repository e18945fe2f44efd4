"""What a config section of a graph has to say: its file and the tensors behind the runtime's keys."""

from __future__ import annotations

from typing import Any

from phi4mm_export.checks.opened import OpenedGraph
from phi4mm_export.package.map_graphs import component_of, map_graph
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.processors import SPEECH_PROCESSOR_FILE, VISION_PROCESSOR_FILE

PROCESSOR_FILES = {Component.VISION: VISION_PROCESSOR_FILE, Component.SPEECH: SPEECH_PROCESSOR_FILE}


def mapped_names(component: Component, graph: OpenedGraph) -> dict[str, Any] | None:
    """The section for a graph: filename, config_filename of a tower, inputs, outputs.

    None for a graph that is another component, or that no config can make the runtime run.
    """
    if component_of(graph.io) is not component:
        return None
    mapped = map_graph(component, graph.file, graph.io)
    if any(gap.fatal for gap in mapped.gaps):
        return None
    section: dict[str, Any] = {"filename": graph.file}
    if component in PROCESSOR_FILES:
        section["config_filename"] = PROCESSOR_FILES[component]
    return {**section, "inputs": dict(mapped.names.inputs), "outputs": dict(mapped.names.outputs)}
