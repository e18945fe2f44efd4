"""og's own processor: from a prompt, pictures and clips to the arrays that the graphs are fed.

`run`, parity and calibration all take their inputs from here, so that what was measured is what will be served.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import PackageError, SystemLimitError, UsageError, install_line, some
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.runtime.audio import SAMPLE_RATE_HZ, Clip
from phi4mm_export.runtime.images import Picture
from phi4mm_export.runtime.ort import first_line, import_genai
from phi4mm_export.runtime.package import CONFIG_FILE, RunPackage
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.json_text import read_object
from phi4mm_export.spec.on_disk import is_file

if TYPE_CHECKING:
    import onnx

TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
PROCESSOR_KEYS = {Component.VISION: "processor", Component.SPEECH: "feature_extraction"}
"""The key at the top of each processor file."""
DEFAULT_MAX_SAMPLES = 480_000
"""Where og cuts a clip when the processor file has no `max_samples`: 30 s at 16 kHz. 0 there means no limit."""
ASPECT_REFUSAL = "aspect ratio"
"""Part of og's message for a picture that would shrink to less than 10 pixels on a side."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Request:
    """One processed prompt. `arrays` by og's names: `input_ids` int32 [1, S] with the placeholders filled in,
    `audio_projection_mode` int64 [1], and of what was passed `pixel_values`, `image_attention_mask`, `image_sizes`,
    `num_image_tokens`, `audio_embeds`, `audio_attention_mask`, `audio_sizes`. `named` is og's own form of the same."""

    arrays: Mapping[str, Array]
    named: Any

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """The prompt's ids [S]."""
        return np.asarray(self.arrays["input_ids"], np.int32).reshape(-1)


class Processor:
    """The processor of one loaded og model."""

    def __init__(self, genai: Any, model: Any, package: RunPackage) -> None:
        self._genai, self._package, self._model = genai, package, model
        check_json_files(package)
        with native_errors(package):
            self._processor = model.create_multimodal_processor()

    def chat_template(self, messages: str) -> str:
        """The prompt text that the package's chat template makes of a JSON list of messages."""
        with native_errors(self._package):
            return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        with native_errors(self._package):
            return str(self._tokenizer.decode(np.asarray(token_ids, np.int32))) if len(token_ids) else ""

    @cached_property
    def _tokenizer(self) -> Any:
        return self._genai.Tokenizer(self._model)

    def __call__(self, text: str, pictures: Sequence[Picture] = (), clips: Sequence[Clip] = ()) -> Request:
        """Process one prompt whose markers stand for the pictures and clips in order.

        Raises UsageError for a picture whose sides differ too much, PackageError for whatever else og refuses.
        """
        media: dict[str, Any] = {}
        if pictures:
            media["images"] = self._genai.Images.open_bytes(*(picture.png for picture in pictures))
        if clips:
            media["audios"] = self._genai.Audios.open_bytes(*(clip.wav for clip in clips))
        try:
            named = self._processor(text, **media)
        except RuntimeError as err:
            if ASPECT_REFUSAL in str(err):
                widest = max(pictures, key=lambda p: max(p.width, p.height) / min(p.width, p.height))
                raise UsageError(
                    f"a picture of {widest.width:,} x {widest.height:,} pixels is too narrow for the model's tiles",
                    where=widest.name,
                    fix="crop it",
                ) from err
            raise PackageError(
                f"the processors refuse the request: {first_line(err)}",
                where=some(self._processor_files()),
                fix="run: phi4mm validate",
            ) from err
        arrays = {name: np.array(named[name].as_numpy()) for name in named.keys()}  # noqa: SIM118 - not a mapping
        return Request(arrays, named)

    def _processor_files(self) -> list[str]:
        files = (self._package.processor_file(part) for part in PROCESSOR_KEYS)
        return [file.name for file in files if file is not None]


def open_processor(package: RunPackage) -> Processor:
    """The package's processor without its weights: og gets graphs with the same borders and nothing inside."""
    genai = import_genai("processing pictures and clips")
    with native_errors(package):
        config = genai.Config(str(package.path))
        config.clear_providers()
        files = [file for component in Component if (file := package.graph(component)) is not None]
        names = [file.relative_to(package.path).as_posix() for file in files]
        graphs = [_hollow_graph(file, name) for file, name in zip(files, names, strict=True)]
        for name, graph in zip(names, graphs, strict=True):
            config.add_model_data(name, graph)  # og keeps the address, not a copy: `graphs` must live until the load
        model = genai.Model(config)
    return Processor(genai, model, package)


@contextmanager
def native_errors(package: RunPackage, place: str = CONFIG_FILE) -> Iterator[None]:
    """og's and onnxruntime's RuntimeErrors as ours, naming the file of the package that the message names, or else
    `place`."""
    try:
        yield
    except MemoryError as err:
        raise _out_of_memory(first_line(err)) from err
    except RuntimeError as err:
        message = first_line(err)
        lowered = message.lower()
        if any(sign in lowered for sign in ("could not allocate", "bad_alloc", "out of memory", "failed to allocate")):
            raise _out_of_memory(message) from err
        if any(sign in lowered for sign in ("cuda interface not available", "cudaexecutionprovider is not", "no cuda")):
            raise SystemLimitError(
                f"the package or --ep asks for CUDA, which this installation does not have: {message}",
                fix=f"pass --ep cpu, or on a machine with an NVIDIA GPU run: {install_line('cuda')}",
            ) from err
        shown = message.replace(f"{package.path}{os.sep}", "").replace(f"{package.path}/", "")
        raise PackageError(
            f"ONNX Runtime GenAI refuses the package: {shown}",
            where=_named_file(package, message, place),
            fix="run: phi4mm validate",
        ) from err


def check_json_files(package: RunPackage) -> None:
    """Read the JSON files that og parses without saying which one is broken. Raises PackageError naming the file."""
    for component, key in PROCESSOR_KEYS.items():
        file = package.processor_file(component)
        if file is not None and package.graph(component) is not None:
            found = read_object(file, error=PackageError)
            if key not in found:
                raise PackageError(f"expected the key {key!r}, found {some(found) or 'no key'}", where=file.name)
    read_object(package.tokenizer_dir / TOKENIZER_CONFIG_FILE, error=PackageError)


def audio_limit_samples(package: RunPackage) -> int | None:
    """How many samples of a clip og's decoder keeps with this package's processor file; None for all of them."""
    file = package.processor_file(Component.SPEECH)
    if file is None or not is_file(file):
        return None
    steps = read_object(file, error=PackageError).get("feature_extraction", {}).get("sequence", [])
    for step in steps if isinstance(steps, list) else []:
        operation = step.get("operation", {}) if isinstance(step, dict) else {}
        if operation.get("type") == "AudioDecoderEx":
            limit = operation.get("attrs", {}).get("max_samples", DEFAULT_MAX_SAMPLES)
            return int(limit) or None
    return None


def cut_clips(package: RunPackage, clips: Sequence[Clip]) -> tuple[str, ...]:
    """A remark for each clip that og would cut silently."""
    limit = audio_limit_samples(package)
    if limit is None:
        return ()
    return tuple(
        f"{clip.name}: ONNX Runtime GenAI reads only the first {limit / SAMPLE_RATE_HZ:g} s of {clip.seconds:.1f} s, "
        "because the package's speech processor sets no `max_samples: 0`"
        for clip in clips
        if clip.num_samples > limit
    )


def _hollow_graph(path: Path, name: str) -> bytes:
    """A graph with the same inputs and outputs whose outputs are empty constants."""
    import onnx

    model = load_graph(path, where=name)
    overridable = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in overridable]
    nodes, weights = [], []
    for index, output in enumerate(model.graph.output):
        weights.append(_empty_tensor(f"empty.{index}", output))
        nodes.append(onnx.helper.make_node("Identity", [f"empty.{index}"], [output.name]))
    graph = onnx.helper.make_graph(nodes, "hollow", inputs, list(model.graph.output), weights)
    opset = onnx.helper.make_opsetid("", 20)
    return bytes(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString())


def _empty_tensor(name: str, like: onnx.ValueInfoProto) -> onnx.TensorProto:
    import onnx

    tensor = like.type.tensor_type
    return onnx.helper.make_tensor(name, tensor.elem_type, [0] * len(tensor.shape.dim), [])


def _named_file(package: RunPackage, message: str, otherwise: str) -> str:
    if "tokenizer class" in message:
        return f"{TOKENIZER_CONFIG_FILE}: tokenizer_class"
    names = [part.name for kind in PROCESSOR_KEYS if (part := package.processor_file(kind))]
    names += [TOKENIZER_FILE, TOKENIZER_CONFIG_FILE]
    files = [file for part in Component if (file := package.graph(part)) is not None]
    names += [file.relative_to(package.path).as_posix() for file in files]
    return next((name for name in names if name in message), otherwise)


def _out_of_memory(message: str) -> SystemLimitError:
    return SystemLimitError(
        f"not enough memory for the request: {message}",
        fix="ask for fewer new tokens, or lower --max-length, which sizes the key and value cache",
    )
