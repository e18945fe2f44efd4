"""What parity looks at: deterministic inputs of the four graphs, and how a case is run. numpy only.

The same code drives a package, the PyTorch reference and transformers' model, so outputs pair up by name. Letters:
B batch, S new tokens, T past and new tokens, H hidden size, V vocabulary, N images or clips, C crops, F frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.checks.sampling import words
from phi4mm_export.spec.model import AUDIO_TOKEN_ID, IMAGE_SIZE, IMAGE_TOKEN_ID, PATCHES_PER_SIDE, Role

Array = NDArray[Any]
Inputs = Mapping[str, Array]
Adapters = Sequence[Role | None]

PLAIN_TOKENS = 199_990
"""Ids below this are ordinary text in every checkpoint."""
USER, END, ASSISTANT = 200021, 200020, 200019
PAD = 199999
MELS = 80
FRAMES_PER_TOKEN = 8
SHORT_STEPS = 8
CHAIN_STEPS = 16
OVER_LIMIT = 104
"""Tokens of the long prompt beyond the LongRoPE switch."""


class InputMode(StrEnum):
    """What a request holds; it decides the adapter and the audio projection of the original."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"
    BOTH = "both"

    @property
    def adapter(self) -> Role | None:
        """The adapter that the original activates: `InputMode` of modeling_phi4mm.py."""
        return {"text": None, "image": Role.VISION, "audio": Role.SPEECH, "both": Role.VISION}[self.value]

    @property
    def projection(self) -> int:
        """`audio_projection_mode` as og feeds it."""
        return list(InputMode).index(self)


class Group(StrEnum):
    """What a case runs: one graph, or all of them in a chain."""

    VISION = "vision"
    SPEECH = "speech"
    EMBEDDING = "embedding"
    DECODER = "decoder"
    CHAIN = "chain"


class Logits(Protocol):
    """One call of the decoder: logits [B, S or fewer, V], present keys and values by layer [B, K, T, D]."""

    @property
    def logits(self) -> Array: ...
    @property
    def present(self) -> Sequence[tuple[Array, Array]]: ...


class Graphs(Protocol):
    """The four graphs, whoever computes them."""

    def vision(self, pixel_values: Array, image_attention_mask: Array, image_sizes: Array) -> Array: ...
    def speech(self, audio_embeds: Array, audio_attention_mask: Array, audio_sizes: Array, mode: int) -> Array: ...
    def embedding(
        self, input_ids: Array, image_features: Array | None = None, audio_features: Array | None = None
    ) -> Array: ...
    def decoder(
        self,
        inputs_embeds: Array,
        input_ids: Array,
        attention_mask: Array,
        adapters: Adapters,
        previous: Any = None,
        *,
        last: int | None = None,
    ) -> Logits:
        """`adapters`: what each row of the batch is to run with; `previous`: the result of the call before."""
        ...


@dataclass(frozen=True)
class Case:
    """One comparison. `run(graphs, tokens)` returns whole outputs by name; `tokens` are followed instead of the
    argmax, so that one slip does not spoil the steps after it.
    """

    name: str
    group: Group
    run: Callable[[Graphs, Array | None], dict[str, Array]]
    adapters: Adapters = ()
    """What the decoder is asked to hold, by row; empty where no decoder runs."""
    mode: str = ""
    """The kind of request it stands for: an InputMode, or several."""
    long: bool = False
    """More than 4,000 tokens: left out of quick runs, and the wider tolerance holds."""

    @property
    def foreign(self) -> bool:
        """A request run with another adapter than the original's choice: tells merged packages apart."""
        return self.group is Group.CHAIN and self.adapters != (InputMode(self.mode).adapter,)


# --------------------------------------------------------------------------------------------- deterministic numbers


def bell(tag: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """About normal, variance 1: the sum of four uniform 16-bit numbers."""
    w = words(tag, int(np.prod(shape)))
    mask = np.uint64(0xFFFF)
    total = np.sum([((w >> np.uint64(shift)) & mask).astype(np.int64) for shift in (0, 16, 32, 48)], axis=0)
    numbers: NDArray[np.float64] = (total - 131070) * (3.0**0.5 / 65536)
    return numbers.astype(np.float32).reshape(shape)


def unit(tag: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Uniform in [-1, 1), exact in 16 bits."""
    numbers = (words(tag, int(np.prod(shape))) & np.uint64(0xFFFF)).astype(np.float32)
    return (numbers / np.float32(32768) - np.float32(1)).reshape(shape)


def text_ids(tag: str, count: int) -> NDArray[np.int64]:
    """Ordinary token ids."""
    return (words(tag, count) % np.uint64(PLAIN_TOKENS)).astype(np.int64)


# --------------------------------------------------------------------------------------------- media made of numbers


def made_images(tag: str, images: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> dict[str, Array]:
    """The vision graph's inputs for images given as (crop rows, columns), (real patch rows, columns).

    Padded as the runtime pads: shorter images get zero crops whose mask is one.
    """
    crops = 1 + max(h * w for (h, w), _ in images)
    pixels = np.zeros((len(images), crops, 3, IMAGE_SIZE, IMAGE_SIZE), np.float32)
    mask = np.ones((len(images), crops, PATCHES_PER_SIDE, PATCHES_PER_SIDE), np.float32)
    for i, ((h, w), (rows, columns)) in enumerate(images):
        used = 1 + h * w
        coarse = unit(f"{tag}/{i}/coarse", (used, 3, IMAGE_SIZE // 7, IMAGE_SIZE // 7)).repeat(7, 2).repeat(7, 3)
        fine = unit(f"{tag}/{i}/fine", (1, 3, IMAGE_SIZE, IMAGE_SIZE))
        pixels[i, :used] = 0.75 * coarse + 0.25 * fine
        full = np.zeros((h * PATCHES_PER_SIDE, w * PATCHES_PER_SIDE), np.float32)
        full[:rows, :columns] = 1
        tiles = full.reshape(h, PATCHES_PER_SIDE, w, PATCHES_PER_SIDE).transpose(0, 2, 1, 3)
        mask[i, 1:used] = tiles.reshape(h * w, PATCHES_PER_SIDE, PATCHES_PER_SIDE)
    sizes = np.array([(IMAGE_SIZE * h, IMAGE_SIZE * w) for (h, w), _ in images], np.int64)
    return {"pixel_values": pixels, "image_attention_mask": mask, "image_sizes": sizes}


def made_clips(tag: str, frames: Sequence[int]) -> dict[str, Array]:
    """The speech graph's inputs for clips of so many log-mel frames: a spectrum that changes every 8 frames."""
    longest = max(frames)
    embeds = np.zeros((len(frames), longest, MELS), np.float32)
    mask = np.zeros((len(frames), longest), np.bool_)
    for i, count in enumerate(frames):
        coarse = bell(f"{tag}/{i}/coarse", (-(-count // 8), MELS)).repeat(8, 0)[:count]
        embeds[i, :count] = 8 + 3 * coarse + bell(f"{tag}/{i}/fine", (count, MELS))
        mask[i, :count] = True
    return {
        "audio_embeds": embeds,
        "audio_attention_mask": mask,
        "audio_sizes": np.array([-(-count // FRAMES_PER_TOKEN) for count in frames], np.int64),
    }


# --------------------------------------------------------------------------------------------- one graph at a time


def vision_case(name: str, inputs: Inputs, *, long: bool = False) -> Case:
    """Image features of `inputs`."""

    def run(graphs: Graphs, _: Array | None) -> dict[str, Array]:
        return {"features": graphs.vision(**{k: inputs[k] for k in VISION_INPUTS})}

    return Case(name, Group.VISION, run, mode="image, both", long=long)


def speech_case(name: str, inputs: Inputs, modes: Sequence[int], *, long: bool = False) -> Case:
    """Audio features of `inputs` in each projection mode."""

    def run(graphs: Graphs, _: Array | None) -> dict[str, Array]:
        arrays = {k: inputs[k] for k in SPEECH_INPUTS}
        return {f"mode{mode}_features": graphs.speech(**arrays, mode=mode) for mode in modes}

    kinds = {"both" if mode in (1, 3) else "audio" for mode in modes}
    return Case(name, Group.SPEECH, run, mode=", ".join(sorted(kinds)), long=long)


def embedding_case(name: str, input_ids: Array, image: Array, audio: Array) -> Case:
    """Embeddings of ids with features put in place."""

    def run(graphs: Graphs, _: Array | None) -> dict[str, Array]:
        return {"embeds": graphs.embedding(input_ids, image, audio)}

    return Case(name, Group.EMBEDDING, run, mode="all")


VISION_INPUTS = ("pixel_values", "image_attention_mask", "image_sizes")
SPEECH_INPUTS = ("audio_embeds", "audio_attention_mask", "audio_sizes")


# --------------------------------------------------------------------------------------------- the decoder


def greedy(
    graphs: Graphs,
    embeds: Array,
    input_ids: Array,
    adapter: Role | None,
    *,
    steps: int,
    rows: Sequence[int] = (-1,),
    follow: Array | None = None,
) -> dict[str, Array]:
    """Prefill [1, S, H], then `steps` calls of one token: the argmax, or `follow[i]`.

    Returns prefill_logits [rows, V], prefill_kv [2, L, K, S, D], and with steps step_logits [steps, V], step_kv and
    tokens [steps + 1]. `rows` count from the end (negative), since a graph may give the last row only.
    """
    length = embeds.shape[1]
    mask = np.ones((1, length), np.int64)
    result = graphs.decoder(embeds, input_ids, mask, [adapter], last=-min(rows))
    available = result.logits.shape[1]
    out = {
        "prefill_logits": np.stack([result.logits[0, row] for row in rows if -row <= available]),
        "prefill_kv": _stacked(result, length),
    }
    if not steps:
        return out
    tokens, logits = [int(result.logits[0, -1].argmax())], []
    for step in range(steps):
        token = tokens[-1] if follow is None else int(follow[step])
        ids = np.array([[token]], np.int64)
        mask = np.ones((1, length + step + 1), np.int64)
        result = graphs.decoder(graphs.embedding(ids), ids, mask, [adapter], result)
        logits.append(result.logits[0, -1])
        tokens.append(int(result.logits[0, -1].argmax()))
    return out | {
        "step_logits": np.stack(logits),
        "step_kv": _stacked(result, length + steps),
        "tokens": np.array(tokens, np.int64),
    }


def marked(input_ids: Array, adapter: Role | None) -> Array:
    """Ids [B, S] whose second position holds the placeholder that asks a gated decoder for `adapter`."""
    if adapter is None:
        return input_ids
    ids = input_ids.copy()
    ids[:, 1] = {Role.VISION: IMAGE_TOKEN_ID, Role.SPEECH: AUDIO_TOKEN_ID}[adapter]
    return ids


def text_case(
    name: str, ids: Array, adapter: Role | None, *, steps: int, rows: Sequence[int] = (-1,), long: bool = False
) -> Case:
    """The decoder alone on text ids [S], prefill and greedy steps, the adapter chosen from outside."""

    def run(graphs: Graphs, follow: Array | None) -> dict[str, Array]:
        embeds = graphs.embedding(ids[None])
        return greedy(graphs, embeds, marked(ids[None], adapter), adapter, steps=steps, rows=rows, follow=follow)

    return Case(f"{name}.{suffix(adapter)}", Group.DECODER, run, (adapter,), modes_of(adapter), long)


def split_case(name: str, ids: Array, adapter: Role | None, at: int) -> Case:
    """The prompt `ids` [S] in two calls, cut before position `at`: past and new tokens together."""

    def run(graphs: Graphs, _: Array | None) -> dict[str, Array]:
        marks = marked(ids[None], adapter)
        embeds = graphs.embedding(ids[None])
        first = graphs.decoder(embeds[:, :at], marks[:, :at], np.ones((1, at), np.int64), [adapter])
        mask = np.ones((1, len(ids)), np.int64)
        second = graphs.decoder(embeds[:, at:], marks[:, at:], mask, [adapter], first)
        return {"prefill_logits": second.logits[0, -1:], "prefill_kv": _stacked(second, len(ids))}

    return Case(f"{name}.{suffix(adapter)}", Group.DECODER, run, (adapter,), modes_of(adapter))


def batch_case(name: str, prompts: Sequence[Array], adapters: Adapters) -> Case:
    """Prompts of different length as one batch padded on the right, each row with its own adapter.

    Compared are the logits of every row's last real position, and keys and values of real positions.
    """
    longest = max(len(ids) for ids in prompts)
    ids = np.stack([np.pad(p, (0, longest - len(p)), constant_values=PAD) for p in prompts])
    mask = np.stack([np.arange(longest) < len(p) for p in prompts]).astype(np.int64)
    mode = modes_of(adapters[0]) if len(set(adapters)) == 1 else "mixed batch"

    def run(graphs: Graphs, _: Array | None) -> dict[str, Array]:
        marks = np.concatenate([marked(ids[i : i + 1], adapter) for i, adapter in enumerate(adapters)])
        result = graphs.decoder(graphs.embedding(ids), marks, mask, adapters)
        out = {}
        for row, prompt in enumerate(prompts):
            available = result.logits.shape[1]
            at = len(prompt) - 1 if available == longest else 0
            out[f"row{row}_prefill_logits"] = result.logits[row, at : at + 1]
            out[f"row{row}_prefill_kv"] = _stacked(result, len(prompt), row)
        return out

    return Case(name, Group.DECODER, run, tuple(adapters), mode)


def chain_case(name: str, request: Inputs, adapter: Role | None, *, steps: int, long: bool = False) -> Case:
    """All graphs from processor outputs on: features, embeddings, prefill and greedy steps.

    request: input_ids [1, S] with placeholders, the vision and speech inputs it needs, audio_projection_mode [1].
    """

    def run(graphs: Graphs, follow: Array | None) -> dict[str, Array]:
        image = audio = None
        if "pixel_values" in request:
            image = graphs.vision(**{k: request[k] for k in VISION_INPUTS})
        if "audio_embeds" in request:
            mode = int(np.ravel(request["audio_projection_mode"])[0])
            audio = graphs.speech(**{k: request[k] for k in SPEECH_INPUTS}, mode=mode)
        ids = request["input_ids"].astype(np.int64)
        embeds = graphs.embedding(ids, image, audio)
        return greedy(graphs, embeds, ids, adapter, steps=steps, follow=follow)

    return Case(f"{name}.{suffix(adapter)}", Group.CHAIN, run, (adapter,), request_mode(request), long)


def _stacked(result: Logits, length: int, row: int = 0) -> Array:
    """Keys and values of one row: [2, layers, K, length, D]."""
    return np.stack([[pair[part][row, :, :length] for pair in result.present] for part in (0, 1)])


def suffix(adapter: Role | None) -> str:
    """How case names spell an adapter."""
    return "none" if adapter is None else adapter.value


def modes_of(adapter: Role | None) -> str:
    """The kinds of request that run with `adapter` in the original."""
    return ", ".join(mode for mode in InputMode if mode.adapter is adapter)


def request_mode(request: Inputs) -> InputMode:
    """What a processed request holds."""
    image, audio = "pixel_values" in request, "audio_embeds" in request
    return (
        InputMode.BOTH
        if image and audio
        else InputMode.IMAGE
        if image
        else InputMode.AUDIO
        if audio
        else InputMode.TEXT
    )
