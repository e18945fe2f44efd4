"""Calibration samples for the decoder: prompts, with or without pictures and clips, run through the package's own
vision, speech and embedding graphs, so that the decoder sees what it will be fed.

What the graphs give is written to a spool folder once; the sessions are closed before the decoder is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phi4mm_export.errors import UsageError, some
from phi4mm_export.runtime.audio import Clip, decode_audio
from phi4mm_export.runtime.builtin_media import DEFAULT_COUNT, builtin_files
from phi4mm_export.runtime.calibration import BUILTIN, component_graph
from phi4mm_export.runtime.calibration_npz import parse_npz
from phi4mm_export.runtime.calibration_samples import Array, Feeds, GraphInput, SamplePlan, Samples, digest_of, fit
from phi4mm_export.runtime.calibration_sources import (
    AUDIO_SUFFIXES,
    IMAGE_SUFFIXES,
    TEXT_SUFFIXES,
    CalibrationFile,
    SampleKind,
    choose,
    find_files,
)
from phi4mm_export.runtime.generate import uses_template
from phi4mm_export.runtime.images import Picture, decode_image
from phi4mm_export.runtime.media import read_medium, refuse
from phi4mm_export.runtime.package import RunPackage
from phi4mm_export.runtime.processor import open_processor
from phi4mm_export.runtime.prompts import ChatTemplate, build_prompt
from phi4mm_export.runtime.stepping import FourGraphs
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.json_text import parse_object
from phi4mm_export.spec.on_disk import is_file

TASK_FOR_IMAGE = "Transcribe this page."
TASK_FOR_AUDIO = "Transcribe the audio to text."
"""What is asked of media that come without a prompt."""
MAX_PROMPT_NBYTES = 1 << 20
PROMPT_KEYS = {"prompt": str, "images": list, "audios": list, "system": str}
"""Keys of one line of a .jsonl file; `images` and `audios` are lists of paths relative to it."""


@dataclass(frozen=True)
class PromptFiles:
    """One prompt before anything is decoded: its text (given, or to be read from a file) and its media files."""

    name: str
    text: str | CalibrationFile | None
    images: tuple[CalibrationFile, ...] = ()
    audios: tuple[CalibrationFile, ...] = ()
    system: str | None = None

    @property
    def mode(self) -> str:
        """What the prompt holds: text, image, audio or both."""
        return {(False, False): "text", (True, False): "image", (False, True): "audio", (True, True): "both"}[
            bool(self.images), bool(self.audios)
        ]


class TextCalibrationReader(Samples):
    """One prompt a sample: the decoder's inputs for the whole prompt, caches and states empty.

    A source holds .txt files (one prompt each), media with a .txt of the same name as their prompt, media alone (they
    are asked for a transcript), or .jsonl files of prompts. `spool`: an existing folder for the decoder's inputs, which
    are computed once. `modes` counts the samples by what their prompts hold.
    Raises UsageError for unusable sources and files, PackageError for graphs that do not run.
    """

    def __init__(
        self,
        package: RunPackage | Path | str,
        source: Path | str,
        spool: Path,
        *,
        num_samples: int | None = None,
        seed: int = 0,
        skip_unreadable: bool = False,
    ) -> None:
        opened, graph, inputs = component_graph(package, Component.DECODER)
        prompts = find_prompts(source, num_samples, seed)
        maker = _PromptArrays(opened)
        kept, faults = _screened(prompts, maker, skip_unreadable)
        self.modes = {mode: sum(p.mode == mode for p in kept) for mode in ("text", "image", "audio", "both")}
        digests = _spool(opened, inputs, graph.name, kept, maker, spool)
        names = tuple(p.name for p in kept)

        def make(index: int) -> Feeds:
            return parse_npz(_spooled(spool, index).read_bytes(), names[index])

        left_out = (f"{len(faults):,} prompts left out: {some(map(str, faults))}",) if faults else ()
        super().__init__(SamplePlan(names, make, digests, left_out, tuple(faults)))


def find_prompts(
    source: Path | str, num_samples: int | None = None, seed: int = 0, *, option: str = "--calibration"
) -> list[PromptFiles]:
    """The prompts of a source, files of one name (apart from the ending) put together, in the order of the source.

    option: who asked, as messages name it.
    """
    if str(source) == BUILTIN:
        return _grouped(builtin_files(SampleKind.PROMPT, num_samples or DEFAULT_COUNT, seed), option)
    prompts = _grouped(find_files(source, SampleKind.PROMPT, option=option).files, option)
    return [prompts[index] for index in choose([prompt.name for prompt in prompts], num_samples, seed)]


def decoder_feeds(
    package: RunPackage, inputs: Mapping[str, GraphInput], graph: str, input_ids: Array, inputs_embeds: Array
) -> dict[str, Array]:
    """What the decoder is fed for a whole prompt: input_ids [1, S], inputs_embeds [1, S, H], mask of ones, positions;
    every other input (caches, states) with a batch of one, zeros, and no past."""
    length = inputs_embeds.shape[1]
    known = {
        "inputs_embeds": inputs_embeds,
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length)[None],
        "input_ids": np.asarray(input_ids).reshape(1, -1),
    }
    arrays = {package.tensor_name(Component.DECODER, key): value for key, value in known.items()}
    for name, wanted in inputs.items():
        if name not in arrays:
            dims = [1 if axis == 0 else dim or 0 for axis, dim in enumerate(wanted.dims or ())]
            arrays[name] = np.zeros(dims, wanted.dtype)
    return fit(arrays, inputs, graph)


class _PromptArrays:
    """From a prompt's files to og's arrays, by the package's own processors, tokenizer and chat template."""

    def __init__(self, package: RunPackage) -> None:
        self._processor = open_processor(package)
        self._template: ChatTemplate | None = self._processor.chat_template if uses_template(package) else None

    def __call__(self, prompt: PromptFiles) -> Mapping[str, Array]:
        pictures: list[Picture] = [decode_image(file.read(), file.name) for file in prompt.images]
        clips: list[Clip] = [decode_audio(file.read(), file.name) for file in prompt.audios]
        text = _text_of(prompt)
        try:
            built = build_prompt(
                text,
                num_images=len(pictures),
                num_audios=len(clips),
                system=prompt.system,
                template=self._template,
            )
        except UsageError as err:
            raise UsageError(err.what, where=prompt.name, fix=err.fix) from err
        ordered = [pictures[i] for i in built.images], [clips[i] for i in built.audios]
        return self._processor(built.text, *ordered).arrays


def _screened(
    prompts: Sequence[PromptFiles], maker: _PromptArrays, skip_unreadable: bool
) -> tuple[list[PromptFiles], list[UsageError]]:
    """Process every prompt once, so that all unusable files are named before a graph runs."""
    kept: list[PromptFiles] = []
    faults: list[UsageError] = []
    for prompt in prompts:
        try:
            maker(prompt)
            kept.append(prompt)
        except UsageError as err:
            faults.append(err)
    if faults and not (skip_unreadable and kept):
        refuse(faults)
    return kept, faults


def _spool(
    package: RunPackage,
    inputs: Mapping[str, GraphInput],
    graph: str,
    prompts: Sequence[PromptFiles],
    maker: _PromptArrays,
    folder: Path,
) -> tuple[str, ...]:
    """Run every prompt through the float graphs and store the decoder's inputs: their digests."""
    components = [Component.EMBEDDING]
    components += [Component.VISION] if any(prompt.images for prompt in prompts) else []
    components += [Component.SPEECH] if any(prompt.audios for prompt in prompts) else []
    graphs = FourGraphs(package, components=components)
    digests: list[str] = []
    for index, prompt in enumerate(prompts):
        arrays = maker(prompt)
        embeds = graphs.embedding(arrays["input_ids"], *graphs.features(arrays))
        feeds = decoder_feeds(package, inputs, graph, arrays["input_ids"], embeds)
        with _spooled(folder, index).open("wb") as file:
            np.savez(file, allow_pickle=False, **feeds)
        digests.append(digest_of(feeds))
    return tuple(digests)


def _spooled(folder: Path, index: int) -> Path:
    return folder / f"prompt-{index:06d}.npz"


def _grouped(files: Sequence[CalibrationFile], option: str) -> list[PromptFiles]:
    groups: dict[str, list[CalibrationFile]] = {}
    for file in files:
        key = file.name if file.suffix == ".jsonl" else file.name[: len(file.name) - len(file.suffix)]
        groups.setdefault(key, []).append(file)
    prompts: list[PromptFiles] = []
    for members in groups.values():
        if members[0].suffix == ".jsonl":
            prompts += _prompt_lines(members[0])
            continue
        texts = [file for file in members if file.suffix in TEXT_SUFFIXES]
        if len(texts) > 1:
            raise UsageError(f"{some(t.name for t in texts)} are two prompts of one name", fix="rename one of them")
        images = tuple(file for file in members if file.suffix in IMAGE_SUFFIXES)
        audios = tuple(file for file in members if file.suffix in AUDIO_SUFFIXES)
        unknown = [file.name for file in members if file not in (*texts, *images, *audios)]
        if unknown:
            raise UsageError(
                f"expected a prompt (.txt, .jsonl), a picture or a clip, found {some(unknown)}", where=option
            )
        prompts.append(PromptFiles(members[0].name, texts[0] if texts else None, images, audios))
    return prompts


def _prompt_lines(file: CalibrationFile) -> list[PromptFiles]:
    """The prompts of a .jsonl file: one JSON object a line."""
    prompts: list[PromptFiles] = []
    for number, line in enumerate(_decoded(file).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{file.name}, line {number}"
        entry = parse_object(line, where, error=UsageError)
        for key, value in entry.items():
            if key not in PROMPT_KEYS or not isinstance(value, PROMPT_KEYS[key]):
                known = ", ".join(f"{name} ({'text' if t is str else 'list'})" for name, t in PROMPT_KEYS.items())
                raise UsageError(f"found {key!r} with {value!r:.60}, expected {known}", where=where)
        media = {key: tuple(_beside(file, name, where) for name in entry.get(key, [])) for key in ("images", "audios")}
        prompts.append(PromptFiles(where, entry.get("prompt"), media["images"], media["audios"], entry.get("system")))
    return prompts


def _beside(file: CalibrationFile, name: object, where: str) -> CalibrationFile:
    if file.folder is None:
        raise UsageError("a prompt inside an archive names media, which only a folder can hold", where=where)
    if not isinstance(name, str) or not name:
        raise UsageError(f"expected the path of a file, found {name!r:.60}", where=where)
    path = file.folder / name
    if not is_file(path):
        raise UsageError(f"the file {name} does not exist", where=where, fix="paths are relative to the .jsonl file")
    return CalibrationFile(str(path), lambda: read_medium(path), path.parent)


def _text_of(prompt: PromptFiles) -> str:
    if prompt.text is None:
        return TASK_FOR_IMAGE if prompt.images else TASK_FOR_AUDIO
    text = prompt.text if isinstance(prompt.text, str) else _decoded(prompt.text)
    if not text.strip() and not (prompt.images or prompt.audios):
        raise UsageError("the prompt is empty", where=prompt.name)
    return text


def _decoded(file: CalibrationFile) -> str:
    data = file.read()
    if len(data) > MAX_PROMPT_NBYTES and file.suffix != ".jsonl":
        raise UsageError(f"the prompt has more than {MAX_PROMPT_NBYTES:,} bytes", where=file.name, fix="cut it")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as err:
        raise UsageError(
            f"the prompt is not UTF-8 text (byte {err.start:,})", where=file.name, fix="save it as UTF-8"
        ) from err
