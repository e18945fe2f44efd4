"""transformers' own Phi4MultimodalForCausalLM as a second witness, in its eager form.

It differs from the original in one place that matters here: its audio attention adds the boolean mask to the scores
instead of masking.  So audio is compared without a mask, for single clips of at most 500 subsampled frames, where
both agree.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phi4mm_export.errors import UsageError
from phi4mm_export.oracle.reference import DecoderOutput, to_numpy
from phi4mm_export.oracle.speech import VISION_MODES
from phi4mm_export.oracle.vision import POOLED
from phi4mm_export.oracle.weights import Array, to_torch
from phi4mm_export.spec.model import AUDIO_TOKEN_ID, CONFORMER_CHUNK, IMAGE_SIZE, IMAGE_TOKEN_ID, Role

SEPARATORS = POOLED + 1
"""Vectors of the global view and the separator behind the tiles that are no patches: one a row, one in the middle."""


class NativeWitness:
    """The four graphs of a checkpoint in the transformers-native layout, computed by transformers in float32."""

    def __init__(self, path: Path) -> None:
        with _quiet():
            import transformers
            from peft.tuners.lora import LoraLayer

            transformers.logging.set_verbosity_error()
            transformers.logging.disable_progress_bar()
            self._model = transformers.Phi4MultimodalForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
            ).eval()
            for role in Role:
                self._model.load_adapter(str(path / f"{role}-lora"), adapter_name=role.value)
        self._lora = [module for module in self._model.modules() if isinstance(module, LoraLayer)]
        self._extend = self._model.model.embed_tokens_extend
        known = inspect.signature(self._model.forward).parameters
        self._cache = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5.2x

    def vision(self, pixel_values: Array, image_attention_mask: Array, image_sizes: Array) -> Array:
        """[N, C, 3, 448, 448], [N, C, 32, 32], int64 [N, 2] -> image features [tokens, H]."""
        count = sum(
            _image_tokens(mask, int(h) // IMAGE_SIZE, int(w) // IMAGE_SIZE)
            for mask, (h, w) in zip(image_attention_mask, image_sizes, strict=True)
        )
        ids = torch.full((1, count), IMAGE_TOKEN_ID)
        with torch.inference_mode():
            features = self._extend.image_embed(
                ids,
                self._model.model.embed_tokens(ids),
                image_pixel_values=to_torch(pixel_values).float(),
                image_sizes=to_torch(image_sizes),
                image_attention_mask=to_torch(image_attention_mask).bool(),
            )
        return to_numpy(features[0])

    def speech(self, audio_embeds: Array, audio_attention_mask: Array, audio_sizes: Array, mode: int) -> Array:
        """[1, F, 80], bool [1, F] all true, int64 [1], 0..3 -> audio features [audio_sizes[0], H]."""
        if not audio_attention_mask.all() or int(audio_sizes.max()) > CONFORMER_CHUNK:
            raise UsageError(
                "transformers' model does not mask padded audio, so it agrees with the original only on single clips "
                f"of at most {CONFORMER_CHUNK} subsampled frames; found sizes {audio_sizes.tolist()}",
                where="audio_attention_mask",
                fix="compare one short clip at a time",
            )
        ids = torch.full((1, int(audio_sizes.sum())), AUDIO_TOKEN_ID)
        with torch.inference_mode():
            features = self._extend.audio_embed(
                ids,
                self._model.model.embed_tokens(ids),
                audio_input_features=to_torch(audio_embeds).float(),
                audio_embed_sizes=to_torch(audio_sizes),
                audio_attention_mask=None,
                audio_projection_mode="vision" if mode in VISION_MODES else "speech",
            )
        return to_numpy(features[0])

    def embedding(
        self, input_ids: Array, image_features: Array | None = None, audio_features: Array | None = None
    ) -> Array:
        """Integer ids [B, S] and features [tokens, H] -> [B, S, H]; the rows are put in place by hand."""
        ids = to_torch(input_ids.astype(np.int64))
        with torch.inference_mode():
            x = self._model.model.embed_tokens(ids)
        for token, features in ((IMAGE_TOKEN_ID, image_features), (AUDIO_TOKEN_ID, audio_features)):
            if features is not None and len(features):
                x = x.clone()
                x[ids == token] = to_torch(features).float()
        return to_numpy(x)

    def decoder(
        self,
        inputs_embeds: Array,
        input_ids: Array,  # noqa: ARG002 (the caller names the adapters)
        attention_mask: Array,
        adapters: Sequence[Role | None],
        previous: NativeOutput | None = None,
        *,
        last: int | None = None,
    ) -> NativeOutput:
        """[1, S, H], mask [1, T] of ones, one adapter -> logits and present; `previous` carries transformers' cache."""
        (adapter,) = adapters
        for module in self._lora:
            module.enable_adapters(adapter is not None)
            if adapter is not None:
                module.set_adapter(adapter.value)
        with torch.inference_mode():
            result = self._model(
                inputs_embeds=to_torch(inputs_embeds).float(),
                attention_mask=to_torch(attention_mask),
                use_cache=True,
                logits_to_keep=last or 0,
                **{self._cache: previous.cache if previous else None},
            )
        cache = getattr(result, self._cache)
        present = tuple((to_numpy(layer.keys), to_numpy(layer.values)) for layer in cache.layers)
        return NativeOutput(to_numpy(result.logits), present, cache)


class NativeOutput(DecoderOutput):
    """A DecoderOutput that also holds transformers' cache object for the next call."""

    def __init__(self, logits: Array, present: tuple[tuple[Array, Array], ...], cache: Any) -> None:
        super().__init__(logits, present)
        object.__setattr__(self, "cache", cache)

    cache: Any


def _image_tokens(mask: Array, h: int, w: int) -> int:
    """Image positions that one image takes: bool-like [C, 32, 32], crop grid h x w."""
    tiles = mask[1 : 1 + h * w, ::2, ::2].reshape(h, w, POOLED, POOLED).transpose(0, 2, 1, 3)
    tiles = tiles.reshape(h * POOLED, w * POOLED) != 0
    return POOLED * POOLED + SEPARATORS + int(tiles.sum()) + int(tiles[:, 0].sum())


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading warns about things that are no fault here (deprecated config keys, adapters set twice)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
