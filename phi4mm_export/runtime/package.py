"""A package folder as a runner needs to see it: its config, its files, and what the decoder graph reveals.

Only small files and the decoder's protobuf are read; weights stay on disk. What is wrong with a package in detail is
`validate`'s business: here only what makes running it impossible is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phi4mm_export.errors import PackageError, UsageError, some
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.json_text import read_object
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import exists, is_file, is_folder, is_inside_name
from phi4mm_export.spec.phi4mm_config import OFFICIAL_NAMES

if TYPE_CHECKING:
    import onnx

CONFIG_FILE = "genai_config.json"
MODEL_TYPE = "phi4mm"
ROPE_SWITCH_KEY = "phi4mm.rope_switch"
"""Metadata of a decoder graph made by us: the total length up to which the short LongRoPE factors apply."""
DECODER_IDS = ("input_ids", "position_ids")
"""Inputs that some decoders have beside those of the official config."""
LEAST_ROPE_SWITCH = 16
"""Smaller constants in a comparison that steers an `If` are flags and counters, not a context length."""
DEFAULT_NAMES: Mapping[Component, Mapping[str, str]] = {
    component: {**inputs, **outputs, **({name: name for name in DECODER_IDS} if component is Component.DECODER else {})}
    for component, (inputs, outputs) in OFFICIAL_NAMES.items()
}
"""og's own names where the config maps none."""


@dataclass(frozen=True)
class RunPackage:
    """One package folder, opened for running.

    `rope_switch` is the total length T up to which the decoder rotates with its short factors, None if it has no
    switch or none was found; `notes` are remarks for the user.
    """

    path: Path
    config: Mapping[str, Any]
    gated: bool
    rope_switch: int | None
    notes: tuple[str, ...] = ()
    adapters: Mapping[Role, Path] = field(default_factory=dict)

    @property
    def model(self) -> Mapping[str, Any]:
        """The `model` section of genai_config.json."""
        return _section(self.config, "model")

    @property
    def context_length(self) -> int:
        """Longest sequence, prompt and answer together."""
        return _whole_number(self.model, "context_length", "model.context_length")

    @property
    def hidden_size(self) -> int:
        return _whole_number(_section(self.model, "decoder"), "hidden_size", "model.decoder.hidden_size")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, in the config's order."""
        ids = self.model.get("eos_token_id", ())
        return tuple(ids) if isinstance(ids, list) else (ids,) if isinstance(ids, int) else ()

    @property
    def tokenizer_dir(self) -> Path:
        """The folder of the tokenizer files: the package itself unless `model.tokenizer_dir` says otherwise."""
        return self.path / str(self.model.get("tokenizer_dir", "."))

    def section(self, component: Component) -> Mapping[str, Any]:
        """The component's section of `model`; empty if there is none."""
        return _section(self.model, component.value)

    def graph(self, component: Component) -> Path | None:
        """The component's graph file, None if the package leaves the component out (speech only)."""
        name = self.section(component).get("filename")
        return self.path / name if isinstance(name, str) and name else None

    def tensor_name(self, component: Component, key: str) -> str:
        """The graph's name of an input or output, by the config's key; og's default where the config has none."""
        section = self.section(component)
        for direction in ("inputs", "outputs"):
            name = _section(section, direction).get(key)
            if isinstance(name, str):
                return name
        return DEFAULT_NAMES[component][key]

    def processor_file(self, component: Component) -> Path | None:
        """vision_processor.json or speech_processor.json under the package's own name."""
        name = self.section(component).get("config_filename")
        return self.path / name if isinstance(name, str) and name else None


def open_package(path: Path | str) -> RunPackage:
    """Read genai_config.json and the decoder's protobuf.

    Raises UsageError if `path` is no package folder, PackageError for a config of another model type, a section without
    its file name, a missing graph, or a decoder that is no ONNX model.
    """
    folder = Path(path)
    config_file = folder / CONFIG_FILE
    if not exists(config_file):
        kind = "a folder without it" if is_folder(folder) else "no such folder" if not exists(folder) else "a file"
        raise UsageError(
            f"expected a package folder with {CONFIG_FILE}, found {kind}",
            where=str(folder),
            fix="pass the folder that phi4mm export wrote",
        )
    config = read_object(config_file, error=PackageError)
    model = _section(config, "model")
    if model.get("type") != MODEL_TYPE:
        raise PackageError(
            f"expected model type {MODEL_TYPE!r}, found {model.get('type')!r}", where=f"{CONFIG_FILE}: model.type"
        )
    _check_files(folder, model)
    decoder_file = str(_section(model, Component.DECODER.value)["filename"])
    decoder = load_graph(folder / decoder_file, where=decoder_file)
    name = _section(_section(model, "decoder"), "inputs").get("input_ids", "input_ids")
    switch = rope_switch(decoder)
    notes = () if switch is not None else (f"no LongRoPE switch found in {decoder_file}: lengths are not watched",)
    return RunPackage(
        path=folder,
        config=config,
        gated=any(value.name == name for value in decoder.graph.input),
        rope_switch=switch,
        notes=notes,
        adapters=_adapters(folder, model, decoder),
    )


def rope_switch(decoder: onnx.ModelProto) -> int | None:
    """The total length T up to which a decoder graph uses its short LongRoPE factors.

    Taken from the metadata of a graph made by us; else from the constant c of a comparison (T > c, T >= c + 1 and their
    mirror images) that decides an `If`, as onnxruntime-genai's model builder emits it. None if there is no such node.
    """
    for entry in decoder.metadata_props:
        if entry.key == ROPE_SWITCH_KEY and entry.value.isdecimal():
            return int(entry.value)
    producers = {output: node for node in decoder.graph.node for output in node.output}
    constants = dict(_scalar_constants(decoder.graph))
    for node in decoder.graph.node:
        if node.op_type != "If":
            continue
        switch = _compared_length(producers.get(node.input[0]), producers, constants)
        if switch is not None:
            return switch
    return None


def _compared_length(
    node: onnx.NodeProto | None, producers: Mapping[str, onnx.NodeProto], constants: Mapping[str, int]
) -> int | None:
    through = ("Cast", "Squeeze", "Reshape", "Not", "Identity", "ReduceMax", "ReduceMin", "Gather")
    while node is not None and node.op_type in through:
        node = producers.get(node.input[0])
    comparisons = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    if node is None or node.op_type not in comparisons:
        return None
    for side, name in enumerate(node.input):
        value = constants.get(name)
        if value is not None and value >= LEAST_ROPE_SWITCH:
            # T > c and c < T, T <= c and c >= T switch after c; T >= c, c <= T, T < c, c > T switch after c - 1.
            after = node.op_type in (("Greater", "LessOrEqual") if side == 1 else ("Less", "GreaterOrEqual"))
            return value if after else value - 1
    return None


def _scalar_constants(graph: onnx.GraphProto) -> Iterator[tuple[str, int]]:
    """Integer constants of one element, whether initializer or `Constant` node."""
    from onnx import TensorProto, numpy_helper

    tensors = [(tensor.name, tensor) for tensor in graph.initializer]
    for node in graph.node:
        if node.op_type == "Constant":
            tensors += [(node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value"]
    for name, tensor in tensors:
        single = all(dim == 1 for dim in tensor.dims)
        stored_here = tensor.data_location != TensorProto.EXTERNAL
        if single and stored_here and tensor.data_type in (TensorProto.INT64, TensorProto.INT32):
            yield name, int(numpy_helper.to_array(tensor).reshape(-1)[0])


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key, {})
    if not isinstance(value, dict):
        raise PackageError(f"expected an object under {key!r}, found {value!r}", where=CONFIG_FILE)
    return value


def _whole_number(section: Mapping[str, Any], key: str, where: str) -> int:
    value = section.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise PackageError(f"expected a whole number of at least 1, found {value!r}", where=f"{CONFIG_FILE}: {where}")
    return int(value)


def _check_files(folder: Path, model: Mapping[str, Any]) -> None:
    missing: list[str] = []
    _refuse_outside(model, "model", ("tokenizer_dir",))
    for component in Component:
        section = _section(model, component.value)
        _refuse_outside(section, f"model.{component}", ("filename", "config_filename", "adapter_filename"))
        name = section.get("filename")
        if component is Component.SPEECH and not name:
            continue
        if not isinstance(name, str) or not name:
            raise PackageError(
                f"expected the file name of the {component} graph, found {name!r}",
                where=f"{CONFIG_FILE}: model.{component}.filename",
            )
        if not is_file(folder / name):
            missing.append(name)
    if missing:
        raise PackageError(
            f"{len(missing)} graph files are missing: {some(missing)}",
            where=CONFIG_FILE,
            fix="copy the whole package again",
        )


def _refuse_outside(section: Mapping[str, Any], place: str, keys: Sequence[str]) -> None:
    """Raise PackageError for a file or folder name that leads out of the package."""
    for key in keys:
        name = section.get(key)
        if isinstance(name, str) and name and not is_inside_name(name):
            raise PackageError(
                f"expected a name inside the package, found {name!r:.100}",
                where=f"{CONFIG_FILE}: {place}.{key}",
                fix="name a file of the package; fetch it again from a source you trust",
            )


def _adapters(folder: Path, model: Mapping[str, Any], decoder: onnx.ModelProto) -> dict[Role, Path]:
    """Adapter files of a decoder with overridable LoRA inputs; none if the decoder has no such input."""
    given = {value.name for value in decoder.graph.input}
    if not any("lora" in tensor.name and tensor.name in given for tensor in decoder.graph.initializer):
        return {}
    found: dict[Role, Path] = {}
    for role in Role:
        name = _section(model, role.value).get("adapter_filename")
        if isinstance(name, str) and is_file(folder / name):
            found[role] = folder / name
    return found
