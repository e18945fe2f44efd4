"""The work behind `phi4mm run`: screen the media, build the prompt, generate with og."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.errors import PackageError
from phi4mm_export.runtime.audio import Clip, load_audio
from phi4mm_export.runtime.generate import TextGenerator, uses_template
from phi4mm_export.runtime.images import Picture, load_image
from phi4mm_export.runtime.media import refuse, screen
from phi4mm_export.runtime.package import RunPackage, open_package
from phi4mm_export.runtime.processor import cut_clips
from phi4mm_export.runtime.prompts import Prompt, build_prompt
from phi4mm_export.spec.contract import Component, Provider
from phi4mm_export.spec.phi4mm_config import check_device

DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class RunResult:
    """One answer and its figures. `finish_reason`: "stop" (an end token came) or "length". Seconds are wall time;
    `tokens_per_second` is the speed of the decode steps, the prompt apart."""

    text: str
    token_ids: tuple[int, ...]
    prompt: str
    prompt_tokens: int
    finish_reason: str
    device: str
    load_seconds: float
    prompt_seconds: float
    decode_seconds: float
    tokens_per_second: float
    restarts: int
    notes: tuple[str, ...]

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer, an end token included."""
        return len(self.token_ids)


def run(
    package: Path | str,
    *,
    prompt: str,
    images: Sequence[Path | str] = (),
    audios: Sequence[Path | str] = (),
    system: str | None = None,
    raw: bool = False,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    max_length: int | None = None,
    provider: Provider | str | None = None,
    device: int = 0,
    on_text: Callable[[str], None] | None = None,
) -> RunResult:
    """Generate greedily from a package.

    `prompt` is plain text, or already in chat format (role tokens, or `raw`); markers `<|image_1|>`, `<|audio_1|>` are
    put at its beginning unless it has them. `provider` replaces the package's own. `max_length` bounds prompt and
    answer together; by default it is what the request needs. `on_text` receives the answer piece by piece.

    Raises UsageError for a bad request (all unusable media files at once), PackageError for a package that og refuses,
    SystemLimitError for a missing library, an old og, too little memory or no CUDA.
    """
    check_device(device, where="--device")
    chosen = None if provider is None else Provider(provider)
    opened = open_package(package)
    pictures, clips = load_media(opened, images, audios)
    template = uses_template(opened)
    # Faults of the prompt show before the graphs are loaded, which takes a while.
    plan = _build(prompt, pictures, clips, system, raw, (lambda _: "") if template else None)
    began = time.perf_counter()
    generator = TextGenerator(opened, provider=chosen)
    load_seconds = time.perf_counter() - began
    if template:
        plan = _build(prompt, pictures, clips, system, raw, generator.chat_template)
    request = generator.processor(plan.text, [pictures[i] for i in plan.images], [clips[i] for i in plan.audios])
    answer = generator.generate(request, max_new_tokens=max_new_tokens, max_length=max_length, on_text=on_text)
    return RunResult(
        text=answer.text,
        token_ids=answer.token_ids,
        prompt=plan.text,
        prompt_tokens=answer.prompt_tokens,
        finish_reason=answer.finish_reason,
        device=generator.device,
        load_seconds=load_seconds,
        prompt_seconds=answer.prompt_seconds,
        decode_seconds=answer.decode_seconds,
        tokens_per_second=answer.tokens_per_second,
        restarts=answer.restarts,
        notes=(*opened.notes, *cut_clips(opened, clips), *_ignored_adapters(opened, pictures, clips)),
    )


def load_media(
    package: RunPackage, images: Sequence[Path | str], audios: Sequence[Path | str]
) -> tuple[list[Picture], list[Clip]]:
    """Screen and decode all files. Raises one UsageError naming every file that cannot be used."""
    if audios and package.graph(Component.SPEECH) is None:
        raise PackageError("an audio file was passed, and the package has no speech graph", where="genai_config.json")
    pictures, bad_pictures = screen([Path(image) for image in images], load_image)
    clips, bad_clips = screen([Path(audio) for audio in audios], load_audio)
    refuse([*bad_pictures, *bad_clips])
    return pictures, clips


def _ignored_adapters(package: RunPackage, pictures: Sequence[Picture], clips: Sequence[Clip]) -> tuple[str, ...]:
    if not package.adapters or not (pictures or clips):
        return ()
    return (
        "ONNX Runtime GenAI 0.9 to 0.18 ignores the package's adapter files, so pictures and clips were answered by "
        "the bare base model; export with --lora gated",
    )


def _build(
    prompt: str,
    pictures: Sequence[Picture],
    clips: Sequence[Clip],
    system: str | None,
    raw: bool,
    template: Callable[[str], str] | None,
) -> Prompt:
    return build_prompt(
        prompt,
        num_images=len(pictures),
        num_audios=len(clips),
        system=system,
        raw=raw,
        template=template,
    )
