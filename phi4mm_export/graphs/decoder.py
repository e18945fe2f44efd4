"""The text decoder: Phi-3 layers with grouped-query attention, LongRoPE and low-rank adapters.

B batch, S new tokens, P past tokens, T = P + S, H hidden size, V vocabulary, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from phi4mm_export.graphs import fused
from phi4mm_export.graphs.gates import AdapterChoice
from phi4mm_export.graphs.layers import ONNX_FLOAT, Affine, Linear, RmsNorm
from phi4mm_export.graphs.lora import AdaptedLinear, Gates, Split, overridable_inputs
from phi4mm_export.graphs.rope import RopeTables
from phi4mm_export.spec.contract import FloatType
from phi4mm_export.spec.model import ModelConfig, Role
from phi4mm_export.spec.recipe import LoraForm, WeightFormat

Ranks = Mapping[str, Mapping[Role, int]]
"""Rank of every adapter by module, e.g. {"model.layers.0.mlp.down_proj": {vision: 256}}."""
Pair = tuple[ir.Value, ir.Value]
LoraInputs = dict[str, Pair]


@dataclass(frozen=True)
class DecoderFormat:
    """How the decoder's weights are stored and its adapters carried."""

    base: WeightFormat
    head: WeightFormat
    lora: WeightFormat
    form: LoraForm
    compute: FloatType
    full_logits: bool


@dataclass(frozen=True)
class Step:
    """What every layer of one forward pass shares."""

    seqlens_k: ir.Value
    total_length: ir.Value
    rope: Pair
    gates: Gates | None


class Attention(nn.Module):
    """Grouped-query attention with packed q, k, v and rotary embedding.  [B, S, H] -> [B, S, H]."""

    def __init__(self, config: ModelConfig, module: str, ranks: Ranks, fmt: DecoderFormat) -> None:
        super().__init__()
        self.config = config
        width, d = config.num_heads * config.head_dim, config.head_dim
        kv = config.num_kv_heads * d
        self.qkv_proj = _adapted(
            config.hidden_size, config.qkv_size, f"{module}.qkv_proj", ranks, fmt,
            (Split("q_proj", width), Split("k_proj", kv), Split("v_proj", kv)),
        )  # fmt: skip
        self.o_proj = _adapted(
            width, config.hidden_size, f"{module}.o_proj", ranks, fmt, (Split("o_proj", config.hidden_size),)
        )

    def forward(self, op: OpBuilder, x: ir.Value, past: Pair, step: Step, lora: LoraInputs) -> tuple[ir.Value, Pair]:
        qkv = self.qkv_proj(op, x, step.gates, lora)
        out, key, value = fused.group_query_attention(
            op,
            qkv,
            past,
            step.seqlens_k,
            step.total_length,
            step.rope,
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
        )
        return self.o_proj(op, out, step.gates, lora), (key, value)


class FeedForward(nn.Module):
    """SwiGLU: down(up(x) * silu(gate(x))), gate and up packed in this order.  [B, S, H] -> [B, S, H]."""

    def __init__(self, config: ModelConfig, module: str, ranks: Ranks, fmt: DecoderFormat) -> None:
        super().__init__()
        h, f = config.hidden_size, config.intermediate_size
        self.gate_up_proj = _adapted(
            h, 2 * f, f"{module}.gate_up_proj", ranks, fmt, (Split("gate_proj", f), Split("up_proj", f))
        )
        self.down_proj = _adapted(f, h, f"{module}.down_proj", ranks, fmt, (Split("down_proj", h),))

    def forward(self, op: OpBuilder, x: ir.Value, step: Step, lora: LoraInputs) -> ir.Value:
        gate, up = op.Split(self.gate_up_proj(op, x, step.gates, lora), num_outputs=2, axis=-1, _outputs=["gate", "up"])
        return self.down_proj(op, op.Mul(up, op.Mul(gate, op.Sigmoid(gate))), step.gates, lora)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); the last sum is left to the next norm."""

    def __init__(self, config: ModelConfig, module: str, ranks: Ranks, fmt: DecoderFormat) -> None:
        super().__init__()
        self.module, self.config, self.fmt = module, config, fmt
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, fmt.compute)
        self.self_attn = Attention(config, f"{module}.self_attn", ranks, fmt)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, fmt.compute)
        self.mlp = FeedForward(config, f"{module}.mlp", ranks, fmt)

    def forward(
        self, op: OpBuilder, x: ir.Value, residual: ir.Value | None, past: Pair, step: Step
    ) -> tuple[ir.Value, ir.Value, Pair]:
        attn_lora, mlp_lora = self._lora_inputs(op)
        normed, residual = self.input_layernorm(op, x, residual)
        attended, present = self.self_attn(op, normed, past, step, attn_lora)
        normed, residual = self.post_attention_layernorm(op, attended, residual)
        return self.mlp(op, normed, step, mlp_lora), residual, present

    def _lora_inputs(self, op: OpBuilder) -> tuple[LoraInputs, LoraInputs]:
        """The overridable inputs of the adapters form, named as in Microsoft's package; empty in the other forms."""
        if self.fmt.form is not LoraForm.ADAPTERS:
            return {}, {}
        attn: LoraInputs = {}
        mlp: LoraInputs = {}
        for made, block, projections in (
            (attn, "attn", (self.self_attn.qkv_proj, self.self_attn.o_proj)),
            (mlp, "mlp", (self.mlp.gate_up_proj, self.mlp.down_proj)),
        ):
            for p in projections:
                made |= overridable_inputs(
                    op, f"{self.module}.{block}", p.base.in_features, p.overridable, self.fmt.compute
                )
        return attn, mlp


class Backbone(nn.Module):
    """The layers and the last norm, under the checkpoint's `model.` prefix."""

    def __init__(self, config: ModelConfig, ranks: Ranks, fmt: DecoderFormat) -> None:
        super().__init__()
        self.config, self.full_logits = config, fmt.full_logits
        self.layers = nn.ModuleList(
            [DecoderLayer(config, f"model.layers.{i}", ranks, fmt) for i in range(config.num_layers)]
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, fmt.compute)

    def forward(self, op: OpBuilder, x: ir.Value, past: list[Pair], step: Step) -> tuple[ir.Value, list[Pair]]:
        """Embeddings [B, S, H] -> hidden states [B, S, H] ([B, 1, H] unless full_logits), and the caches."""
        residual: ir.Value | None = None
        present: list[Pair] = []
        for layer, cache in zip(self.layers, past, strict=True):
            x, residual, made = layer(op, x, residual, cache, step)
            present.append(made)
        if not self.full_logits:
            x = last_real_position(op, x, step)
            residual = None if residual is None else last_real_position(op, residual, step)
        return self.norm(op, x, residual)[0], present


class Decoder(nn.Module):
    """inputs_embeds [B, S, H], attention_mask [B, T], caches -> logits [B, 1 or S, V], caches."""

    def __init__(self, config: ModelConfig, ranks: Ranks, fmt: DecoderFormat) -> None:
        super().__init__()
        self.config, self.fmt = config, fmt
        self.rope = RopeTables(config.rope, fmt.compute)
        self.model = Backbone(config, ranks, fmt)
        self.lm_head = Linear(Affine(config.hidden_size, config.vocab_size, fmt.head, fmt.compute))
        roles = sorted({role for module in ranks.values() for role in module})
        self.choice = AdapterChoice(roles, fmt.compute) if fmt.form is LoraForm.GATED and roles else None

    def forward(
        self,
        op: OpBuilder,
        inputs_embeds: ir.Value,
        attention_mask: ir.Value,
        past: list[Pair],
        input_ids: ir.Value | None = None,
        state: ir.Value | None = None,
    ) -> tuple[ir.Value, list[Pair], ir.Value | None]:
        total = op.Shape(attention_mask, start=1, end=2)
        seen = op.ReduceSum(attention_mask, [1], keepdims=0)
        gates, new_state = None, None
        if self.choice is not None:
            gates, new_state = self.choice(op, input_ids, state, total)
        step = Step(
            seqlens_k=op.Cast(op.Sub(seen, 1), to=int(ir.DataType.INT32)),
            total_length=op.Cast(op.Squeeze(total, [0]), to=int(ir.DataType.INT32)),
            rope=self.rope(op, total),
            gates=gates,
        )
        hidden, present = self.model(op, inputs_embeds, past, step)
        return self.lm_head(op, hidden), present, new_state


def last_real_position(op: OpBuilder, x: ir.Value, step: Step) -> ir.Value:
    """x [B, S, H] -> its row at the last real token of each batch row, [B, 1, H].

    With right padding that is seqlens_k - P = seqlens_k - (T - S), clamped into the new tokens.
    """
    new = op.Shape(x, start=1, end=2)
    past = op.Sub(op.Cast(op.Unsqueeze(step.total_length, [0]), to=int(ir.DataType.INT64)), new)
    last = op.Sub(op.Cast(step.seqlens_k, to=int(ir.DataType.INT64)), past)
    last = op.Max(op.Min(last, op.Sub(new, 1)), op.Sub(past, past))
    rows = op.GatherND(x, op.Unsqueeze(last, [1, 2]), batch_dims=1)
    batch, _, width = fused.dims_of(x)
    return fused.set_type(rows, fused.dtype_of(x), [batch, 1, width])


def _adapted(
    width_in: int, width_out: int, module: str, ranks: Ranks, fmt: DecoderFormat, splits: tuple[Split, ...]
) -> AdaptedLinear:
    inside = fmt.form in (LoraForm.GATED, LoraForm.BRANCH)
    return AdaptedLinear(
        Affine(width_in, width_out, fmt.base, fmt.compute),
        ranks=ranks.get(module, {}) if inside else {},
        fmt=fmt.lora,
        compute=fmt.compute,
        overridable=splits if fmt.form is LoraForm.ADAPTERS else (),
    )


def cache_inputs(op: OpBuilder, config: ModelConfig, compute: FloatType) -> list[Pair]:
    """past_key_values.N.key and .value, [B, kv, P, d], for every layer."""
    dims = ["batch_size", config.num_kv_heads, "past_sequence_length", config.head_dim]
    return [
        tuple(op.builder.input(f"past_key_values.{i}.{part}", ONNX_FLOAT[compute], dims) for part in ("key", "value"))
        for i in range(config.num_layers)
    ]
