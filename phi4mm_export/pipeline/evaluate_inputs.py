"""The requests that an evaluation asks both packages: media screened as for `run`, processed by the package's own
processors, all faults of all files before a graph runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from numpy.typing import NDArray

from phi4mm_export.checks.evaluation import Mode
from phi4mm_export.errors import PackageError, UsageError
from phi4mm_export.runtime.audio import Clip, decode_audio
from phi4mm_export.runtime.calibration import BUILTIN
from phi4mm_export.runtime.calibration_prompts import TASK_FOR_AUDIO, TASK_FOR_IMAGE, PromptFiles, find_prompts
from phi4mm_export.runtime.calibration_sources import CalibrationFile, SampleKind, choose, find_files
from phi4mm_export.runtime.generate import uses_template
from phi4mm_export.runtime.images import Picture, decode_image
from phi4mm_export.runtime.media import read_medium, refuse
from phi4mm_export.runtime.package import RunPackage
from phi4mm_export.runtime.processor import Processor, open_processor
from phi4mm_export.runtime.prompts import build_prompt
from phi4mm_export.spec.contract import Component

Array = NDArray[Any]

BUILTIN_COUNT = 8
"""Builtin prompts when nothing was given: two of each mode."""
MAX_PAIRS = 4
"""Most requests that hold a picture of --images together with a clip of --audio."""
TASK_FOR_BOTH = "Answer the spoken question about the picture."
SAMPLE_TEXT = (
    "The invoice of 14 March 2024 lists three items: paper (12 boxes, 48.60 EUR), ink (2 bottles, 17.90 EUR) and "
    "delivery (6.00 EUR). The total of 72.50 EUR is due within thirty days. Please quote number 2024-0317 when you "
    "pay, and tell us at once if anything in the parcel was damaged on the way."
)
"""What likelihoods are measured on when nothing was given."""


@dataclass(frozen=True)
class Sources:
    """What was passed: folders, globs, lists, archives or files by kind; files of plain text; a limit per source."""

    images: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    text: tuple[Path, ...] = ()
    num_samples: int | None = None
    seed: int = 0

    @property
    def builtin(self) -> bool:
        """Whether the seeded synthetic set stands in, because nothing was given."""
        return not (self.images or self.audio or self.prompts or self.text)


@dataclass(frozen=True)
class Ask:
    """One request, decoded and in chat format."""

    name: str
    mode: Mode
    prompt: str
    pictures: tuple[Picture, ...] = ()
    clips: tuple[Clip, ...] = ()


@dataclass(frozen=True)
class Asked:
    """All requests, the texts (name, content), and the processor that both packages are fed through."""

    asks: tuple[Ask, ...]
    texts: tuple[tuple[str, str], ...]
    processor: Processor

    def arrays(self, ask: Ask, processor: Processor | None = None) -> Mapping[str, Array]:
        """What og's processor makes of a request (og's array names); made anew on each call: crops are large."""
        return (processor or self.processor)(ask.prompt, ask.pictures, ask.clips).arrays

    def text_ids(self, text: str, limit: int) -> list[int]:
        """The first `limit` tokens of a plain text."""
        return [int(i) for i in self.processor(text).input_ids[:limit]]


def ask_all(package: RunPackage, sources: Sources) -> Asked:
    """Find, decode and process everything once.

    Raises one UsageError naming every file that cannot be used, PackageError where the package cannot take the media.
    """
    processor = open_processor(package)
    template = processor.chat_template if uses_template(package) else None
    asks: list[Ask] = []
    faults: list[UsageError] = []
    found = _found(package, sources)
    for prompt, name in zip(found, _short_names([prompt.name for prompt in found]), strict=True):
        pictures, clips, bad = _decoded(prompt)
        faults += bad
        if bad:
            continue
        try:
            ask = _ask(prompt, name, pictures, clips, template)
            processor(ask.prompt, ask.pictures, ask.clips)  # refuses what og cannot tile, before a graph runs
            asks.append(ask)
        except UsageError as err:
            faults.append(
                UsageError(err.what, where=prompt.name if err.where.startswith("--") else err.where, fix=err.fix)
            )
    refuse(faults)
    return Asked(tuple(asks), _texts(sources), processor)


def _found(package: RunPackage, sources: Sources) -> list[PromptFiles]:
    """All requests before decoding: prompts, then pictures, then clips, then pairs of both."""
    if sources.builtin:
        prompts = find_prompts(BUILTIN, sources.num_samples or BUILTIN_COUNT, sources.seed)
        has_speech = package.graph(Component.SPEECH) is not None
        return [prompt for prompt in prompts if has_speech or not prompt.audios]
    prompts = [
        prompt
        for source in sources.prompts
        for prompt in find_prompts(source, sources.num_samples, sources.seed, option="--prompts")
    ]
    images = _media(sources.images, SampleKind.IMAGE, "--images", sources)
    clips = _media(sources.audio, SampleKind.AUDIO, "--audio", sources)
    prompts += [PromptFiles(file.name, TASK_FOR_IMAGE, images=(file,)) for file in images]
    prompts += [PromptFiles(file.name, TASK_FOR_AUDIO, audios=(file,)) for file in clips]
    for image, clip in list(zip(images, clips, strict=False))[:MAX_PAIRS]:
        name = f"{_base(image.name)} + {_base(clip.name)}"
        prompts.append(PromptFiles(name, TASK_FOR_BOTH, images=(image,), audios=(clip,)))
    if any(prompt.audios for prompt in prompts) and package.graph(Component.SPEECH) is None:
        raise PackageError("an audio file was passed, and the package has no speech graph", where="genai_config.json")
    return prompts


def _media(given: Iterable[str], kind: SampleKind, option: str, sources: Sources) -> list[CalibrationFile]:
    files: list[CalibrationFile] = []
    for source in given:
        found = find_files(source, kind, option=option).files
        files += [found[i] for i in choose([file.name for file in found], sources.num_samples, sources.seed)]
    return files


def _decoded(prompt: PromptFiles) -> tuple[tuple[Picture, ...], tuple[Clip, ...], list[UsageError]]:
    pictures: list[Picture] = []
    clips: list[Clip] = []
    faults: list[UsageError] = []
    for file in prompt.images:
        try:
            pictures.append(decode_image(file.read(), file.name))
        except UsageError as err:
            faults.append(err)
    for file in prompt.audios:
        try:
            clips.append(decode_audio(file.read(), file.name))
        except UsageError as err:
            faults.append(err)
    return tuple(pictures), tuple(clips), faults


def _ask(prompt: PromptFiles, name: str, pictures: Sequence[Picture], clips: Sequence[Clip], template: Any) -> Ask:
    text = prompt.text
    if isinstance(text, CalibrationFile):
        text = _utf8(text.read(), text.name)
    if text is None:
        text = TASK_FOR_IMAGE if pictures else TASK_FOR_AUDIO
    built = build_prompt(text, num_images=len(pictures), num_audios=len(clips), system=prompt.system, template=template)
    mode = {
        (False, False): Mode.NONE,
        (True, False): Mode.VISION,
        (False, True): Mode.SPEECH,
        (True, True): Mode.BOTH,
    }[bool(pictures), bool(clips)]
    ordered = tuple(pictures[i] for i in built.images), tuple(clips[i] for i in built.audios)
    return Ask(name, mode, built.text, *ordered)


def _texts(sources: Sources) -> tuple[tuple[str, str], ...]:
    if sources.builtin:
        return (("builtin text", SAMPLE_TEXT),)
    names = _short_names([str(path) for path in sources.text])
    found = [(name, _utf8(read_medium(path), str(path))) for name, path in zip(names, sources.text, strict=True)]
    empty = [str(path) for path, (_, text) in zip(sources.text, found, strict=True) if not text.strip()]
    if empty:
        raise UsageError("the text is empty", where=empty[0])
    return tuple(found)


def _utf8(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as err:
        raise UsageError(f"not UTF-8 text (byte {err.start:,})", where=name, fix="save it as UTF-8") from err


def _short_names(names: Sequence[str]) -> list[str]:
    """The file names without their folders, numbered where two are alike: no path of this machine in a report."""
    short = [_base(name) for name in names]
    seen = Counter[str]()
    unique: list[str] = []
    for name in short:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique


def _base(name: str) -> str:
    return PurePosixPath(name.replace("\\", "/")).name or name
