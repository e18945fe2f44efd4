"""The original Phi-4-multimodal arithmetic in torch: what every graph is measured against.

Written from the model's published remote code (modeling_phi4mm.py, vision_siglip_navit.py, speech_conformer_encoder.py
of microsoft/Phi-4-multimodal-instruct), attention in its eager form.  Nothing here is meant to be fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.oracle.decoder import Decoder
from phi4mm_export.oracle.speech import Speech
from phi4mm_export.oracle.vision import Vision
from phi4mm_export.oracle.weights import Array, Weights, to_torch
from phi4mm_export.spec.model import ModelConfig, Role

if TYPE_CHECKING:
    from phi4mm_export.checkpoint.open import Checkpoint

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True)
class DecoderOutput:
    """logits [B, S, V] and present keys and values by layer, each [B, K, T, D]: float64, else float32."""

    logits: Array
    present: tuple[tuple[Array, Array], ...]


def to_numpy(tensor: Tensor) -> Array:
    """A float tensor as numpy; float16 becomes float32, which holds it exactly."""
    array: Array = (tensor if tensor.dtype == torch.float64 else tensor.float()).numpy()
    return array


class Reference:
    """The four graphs of one checkpoint as functions of numpy arrays, named as in the package's contract.

    `dtype` is the type of weights and activations: float64 (goldens), float32, or float16 throughout.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str = "float32") -> None:
        self.config: ModelConfig = checkpoint.config
        self.dtype = dtype
        weights = Weights(checkpoint.tensors, DTYPES[dtype])
        self.image = Vision(self.config.vision, weights)
        self.audio = Speech(self.config.audio, weights)
        self.text = Decoder(self.config, weights, checkpoint.adapters)

    @classmethod
    def open(
        cls, path: Path | str, dtype: str = "float32", *, adapter_paths: Mapping[Role, Path] | None = None
    ) -> Reference:
        """The reference of the checkpoint folder `path`, either layout; CheckpointError if it cannot be used."""
        return cls(open_checkpoint(Path(path), adapter_paths=adapter_paths or {}), dtype)

    def vision(self, pixel_values: Array, image_attention_mask: Array, image_sizes: Array) -> Array:
        """[N, C, 3, 448, 448], [N, C, 32, 32], int64 [N, 2] -> image features [tokens, H]."""
        with torch.inference_mode():
            return to_numpy(self.image(to_torch(pixel_values), to_torch(image_attention_mask), to_torch(image_sizes)))

    def speech(self, audio_embeds: Array, audio_attention_mask: Array, audio_sizes: Array, mode: int) -> Array:
        """[N, F, 80], bool [N, F], int64 [N], 0..3 -> audio features [sum(audio_sizes), H]."""
        with torch.inference_mode():
            return to_numpy(
                self.audio(to_torch(audio_embeds), to_torch(audio_attention_mask), to_torch(audio_sizes), mode)
            )

    def embedding(
        self, input_ids: Array, image_features: Array | None = None, audio_features: Array | None = None
    ) -> Array:
        """Integer ids [B, S] and features [tokens, H] -> input embeddings [B, S, H]."""
        image, audio = (None if x is None else to_torch(x) for x in (image_features, audio_features))
        with torch.inference_mode():
            return to_numpy(self.text.embed(to_torch(input_ids.astype(np.int64)), image, audio))

    def decoder(
        self,
        inputs_embeds: Array,
        input_ids: Array,  # noqa: ARG002 (a gated package chooses by them; here the caller names the adapters)
        attention_mask: Array,
        adapters: Sequence[Role | None],
        previous: DecoderOutput | None = None,
        *,
        last: int | None = None,
    ) -> DecoderOutput:
        """[B, S, H], right-padded mask [B, T], one adapter per row, the call before -> logits and present.

        Rows run one by one without their padding; what stands at padded positions is zero.  `last` keeps the
        logits of the last positions only.
        """
        past = previous.present if previous else ()
        rows = [
            self._row(inputs_embeds[row], attention_mask[row], [(k[row], v[row]) for k, v in past], adapter, last)
            for row, adapter in enumerate(adapters)
        ]
        present = tuple(
            (_padded([p[i][0] for _, p in rows], axis=1), _padded([p[i][1] for _, p in rows], axis=1))
            for i in range(self.config.num_layers)
        )
        return DecoderOutput(_padded([logits for logits, _ in rows], axis=0), present)

    def _row(
        self,
        embeds: Array,
        mask: Array,
        past: Sequence[tuple[Array, Array]],
        adapter: Role | None,
        last: int | None,
    ) -> tuple[Array, list[tuple[Array, Array]]]:
        before = len(mask) - len(embeds)
        real = int(mask.sum()) - before
        dtype = DTYPES[self.dtype]
        cache = [(to_torch(k).to(dtype), to_torch(v).to(dtype)) for k, v in past]
        with torch.inference_mode():
            logits, present = self.text(to_torch(embeds[:real]), cache or None, adapter, last=last)
        return to_numpy(logits), [(to_numpy(k), to_numpy(v)) for k, v in present]


def _padded(rows: Sequence[Array], *, axis: int) -> Array:
    """Stack arrays of unequal length along `axis`, zeros behind the shorter ones."""
    longest = max(r.shape[axis] for r in rows)
    widths = [[(0, longest - r.shape[a]) if a == axis else (0, 0) for a in range(r.ndim)] for r in rows]
    return np.stack([np.pad(r, w) if any(b for _, b in w) else r for r, w in zip(rows, widths, strict=True)])
