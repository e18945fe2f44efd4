"""A decoder that picks its own adapter, as the original's InputMode does.

The runtime feeds the token ids of each call and carries a small state (runtime contract of og 0.14.1 and later):
an image placeholder in the prompt selects the vision adapter, else an audio placeholder the speech adapter, else
none; the choice is remembered for the steps that follow and forgotten when a prompt starts from an empty cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from phi4mm_export.graphs import fused
from phi4mm_export.graphs.layers import ONNX_FLOAT
from phi4mm_export.graphs.lora import Gate
from phi4mm_export.spec.contract import FloatType
from phi4mm_export.spec.model import AUDIO_TOKEN_ID, IMAGE_TOKEN_ID, Role


class AdapterChoice(nn.Module):
    """input_ids int64 [B, S], state [B, 1, 2] (image seen, audio seen) -> gates and the new state."""

    def __init__(self, roles: Sequence[Role], compute: FloatType) -> None:
        super().__init__()
        self.roles, self.compute = tuple(roles), ONNX_FLOAT[compute]

    def forward(
        self, op: OpBuilder, input_ids: ir.Value, state: ir.Value, total_length: ir.Value
    ) -> tuple[dict[Role, Gate], ir.Value]:
        """total_length int64 [1]: T. The state counts only when there is a past (T > S)."""
        number = int(self.compute)
        has_past = op.Cast(op.Greater(total_length, op.Shape(input_ids, start=1, end=2)), to=number)
        seen_now = op.Concat(*(self._any(op, input_ids, token) for token in (IMAGE_TOKEN_ID, AUDIO_TOKEN_ID)), axis=-1)
        new_state = op.Max(op.Mul(state, has_past), op.Unsqueeze(seen_now, [1]))
        image, audio = op.Split(new_state, num_outputs=2, axis=-1, _outputs=["image_seen", "audio_seen"])
        rows = {Role.VISION: image, Role.SPEECH: op.Mul(audio, op.Sub(1.0, image))}
        return {role: self._gate(op, rows[role]) for role in self.roles}, new_state

    def _any(self, op: OpBuilder, input_ids: ir.Value, token: int) -> ir.Value:
        """1 where a row holds the token, [B, 1]."""
        hits = op.Cast(op.Equal(input_ids, token), to=int(ir.DataType.INT32))
        return op.Cast(op.ReduceMax(hits, [1], keepdims=1), to=int(self.compute))

    def _gate(self, op: OpBuilder, rows: ir.Value) -> Gate:
        return Gate(rows, op.Greater(op.ReduceMax(rows, keepdims=0), 0.0))


def state_names(present: bool) -> tuple[str, str]:
    """The recurrent state of layer 0, as og derives it from past_key_names: [B, 1, 2] and an unused [B, 1, 1, 1]."""
    side = "present" if present else "past_key_values"
    return f"{side}.0.conv_state", f"{side}.0.recurrent_state"


def pass_through(op: OpBuilder, value: ir.Value) -> ir.Value:
    """The second state, which the runtime wants and nothing uses, handed on unchanged."""
    return fused.set_type(op.Identity(value), fused.dtype_of(value), fused.dims_of(value))
