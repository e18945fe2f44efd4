"""Configuration files as onnxruntime-genai reads them: stub graphs, real config, processors and tokenizer."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import stub_graphs
from support.json_checkpoint import SPECIAL, byte_letters, edit, write_checkpoint
from support.stub_graphs import NESTED

from phi4mm_export.package.configs import ConfigOptions, package_configs
from phi4mm_export.pipeline.config import config, read_model_config
from phi4mm_export.runtime.ort import import_genai
from phi4mm_export.spec.contract import PackageLayout

pytest.importorskip("onnxruntime_genai", reason="needs the extra cpu")
PROMPT = "<|user|>What's é?<|end|><|assistant|>"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


def packaged(checkpoint: Path, folder: Path, options: ConfigOptions | None = None) -> Path:
    """A package of stub graphs with every other file from the checkpoint."""
    stub_graphs.four_graphs(folder)
    options = options or ConfigOptions(layout=PackageLayout.NESTED)
    files = package_configs(checkpoint, read_model_config(checkpoint), options).files
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def expected_ids(text: str) -> list[int]:
    """Ids of a byte-level BPE without merges, from its definition."""
    letters = byte_letters()
    shifted = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = shifted + [byte for byte in range(256) if byte not in shifted]
    place = {byte: number for number, byte in enumerate(order)}
    assert len(letters) == len(place) == 256
    ids: list[int] = []
    while text:
        token = next((token for token in SPECIAL if text.startswith(token)), None)
        if token is not None:
            ids.append(SPECIAL[token])
            text = text.removeprefix(token)
        else:
            ids += [place[byte] for byte in text[0].encode("utf-8")]
            text = text[1:]
    return ids


def generate(package: Path, steps: int = 3) -> list[int]:
    """The ids of PROMPT and what og continues it with, greedily."""
    og = import_genai()
    model = og.Model(str(package))
    processor = model.create_multimodal_processor()
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=128)
    generator = og.Generator(model, parameters)
    generator.set_inputs(processor(PROMPT))
    for _ in range(steps):
        generator.generate_next_token()
    return [int(number) for number in generator.get_sequence(0)]


def test_a_package_of_our_files_generates_text(checkpoint: Path, tmp_path: Path) -> None:
    ids = generate(packaged(checkpoint, tmp_path / "package"))
    assert ids[:-3] == expected_ids(PROMPT)
    assert len(set(ids[-3:])) == 1


def test_a_gated_decoder_runs_with_the_same_config(checkpoint: Path, tmp_path: Path) -> None:
    package = packaged(checkpoint, tmp_path / "package")
    plain = generate(package)
    stub_graphs.decoder(package / NESTED["decoder"], gated=True)
    config(checkpoint, package)
    assert generate(package) == plain


def test_renamed_tensors_run_through_the_mapped_config(checkpoint: Path, tmp_path: Path) -> None:
    package = packaged(checkpoint, tmp_path / "package")
    plain = generate(package)
    stub_graphs.decoder(
        package / NESTED["decoder"],
        names={
            "inputs_embeds": "x",
            "attention_mask": "the_mask",
            "logits": "scores",
            "past_key_values.%d.key": "cache.k.%d",
            "past_key_values.%d.value": "cache.v.%d",
            "present.%d.key": "new.k.%d",
            "present.%d.value": "new.v.%d",
        },
    )
    stub_graphs.embedding(
        package / NESTED["embedding"],
        names={"image_features": "visual", "audio_features": "speech", "inputs_embeds": "e"},
    )
    stub_graphs.vision(package / NESTED["vision"], names={"pixel_values": "pixels", "image_features": "f"})
    stub_graphs.speech(package / NESTED["speech"], names={"audio_embeds": "mel", "audio_sizes": "lens"})
    config(checkpoint, package)
    assert generate(package) == plain


@pytest.mark.parametrize("stated", ["AutoTokenizer", None], ids=str)
def test_a_corrected_tokenizer_class_keeps_ids_and_chat_template(
    checkpoint: Path, tmp_path: Path, stated: str | None
) -> None:
    def change(settings: dict[str, Any]) -> None:
        settings["tokenizer_class"] = stated
        settings["chat_template"] = [{"name": "default", "template": settings["chat_template"]}]
        if stated is None:
            del settings["tokenizer_class"]

    edit(checkpoint / "tokenizer_config.json", change)
    og = import_genai()
    tokenizer = og.Tokenizer(og.Model(str(packaged(checkpoint, tmp_path / "package"))))
    for text in (PROMPT, "a  b\n\n" + "".join(SPECIAL) + " z", "中文 \N{GRINNING FACE}"):
        assert tokenizer.encode(text).tolist() == expected_ids(text)
    messages = json.dumps([{"role": "user", "content": "hi"}])
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == "<|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize(("original_limit", "frames"), [(False, 3098), (True, 2998)])
def test_a_clip_of_31_seconds_is_whole_unless_the_original_limit_is_restored(
    checkpoint: Path, tmp_path: Path, original_limit: bool, frames: int
) -> None:
    package = packaged(checkpoint, tmp_path / "package")
    config(checkpoint, package, original_audio_limit=original_limit)
    path = tmp_path / "clip.wav"
    noise = np.random.default_rng(0).integers(-3000, 3000, 16000 * 31, dtype=np.int16)
    with wave.open(str(path), "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(16000)
        clip.writeframes(noise.tobytes())
    og = import_genai()
    processor = og.Model(str(package)).create_multimodal_processor()
    inputs = processor("<|user|><|audio_1|><|end|>", audios=og.Audios.open(str(path)))
    assert inputs["audio_embeds"].as_numpy().shape == (1, frames, 80)
    assert inputs["audio_sizes"].as_numpy().tolist() == [-(-frames // 8)]


@pytest.mark.parametrize(("most", "crops"), [(36, 16), (12, 7)])
def test_the_crops_of_a_large_picture_follow_the_checkpoint(
    checkpoint: Path, tmp_path: Path, most: int, crops: int
) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs the extra media")
    edit(checkpoint / "preprocessor_config.json", lambda body: body.update(dynamic_hd=most))
    package = packaged(checkpoint, tmp_path / "package")
    path = tmp_path / "picture.png"
    image.new("RGB", (1900, 1200), (10, 20, 200)).save(path)
    og = import_genai()
    processor = og.Model(str(package)).create_multimodal_processor()
    inputs = processor("<|user|><|image_1|><|end|>", images=og.Images.open(str(path)))
    assert inputs["pixel_values"].as_numpy().shape == (1, crops, 3, 448, 448)
