"""How many layers the SigLIP tower of the original layout has, at the real width, where no key states it."""

from __future__ import annotations

import pytest

from phi4mm_export.errors import CheckpointError
from phi4mm_export.spec.config_dims import Dimensions, vision_dims
from phi4mm_export.spec.json_fields import Fields
from phi4mm_export.spec.model import Layout
from phi4mm_export.spec.names import IMAGE

TOWER = IMAGE + "img_processor."


def _depth(stored: int, *, whole: bool) -> int:
    """The depth read from a tower of which that many layers are stored; `whole` with its post_layernorm."""
    shapes: dict[str, tuple[int, ...]] = {TOWER + "embeddings.patch_embedding.weight": (1152, 3, 14, 14)}
    for layer in range(stored):
        shapes[f"{TOWER}encoder.layers.{layer}.mlp.fc1.weight"] = (4304, 1152)
    if whole:
        shapes[TOWER + "post_layernorm.weight"] = (1152,)
    return vision_dims(Dimensions(Fields({}, "config.json"), Layout.ORIGINAL, shapes)).num_layers


@pytest.mark.parametrize("stored", [2, 3, 25, 27, 28])
def test_the_layers_of_a_whole_tower_count(stored: int) -> None:
    assert _depth(stored, whole=True) == stored


@pytest.mark.parametrize("whole", [True, False])
def test_a_real_tower_without_its_unused_last_layer_keeps_its_depth(whole: bool) -> None:
    assert _depth(26, whole=whole) == 27


def test_a_real_tower_without_its_head_has_every_layer() -> None:
    assert _depth(27, whole=False) == 27


@pytest.mark.parametrize("stored", [3, 25, 28])
def test_another_depth_without_a_head_is_refused_instead_of_guessed(stored: int) -> None:
    with pytest.raises(CheckpointError, match=rf"num_hidden_layers is 27, but {stored} layers are stored"):
        _depth(stored, whole=False)
