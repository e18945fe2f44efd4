"""The embedding graph: rows of the token table, with image and audio features put where their placeholders stand.

B batch, S tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from phi4mm_export.graphs import fused
from phi4mm_export.graphs.layers import ONNX_FLOAT, Placement, WeightParameter, cast, code_parameters
from phi4mm_export.spec.contract import FloatType
from phi4mm_export.spec.model import AUDIO_TOKEN_ID, IMAGE_TOKEN_ID, ModelConfig
from phi4mm_export.spec.recipe import Blockwise, WeightFormat

FIRST_LEGACY_IMAGE_ID = -9999
"""The original also accepts -9999 .. -1 as image placeholders and anything below as audio ones."""


class TokenTable(nn.Module):
    """ids int64 [B, S] -> rows [B, S, H]."""

    def __init__(self, config: ModelConfig, fmt: WeightFormat, compute: FloatType) -> None:
        super().__init__("model.embed_tokens")
        self.width, self.fmt, self.compute = config.hidden_size, fmt, ONNX_FLOAT[compute]
        if isinstance(fmt, Blockwise):
            made = code_parameters(config.vocab_size, self.width, fmt, self.compute, flat=True)
            self.qweight, self.scales = made["qweight"], made["scales"]
        else:
            shape = [config.vocab_size, self.width]
            self.weight = WeightParameter(shape, ONNX_FLOAT[fmt.storage], Placement.AS_STORED)

    def forward(self, op: OpBuilder, ids: ir.Value) -> ir.Value:
        if isinstance(self.fmt, Blockwise):
            block = self.fmt.block_for(self.width)
            return fused.gather_block_quantized(
                op, self.qweight, ids, self.scales, bits=self.fmt.bits, block_size=block, width=self.width
            )
        return cast(op, op.Gather(self.weight, ids, axis=0), self.compute)


class Embedding(nn.Module):
    """input_ids [B, S], image_features [*, H], audio_features [*, H] -> inputs_embeds [B, S, H]."""

    def __init__(self, config: ModelConfig, fmt: WeightFormat, compute: FloatType) -> None:
        super().__init__()
        self.width = config.hidden_size
        self.table = TokenTable(config, fmt, compute)

    def forward(self, op: OpBuilder, input_ids: ir.Value, images: ir.Value, audios: ir.Value) -> ir.Value:
        legacy_image = op.And(op.GreaterOrEqual(input_ids, FIRST_LEGACY_IMAGE_ID), op.Less(input_ids, 0))
        ids = op.Where(legacy_image, IMAGE_TOKEN_ID, input_ids)
        ids = op.Where(op.Less(ids, FIRST_LEGACY_IMAGE_ID), AUDIO_TOKEN_ID, ids)
        rows = op.Reshape(self.table(op, ids), [-1, self.width])
        for token, features in ((IMAGE_TOKEN_ID, images), (AUDIO_TOKEN_ID, audios)):
            at = op.Transpose(op.NonZero(op.Equal(op.Reshape(ids, [-1]), token)), perm=[1, 0])
            rows = op.ScatterND(rows, at, features)
        return op.Reshape(rows, op.Concat(op.Shape(input_ids), [self.width], axis=0))
