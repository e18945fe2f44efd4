"""The real model's sizes, from its published configuration; LongRoPE's factors are stand-ins (1 and 2)."""

from __future__ import annotations

from phi4mm_export.spec.model import AudioDims, Layout, LongRope, ModelConfig, Role, VisionDims

REAL = ModelConfig(
    layout=Layout.ORIGINAL,
    hidden_size=3072,
    intermediate_size=8192,
    num_layers=32,
    num_heads=24,
    num_kv_heads=8,
    vocab_size=200064,
    rms_norm_eps=1e-5,
    tied_head=True,
    rope=LongRope(10000.0, 96, (1.0,) * 48, (2.0,) * 48, 131072, 4096),
    vision=VisionDims(hidden_size=1152, intermediate_size=4304, num_layers=27),
    audio=AudioDims(
        hidden_size=1024, num_heads=16, linear_units=1536, num_blocks=24, kernel_size=3, conv_channels=1024,
        bias_max_distance=500,
    ),
    lora={Role.VISION: (256, 512.0), Role.SPEECH: (320, 640.0)},
)  # fmt: skip
