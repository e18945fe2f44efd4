"""The readers give exactly what og's processor gives, under the names and types of the package's own graphs."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.media_files import clip, picture_bytes, sound_bytes, write_picture, write_sound

from phi4mm_export.errors import UsageError
from phi4mm_export.runtime.calibration import SpeechCalibrationReader, VisionCalibrationReader
from phi4mm_export.runtime.calibration_prompts import TextCalibrationReader
from phi4mm_export.runtime.calibration_samples import graph_inputs
from phi4mm_export.runtime.images import load_image
from phi4mm_export.runtime.package import open_package
from phi4mm_export.runtime.processor import open_processor

PROMPT = "<|user|>\n<|image_1|>\n<|end|>\n<|assistant|>\n"


def write_odd_pictures(folder: Path) -> Path:
    """What decoders disagree on: turned by EXIF, CMYK, transparent, palette, one bit, 16 bits."""
    folder.mkdir()
    image = Image.open(io.BytesIO(picture_bytes(800, 300)))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(folder / "phone.jpg", exif=exif)
    image.convert("CMYK").save(folder / "print.jpg")
    clear = image.convert("RGBA")
    clear.putalpha(0)
    clear.save(folder / "clear.png")
    image.convert("P").save(folder / "palette.png")
    image.convert("1").save(folder / "fax.png")
    deep = np.asarray(image)[..., 0].astype(np.uint16) * 257
    Image.fromarray(deep).save(folder / "scan16.png")
    return folder


def write_undecodable(folder: Path) -> Path:
    """Three files that no decoder may see, among five that are fine."""
    folder.mkdir()
    image = Image.open(io.BytesIO(picture_bytes(300, 200)))
    for ending in ("webp", "gif", "bmp", "tiff"):
        image.save(folder / f"picture.{ending}")
    image.save(folder / "whole.jpg")
    (folder / "half.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:1500])
    (folder / "notes.jpg").write_text("this is not a picture\n", encoding="utf-8")
    (folder / "zero.png").write_bytes(b"")
    return folder


def test_pictures_are_fed_as_the_runtime_will_feed_them(gated_package: Path, tmp_path: Path) -> None:
    folder = write_odd_pictures(tmp_path / "pages")
    reader = VisionCalibrationReader(gated_package, folder)
    processor = open_processor(open_package(gated_package))
    for index, name in enumerate(["clear.png", "fax.png", "palette.png", "phone.jpg", "print.jpg", "scan16.png"]):
        expected = processor(PROMPT, [load_image(folder / name)]).arrays
        sample = reader.sample(index)
        assert list(sample) == ["pixel_values", "image_attention_mask", "image_sizes"]
        for key, value in sample.items():
            np.testing.assert_array_equal(value, expected[key])


def test_a_phone_photo_is_upright(gated_package: Path, tmp_path: Path) -> None:
    reader = VisionCalibrationReader(gated_package, write_odd_pictures(tmp_path / "pages"))
    sizes = {name.rpartition("/")[2]: reader.sample(i)["image_sizes"][0] for i, name in enumerate(reader.names)}
    assert sizes["phone.jpg"][0] > sizes["phone.jpg"][1]
    assert sizes["print.jpg"][0] < sizes["print.jpg"][1]


def test_pictures_that_would_end_the_process_are_all_named_at_once(gated_package: Path, tmp_path: Path) -> None:
    folder = write_undecodable(tmp_path / "pages")
    with pytest.raises(UsageError) as caught:
        VisionCalibrationReader(gated_package, folder)
    assert caught.value.what.startswith("3 files cannot be used")
    for name in ("half.jpg", "notes.jpg", "zero.png"):
        assert name in caught.value.what


def test_they_can_be_left_out_and_the_rest_is_converted(gated_package: Path, tmp_path: Path) -> None:
    reader = VisionCalibrationReader(gated_package, write_undecodable(tmp_path / "pages"), skip_unreadable=True)
    assert len(reader) == 5
    assert [fault.where.rpartition("/")[2] for fault in reader.unreadable] == ["half.jpg", "notes.jpg", "zero.png"]


def test_an_archive_gives_what_the_folder_gives(gated_package: Path, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    names = [write_picture(tmp_path / "pages", f"{n}.png", 100 + n).name for n in range(2)]
    with zipfile.ZipFile(tmp_path / "pages.zip", "w") as archive:
        for name in names:
            archive.write(tmp_path / "pages" / name, name)
    folder, packed = (VisionCalibrationReader(gated_package, tmp_path / n) for n in ("pages", "pages.zip"))
    assert folder.digests == packed.digests


def test_the_samples_have_the_element_types_of_the_graph(cuda_package: Path, tmp_path: Path) -> None:
    write_picture(tmp_path)
    sample = VisionCalibrationReader(cuda_package, tmp_path).sample(0)
    assert sample["pixel_values"].dtype == np.float16
    assert sample["image_sizes"].dtype == np.int64


def test_clips_are_taken_for_both_projections_whatever_the_order_of_the_files(
    gated_package: Path, tmp_path: Path
) -> None:
    for number in range(4):
        (tmp_path / f"{number}.wav").write_bytes(sound_bytes(0.5, seed=number))
    forwards = SpeechCalibrationReader(gated_package, tmp_path)
    modes = [int(forwards.sample(i)["audio_projection_mode"][0]) for i in range(4)]
    for number in range(4):
        (tmp_path / f"{number}.wav").rename(tmp_path / f"new-{9 - number}.wav")
    backwards = SpeechCalibrationReader(gated_package, tmp_path)
    assert sorted(modes) == [2, 2, 3, 3]
    assert sorted(forwards.digests) == sorted(backwards.digests)


def test_a_single_clip_is_taken_for_both_projections(gated_package: Path, tmp_path: Path) -> None:
    write_sound(tmp_path)
    reader = SpeechCalibrationReader(gated_package, tmp_path)
    assert [int(reader.sample(i)["audio_projection_mode"][0]) for i in range(len(reader))] == [2, 3]
    assert reader.sample(0)["audio_sizes"].tolist() == [-(-((clip(0.6).num_samples - 400) // 160 + 1) // 8)]


def test_prompts_become_everything_the_decoder_is_fed(gated_package: Path, tmp_path: Path) -> None:
    source, spool = tmp_path / "prompts", tmp_path / "spool"
    source.mkdir()
    spool.mkdir()
    write_picture(source, "a.png", 200, 200)
    (source / "a.txt").write_text("Which city is named?", encoding="utf-8")
    (source / "b.txt").write_text("Count to three.", encoding="utf-8")
    write_sound(source, "c.wav", 0.5)
    reader = TextCalibrationReader(gated_package, source, spool)
    inputs = graph_inputs(open_package(gated_package).path / "phi-4-mm-text.onnx")
    assert reader.modes == {"text": 1, "image": 1, "audio": 1, "both": 0}
    for index in range(3):
        sample = reader.sample(index)
        assert {name: value.dtype for name, value in sample.items()} == {n: i.dtype for n, i in inputs.items()}
        length = sample["input_ids"].shape[1]
        assert sample["inputs_embeds"].shape[:2] == (1, length)
        assert sample["attention_mask"].tolist() == [[1] * length]
        assert sample["past_key_values.0.key"].shape[2] == 0
    assert (reader.sample(0)["input_ids"] == 200010).sum() > 200
    assert (reader.sample(2)["input_ids"] == 200011).sum() > 0


def test_prompts_of_a_jsonl_file_name_their_media_relative_to_it(gated_package: Path, tmp_path: Path) -> None:
    write_picture(tmp_path, "page.png", 200, 200)
    lines = [
        '{"prompt": "Add 1 and 2."}',
        "",
        '{"prompt": "What is it?", "images": ["page.png"], "system": "Be brief."}',
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "spool").mkdir()
    reader = TextCalibrationReader(gated_package, tmp_path / "prompts.jsonl", tmp_path / "spool")
    assert reader.modes == {"text": 1, "image": 1, "audio": 0, "both": 0}
    assert reader.names[1].endswith("prompts.jsonl, line 3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "images": ["gone.png"]}', "line 1: the file gone.png does not exist"),
        ('{"promt": "x"}', "line 1: found 'promt'"),
        ('{"prompt": 3}', "line 1: found 'prompt' with 3"),
        ("not json", "line 1: not valid JSON"),
        ('{"prompt": "<|endoftext10|>"}', "stands for feature rows"),
        ('{"prompt": " "}', "the prompt is empty"),
    ],
)
def test_a_prompt_line_that_cannot_be_used_is_named(
    gated_package: Path, tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        TextCalibrationReader(gated_package, tmp_path / "prompts.jsonl", tmp_path)
    assert message in str(caught.value)


def test_nothing_is_read_from_a_graph_before_every_file_was_looked_at(gated_package: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(gated_package, package)
    (package / "phi-4-mm-embedding.onnx.data").unlink(missing_ok=True)
    (package / "phi-4-mm-text.onnx.data").unlink()
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "a.txt").write_text("Fine.", encoding="utf-8")
    (tmp_path / "prompts" / "b.png").write_bytes(b"not a picture")
    with pytest.raises(UsageError, match="not a PNG"):
        TextCalibrationReader(package, tmp_path / "prompts", tmp_path)
