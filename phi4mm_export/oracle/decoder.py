"""The original's text model: embedding with features put in place, decoder layers with LoRA, LongRoPE, head.

Letters: S new tokens, P past tokens, T = P + S, H hidden size, V vocabulary, K key-value heads, D head size.
Each step is a method, so that a test can replace one by a deliberate mistake.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from phi4mm_export.oracle.weights import Weights, softmax
from phi4mm_export.spec.model import AUDIO_TOKEN_ID, IMAGE_TOKEN_ID, ModelConfig, Role

if TYPE_CHECKING:
    from phi4mm_export.checkpoint.adapters import Adapter, LoraPair

TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
LEGACY_IMAGE_IDS = range(-9999, 0)
"""Ids that the original's processor wrote for image positions; anything below counts as audio."""
SCORES_AT_ONCE = 4_000_000
"""Attention scores held at a time: queries are taken in pieces, so that 4,200 tokens in float64 fit."""

Past = Sequence[tuple[Tensor, Tensor]]
"""Keys and values by layer, each [K, P, D]."""


class Decoder:
    """One sequence at a time; a batch is a loop over its rows."""

    def __init__(self, config: ModelConfig, weights: Weights, adapters: Mapping[Role, Adapter]) -> None:
        self.config, self.weights, self.adapters = config, weights, adapters

    def embed(self, input_ids: Tensor, image_features: Tensor | None, audio_features: Tensor | None) -> Tensor:
        """int64 ids [B, S], features [tokens, H] in row-major order of their placeholders -> [B, S, H]."""
        legacy_image = (input_ids >= LEGACY_IMAGE_IDS.start) & (input_ids < LEGACY_IMAGE_IDS.stop)
        ids = input_ids.masked_fill(legacy_image, IMAGE_TOKEN_ID)
        ids = ids.masked_fill(input_ids < LEGACY_IMAGE_IDS.start, AUDIO_TOKEN_ID)
        x = self.weights.rows(TABLE, ids)
        for token, features in ((IMAGE_TOKEN_ID, image_features), (AUDIO_TOKEN_ID, audio_features)):
            if features is not None and len(features):
                x[ids == token] = features.to(x.dtype)
        return x

    def __call__(
        self, x: Tensor, past: Past | None = None, adapter: Role | None = None, *, last: int | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """x [S, H] -> logits [S, V] (of the `last` positions only, if given) and present keys and values [K, T, D].

        `adapter` that the checkpoint lacks counts as none.
        """
        x = x.to(self.weights.dtype)
        start = past[0][0].shape[1] if past else 0
        total = start + len(x)
        tables = self.rope(torch.arange(start, total), total)
        present = []
        for layer in range(self.config.num_layers):
            name = f"model.layers.{layer}."
            y = self.rms_norm(x, f"{name}input_layernorm")
            mixed, cached = self.attention(y, past[layer] if past else None, tables, adapter, f"{name}self_attn.")
            present.append(cached)
            x = x + mixed
            x = x + self.mlp(self.rms_norm(x, f"{name}post_attention_layernorm"), adapter, f"{name}mlp.")
        x = self.rms_norm(x if last is None else x[-last:], "model.norm")
        return functional.linear(x, self.weights(TABLE if self.config.tied_head else HEAD)), present

    def linear(self, x: Tensor, module: str, adapter: Role | None) -> Tensor:
        """`x @ W.T`, plus `scale * x @ A.T @ B.T` of the adapter in use."""
        y = functional.linear(x, self.weights(f"{module}.weight"))
        chosen = self.adapters.get(adapter) if adapter is not None else None
        pair = chosen.pairs.get(module) if chosen is not None else None
        if pair is None:
            return y
        return y + self.lora_scale(pair) * functional.linear(
            functional.linear(x, self.weights.of(pair.a)), self.weights.of(pair.b)
        )

    def lora_scale(self, pair: LoraPair) -> float:
        """alpha / r of this module."""
        return pair.scale

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last axis, computed in at least float32."""
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return self.weights(f"{name}.weight") * wide.to(x.dtype)

    def rope_factor(self, total: int) -> Sequence[float]:
        """Long factors when the total length exceeds the original context, for all new tokens of the call."""
        rope = self.config.rope
        return rope.long_factor if total > rope.original_max_positions else rope.short_factor

    def rope_scale(self) -> float:
        """What multiplies cosine and sine of both sets: sqrt(1 + ln(extension) / ln(original context))."""
        rope = self.config.rope
        extension = rope.max_positions / rope.original_max_positions
        return math.sqrt(1 + math.log(extension) / math.log(rope.original_max_positions)) if extension > 1 else 1.0

    def rope(self, positions: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine [S, rotary]; the angles are float32 products, as in the original."""
        dim = self.config.rope.rotary_dim
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        factor = torch.tensor(self.rope_factor(total), dtype=torch.float32)
        angle = positions.float()[:, None] * (1.0 / (factor * self.config.rope.theta**exponent))[None]
        angle = torch.cat((angle, angle), -1)
        scale = self.rope_scale()
        return (angle.cos() * scale).to(self.weights.dtype), (angle.sin() * scale).to(self.weights.dtype)

    def rotate(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate the first `rotary` dimensions of [heads, S, D] by halves; the rest passes unscaled."""
        cos, sin = tables
        dim = cos.shape[-1]
        turned, rest = x[..., :dim], x[..., dim:]
        crossed = torch.cat((-turned[..., dim // 2 :], turned[..., : dim // 2]), -1)
        return torch.cat((turned * cos + crossed * sin, rest), -1)

    def attention(
        self,
        x: Tensor,
        past: tuple[Tensor, Tensor] | None,
        tables: tuple[Tensor, Tensor],
        adapter: Role | None,
        name: str,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Causal grouped-query attention: [S, H] -> [S, H] and present (key, value) [K, T, D]."""
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        packed = self.linear(x, f"{name}qkv_proj", adapter).unflatten(-1, (-1, head_dim)).transpose(0, 1)
        q, k, v = packed.split((heads, kv_heads, kv_heads))
        q, k = self.rotate(q, tables), self.rotate(k, tables)
        if past is not None:
            k, v = torch.cat((past[0], k), 1), torch.cat((past[1], v), 1)
        mixed = torch.stack([self.head(q[head], k[self.kv_head(head)], v[self.kv_head(head)]) for head in range(heads)])
        return self.linear(mixed.transpose(0, 1).flatten(1), f"{name}o_proj", adapter), (k, v)

    def kv_head(self, head: int) -> int:
        """The key-value head that a query head reads."""
        return head // (self.config.num_heads // self.config.num_kv_heads)

    def head(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of one head: q [S, D], k and v [T, D] -> [S, D]."""
        new, total = len(q), len(k)
        step = max(1, SCORES_AT_ONCE // total)
        pieces = []
        for first in range(0, new, step):
            end = min(new, first + step)
            seen = total - new + end
            scores = q[first:end] @ k[:seen].T * self.config.head_dim**-0.5
            position = torch.arange(total - new + first, seen)
            future = torch.arange(seen)[None] > position[:, None]
            pieces.append(softmax(scores.masked_fill(future, -torch.inf)) @ v[:seen])
        return torch.cat(pieces)

    def mlp(self, x: Tensor, adapter: Role | None, name: str) -> Tensor:
        """SwiGLU: down(silu(gate) * up), gate the first half of the packed projection."""
        gate, up = self.halves(self.linear(x, f"{name}gate_up_proj", adapter))
        return self.linear(up * functional.silu(gate), f"{name}down_proj", adapter)

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gate and the up half of the last axis."""
        gate, up = x.chunk(2, -1)
        return gate, up
