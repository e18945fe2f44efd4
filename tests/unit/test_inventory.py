"""The expected tensors, against the published figures of the real checkpoint."""

from __future__ import annotations

import math

from support import checkpoints as ck
from support.real_model import REAL

from phi4mm_export.spec.inventory import (
    adapted_shapes,
    expected_tensors,
    optional_tensors,
    stored_inventory,
)
from phi4mm_export.spec.model import AudioDims, Layout, ModelConfig, VisionDims

# Tensors and values of the real checkpoint, as its published headers count them.
PARTS = {
    "model.embed_tokens.": (1, 614_596_608),
    "model.embed_tokens_extend.image_embed.img_processor.": (448, 428_565_440),
    "model.embed_tokens_extend.audio_embed.encoder.": (879, 441_238_304),
    "model.embed_tokens_extend.audio_embed.audio_projection.": (8, 25_178_112),
}


def test_the_real_checkpoint_has_2047_tensors_and_5_574_460_384_values() -> None:
    stored = stored_inventory(REAL)
    assert len(stored) == 2047
    assert sum(math.prod(shape) for shape in stored.values()) == 5_574_460_384


def test_every_part_of_the_real_checkpoint_has_its_published_size() -> None:
    stored = stored_inventory(REAL)
    for prefix, figures in PARTS.items():
        part = [math.prod(shape) for name, shape in stored.items() if name.startswith(prefix)]
        assert (len(part), sum(part)) == figures, prefix
    for role, values in (("vision", 369_098_752), ("speech", 461_373_440)):
        part = [math.prod(shape) for name, shape in stored.items() if f".{role}.weight" in name and ".lora_" in name]
        assert (len(part), sum(part)) == (256, values)


def test_adapters_stand_beside_their_projection_in_the_stored_order() -> None:
    names = list(stored_inventory(REAL))
    first = names.index("model.layers.0.self_attn.qkv_proj.base_layer.weight")
    assert [name.rsplit("qkv_proj.")[1] for name in names[first : first + 5]] == [
        "base_layer.weight",
        "lora_A.vision.weight",
        "lora_B.vision.weight",
        "lora_A.speech.weight",
        "lora_B.speech.weight",
    ]


def test_a_hand_written_checkpoint_has_exactly_the_expected_tensors() -> None:
    config = ModelConfig(
        layout=Layout.ORIGINAL,
        hidden_size=ck.WIDTH,
        intermediate_size=ck.MLP,
        num_layers=ck.LAYERS,
        num_heads=1,
        num_kv_heads=1,
        vocab_size=ck.VOCAB,
        rms_norm_eps=1e-5,
        tied_head=True,
        rope=REAL.rope,
        vision=VisionDims(ck.VISION_WIDTH, ck.VISION_MLP, ck.VISION_LAYERS),
        audio=AudioDims(
            ck.AUDIO_WIDTH, ck.AUDIO_HEADS, ck.AUDIO_UNITS, ck.AUDIO_BLOCKS, ck.KERNEL, ck.CHANNELS, ck.DISTANCE
        ),
    )
    stored = {name: tensor.shape for name, tensor in ck.original(adapters=False).tensors.items()}
    expected = expected_tensors(config)
    assert {name: shape for name, shape in expected.items() if name != "lm_head.weight"} == stored


def test_only_what_is_never_run_and_a_tied_head_may_be_left_out() -> None:
    optional = optional_tensors(REAL)
    tower = "model.embed_tokens_extend.image_embed.img_processor."
    assert "lm_head.weight" in optional
    assert f"{tower}encoder.layers.26.mlp.fc1.weight" in optional
    assert f"{tower}encoder.layers.25.mlp.fc1.weight" not in optional
    assert f"{tower}post_layernorm.weight" in optional
    assert f"{tower}head.probe" in optional
    assert len(optional) == 1 + 16 + 2 + 11


def test_packed_projections_carry_adapters_with_their_own_shapes() -> None:
    shapes = adapted_shapes(REAL)
    assert len(shapes) == 4 * 32
    assert shapes["model.layers.31.self_attn.qkv_proj"] == (5120, 3072)
    assert shapes["model.layers.0.mlp.down_proj"] == (3072, 8192)
