"""The four graphs one after another, each from whichever package: teacher-forced logits and greedy answers.

With all parts from one package this is what og runs; with parts from two it tells which component loses the answer.
Batch 1; letters as in spec/model.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.runtime.stepping import AUDIO_MODE, BOTH_MODE, DecoderCache, FourGraphs, role_of
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.model import AUDIO_TOKEN_ID, IMAGE_TOKEN_ID

Array = NDArray[Any]
Features = tuple[Array | None, Array | None]
"""Image and audio features of one request."""
PLACEHOLDER_IDS = (IMAGE_TOKEN_ID, AUDIO_TOKEN_ID)


class Chain:
    """Components by name; those that a call does not need may be missing."""

    def __init__(self, parts: Mapping[Component, FourGraphs]) -> None:
        self._parts = dict(parts)

    def replaced(self, component: Component, graphs: FourGraphs) -> Chain:
        """The same chain with one component from elsewhere."""
        return Chain({**self._parts, component: graphs})

    def vision(self, arrays: Mapping[str, Array]) -> Array:
        """Image features [tokens, H] of a processed request."""
        part = self._parts[Component.VISION]
        return part.vision(arrays["pixel_values"], arrays["image_attention_mask"], arrays["image_sizes"])

    def speech(self, arrays: Mapping[str, Array]) -> Array:
        """Audio features [tokens, H] of a processed request, in the projection that its other media choose."""
        embeds = arrays["audio_embeds"]
        mask = arrays.get("audio_attention_mask")
        mask = np.ones(embeds.shape[:2], np.bool_) if mask is None else mask
        mode = BOTH_MODE if "pixel_values" in arrays else AUDIO_MODE
        return self._parts[Component.SPEECH].speech(embeds, mask, arrays["audio_sizes"], mode)

    def features(self, arrays: Mapping[str, Array]) -> Features:
        """Features of what the request holds."""
        image = self.vision(arrays) if "pixel_values" in arrays else None
        return image, self.speech(arrays) if "audio_embeds" in arrays else None

    def embeds(self, prompt_ids: Sequence[int], features: Features, answer_ids: Sequence[int] = ()) -> Array:
        """inputs_embeds [1, S, H] of a prompt and the answer tokens after it."""
        part = self._parts[Component.EMBEDDING]
        made = [part.embedding(np.asarray([list(prompt_ids)], np.int64), *features)]
        if answer_ids:
            made.append(part.embedding(np.asarray([list(answer_ids)], np.int64)))
        return np.concatenate(made, axis=1)

    def forced(self, embeds: Array, ids: Sequence[int], first: int) -> Iterator[Array]:
        """Next-token logits [V] after the first `first` tokens of `ids`, after one more, ..., after all of them.

        embeds: [1, len(ids), H]. Keys are computed anew where the length crosses the decoder's LongRoPE switch.
        """
        decoder = self._parts[Component.DECODER]
        switch, role = decoder.package.rope_switch, role_of(ids)
        all_ids = np.asarray([list(ids)], np.int64)
        cache: DecoderCache | None = None
        done = 0
        for end in range(first, len(ids) + 1):
            if cache is not None and switch is not None and done <= switch < end:
                cache, done = None, 0
            mask = np.ones((1, end), np.int64)
            new = all_ids[:, done:end]
            logits, cache = decoder.decoder(embeds[:, done:end], mask, cache, input_ids=new, role=role)
            done = end
            yield logits[0, -1].astype(np.float32)

    def greedy(
        self, prompt_ids: Sequence[int], features: Features, max_new_tokens: int, stop_ids: Sequence[int]
    ) -> tuple[list[int], list[Array]]:
        """The greedy answer, an end token included, and the logits [V] that each of its tokens was chosen from.

        It ends before a placeholder of pictures or clips, which stands for feature rows that an answer does not have.
        """
        tokens: list[int] = []
        rows: list[Array] = []
        decoder = self._parts[Component.DECODER]
        switch, role = decoder.package.rope_switch, role_of(prompt_ids)
        sequence = self.embeds(prompt_ids, features)
        ids = list(prompt_ids)
        cache: DecoderCache | None = None
        done = 0
        while len(tokens) < max_new_tokens:
            if cache is not None and switch is not None and done <= switch < len(ids):
                cache, done = None, 0
            new = np.asarray([ids[done:]], np.int64)
            mask = np.ones((1, len(ids)), np.int64)
            logits, cache = decoder.decoder(sequence[:, done:], mask, cache, input_ids=new, role=role)
            done = len(ids)
            row = logits[0, -1].astype(np.float32)
            token = int(row.argmax())
            if token in PLACEHOLDER_IDS:
                break
            tokens.append(token)
            rows.append(row)
            ids.append(token)
            if token in stop_ids:
                break
            sequence = np.concatenate([sequence, self.embeds([token], (None, None))], axis=1)
        return tokens, rows
