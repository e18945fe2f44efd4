"""What the user leaves out follows from what they chose."""

from __future__ import annotations

import pytest

from phi4mm_export.errors import UsageError
from phi4mm_export.spec.contract import Component, FloatType, PackageLayout, Provider
from phi4mm_export.spec.recipe import Blockwise, Dense, LoraForm, Precision, Recipe


def test_cpu_computes_in_float32_and_cuda_in_float16() -> None:
    assert Recipe.resolve(provider=Provider.CPU).float_type is FloatType.FLOAT32
    assert Recipe.resolve(provider=Provider.CUDA).float_type is FloatType.FLOAT16


def test_encoders_and_table_take_the_float_type_of_the_provider() -> None:
    recipe = Recipe.resolve(provider=Provider.CUDA)
    assert (recipe.encoder_precision, recipe.embedding_precision) == (Precision.FP16, Precision.FP16)


def test_a_float_decoder_sets_the_float_type_of_the_package() -> None:
    assert Recipe.resolve(precision=Precision.FP16).float_type is FloatType.FLOAT16


@pytest.mark.parametrize(("precision", "block"), [(Precision.INT8, 128), (Precision.INT4, 32)])
def test_the_default_block_follows_the_precision(precision: Precision, block: int) -> None:
    assert Recipe.resolve(precision=precision).block_size == block


def test_cpu_takes_accuracy_level_4_and_cuda_the_operator_default() -> None:
    assert Recipe.resolve().accuracy_level == 4
    assert Recipe.resolve(provider=Provider.CUDA).accuracy_level == 0
    assert Recipe.resolve(accuracy_level=0).accuracy_level == 0


def test_adapters_are_stored_as_the_decoder_unless_said_otherwise() -> None:
    assert Recipe.resolve(precision=Precision.INT4).lora_precision is Precision.INT4
    assert Recipe.resolve(lora_precision=Precision.FP32).lora_format == Dense(FloatType.FLOAT32)


def test_adapter_files_are_float_whatever_the_decoder_is() -> None:
    assert Recipe.resolve(lora=LoraForm.ADAPTERS).lora_precision is Precision.FP32


@pytest.mark.parametrize(
    ("width", "block"), [(3072, 128), (320, 64), (256, 128), (4304, 128), (48, 64), (20, 32), (16, 16), (1152, 128)]
)
def test_a_block_divides_the_row_where_one_of_at_least_32_does_and_never_doubles_it(width: int, block: int) -> None:
    assert Blockwise(8, 128).block_for(width) == block


@pytest.mark.parametrize(
    ("choice", "flag"),
    [
        ({"provider": Provider.CUDA, "precision": Precision.FP32}, "--precision fp32 --ep cuda"),
        ({"encoder_precision": Precision.INT4}, "--encoder-precision"),
        ({"block_size": 48}, "--block-size"),
        ({"accuracy_level": 5}, "--accuracy-level"),
        ({"precision": Precision.FP16, "rotate": True}, "--rotate"),
        ({"lora": LoraForm.ADAPTERS, "lora_precision": Precision.INT8}, "--lora-precision"),
    ],
)
def test_what_no_runtime_can_serve_is_refused_by_its_flag(choice: dict[str, object], flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        Recipe.resolve(**choice)  # type: ignore[arg-type]  # one wrong value at a time
    assert flag in str(caught.value)


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        ({}, True),
        ({"embedding_precision": Precision.FP32}, False),
        ({"layout": PackageLayout.NESTED}, False),
        ({"components": (Component.EMBEDDING,)}, False),
    ],
)
def test_head_and_table_can_be_one_only_when_stored_alike_in_one_folder(
    change: dict[str, object], shared: bool
) -> None:
    base: dict[str, object] = {"precision": Precision.INT8, "embedding_precision": Precision.INT8}
    assert Recipe.resolve(**{**base, **change}).shares_table is shared  # type: ignore[arg-type]


def test_layers_are_rotated_where_the_kernels_round_their_inputs() -> None:
    assert Recipe.resolve().rotate
    assert Recipe.resolve(precision=Precision.INT4).rotate
    assert not Recipe.resolve(accuracy_level=0).rotate
    assert not Recipe.resolve(provider=Provider.CUDA).rotate
    assert not Recipe.resolve(precision=Precision.FP32).rotate
    assert Recipe.resolve(provider=Provider.CUDA, rotate=True).rotate
