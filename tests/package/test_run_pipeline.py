"""`run` as a Python function: what it returns, what it refuses, and that it leaves the process as it was."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime_genai as og
import pytest
from support.media_files import write_picture, write_sound

from phi4mm_export.errors import PackageError, Phi4mmError, SystemLimitError, UsageError
from phi4mm_export.pipeline.run import RunResult, run


@pytest.fixture
def copied(gated_package: Path, tmp_path: Path) -> Path:
    """A copy of the package under an awkward name. No hard links: the package is shared with other tests."""
    folder = tmp_path / "copy of the paquet é #1"
    shutil.copytree(gated_package, folder)
    return folder


def edit_config(package: Path, change: Callable[[Any], None]) -> None:
    file = package / "genai_config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def test_the_result_holds_what_was_streamed_and_the_figures(gated_package: Path, tmp_path: Path) -> None:
    pieces: list[str] = []
    result = run(
        str(gated_package),
        prompt="What?",
        images=[write_picture(tmp_path)],
        audios=[str(write_sound(tmp_path))],
        max_new_tokens=6,
        on_text=pieces.append,
    )
    assert "".join(pieces) == result.text != ""
    assert (result.new_tokens, result.finish_reason, result.device) == (6, "length", "cpu")
    assert result.prompt == "<|user|><|image_1|><|audio_1|>What?<|end|><|assistant|>"
    assert result.prompt_tokens > 300
    assert result.tokens_per_second > 0
    assert result.notes == ()


def test_generation_ends_on_any_end_token_and_does_not_show_it(copied: Path) -> None:
    first = run(copied, prompt="Hi", max_new_tokens=4)
    edit_config(copied, lambda c: c["model"].update(eos_token_id=[200020, first.token_ids[2]]))
    second = run(copied, prompt="Hi", max_new_tokens=4)
    assert second.finish_reason == "stop"
    assert second.token_ids == first.token_ids[: first.token_ids.index(first.token_ids[2]) + 1]
    assert first.text.startswith(second.text)
    assert len(second.text) < len(first.text)


def test_a_hard_linked_package_under_an_awkward_name_runs_as_the_plain_one(copied: Path, gated_package: Path) -> None:
    assert run(copied, prompt="Hi", max_new_tokens=3).text == run(gated_package, prompt="Hi", max_new_tokens=3).text


def test_markers_choose_the_files_by_number(gated_package: Path, tmp_path: Path) -> None:
    wide, tall = write_picture(tmp_path, "wide.png", 700, 200), write_picture(tmp_path, "tall.png", 200, 700)
    first = run(gated_package, prompt="<|image_2|><|image_1|>?", images=[wide, tall], max_new_tokens=4)
    second = run(gated_package, prompt="<|image_1|><|image_2|>?", images=[tall, wide], max_new_tokens=4)
    assert first.token_ids == second.token_ids


def test_a_library_call_leaves_the_process_as_it_was(
    gated_package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = (list(logging.getLogger().handlers), list(warnings.filters), Path.cwd())
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(run(gated_package, prompt="Hi", max_new_tokens=3)))
    thread.start()
    thread.join()
    again = run(str(gated_package), prompt="Hi", max_new_tokens=3)
    assert results[0].token_ids == again.token_ids
    assert (list(logging.getLogger().handlers), list(warnings.filters), Path.cwd()) == before
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_all_unusable_media_files_are_named_at_once(gated_package: Path, tmp_path: Path) -> None:
    (tmp_path / "half.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(UsageError, match="3 files cannot be used") as caught:
        run(
            gated_package,
            prompt="What?",
            images=[tmp_path / "half.jpg", write_picture(tmp_path), tmp_path / "gone.png"],
            audios=[write_sound(tmp_path, "blip.wav", 0.01)],
        )
    for name in ("half.jpg", "gone.png", "blip.wav"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"prompt": " "}, UsageError, "the prompt is empty"),
        ({"prompt": "<|image_1|>"}, UsageError, "found <|image_1|>"),
        ({"prompt": "a b c d e", "max_length": 5}, UsageError, "expected fewer than 5"),
        ({"prompt": "a", "max_length": 1_000_000}, UsageError, "found 1,000,000"),
        ({"prompt": "a", "max_new_tokens": 0}, UsageError, "expected at least 1 new token"),
        ({"prompt": "a<|endoftext|>", "raw": True}, UsageError, "ends with the padding token 199999"),
        ({"prompt": "a", "device": 1}, UsageError, "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    gated_package: Path, options: dict[str, Any], error: type[Phi4mmError], text: str
) -> None:
    with pytest.raises(error) as caught:
        run(gated_package, **options)
    assert text in str(caught.value)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(copied: Path) -> None:
    edit_config(copied, lambda c: (c["model"].update(context_length=32), c["search"].update(max_length=32)))
    with pytest.raises(UsageError, match=r"the prompt has \d\d tokens, expected fewer than 32"):
        run(copied, prompt="word " * 20)


def test_an_answer_stops_at_the_context_length(copied: Path) -> None:
    edit_config(copied, lambda c: (c["model"].update(context_length=32), c["search"].update(max_length=32)))
    result = run(copied, prompt="a b", max_new_tokens=100)
    assert result.prompt_tokens + result.new_tokens == 32


def test_an_extremely_narrow_picture_is_refused_by_name(gated_package: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"thread\.png"):
        run(gated_package, prompt="?", images=[write_picture(tmp_path, "thread.png", 3000, 8)])


def test_an_og_that_feeds_no_input_ids_is_refused_for_a_gated_package(
    gated_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(og, "__version__", "0.13.2")
    with pytest.raises(SystemLimitError, match=r"expected onnxruntime-genai 0\.14\.1 or later.*found 0\.13\.2"):
        run(gated_package, prompt="Hi")


@pytest.mark.skipif(og.is_cuda_available(), reason="this machine has a CUDA device")
def test_a_package_for_cuda_needs_cuda_and_runs_on_the_cpu_when_asked(cuda_package: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemLimitError, match="pass --ep cpu"):
        run(cuda_package, prompt="Hi")
    media = {"images": [write_picture(tmp_path)], "audios": [write_sound(tmp_path)]}
    assert run(cuda_package, prompt="Hi", provider="cpu", max_new_tokens=3, **media).new_tokens == 3


def test_ignored_adapter_files_are_announced(adapters_package: Path, tmp_path: Path) -> None:
    assert run(adapters_package, prompt="Hi", max_new_tokens=1).notes == ()
    result = run(adapters_package, prompt="Hi", images=[write_picture(tmp_path)], max_new_tokens=1)
    assert "ignores the package's adapter files" in result.notes[0]


def test_a_clip_that_og_would_cut_is_announced(copied: Path, tmp_path: Path) -> None:
    sound = write_sound(tmp_path, "speech.wav", 31.0)
    assert run(copied, prompt="?", audios=[sound], max_new_tokens=1).notes == ()
    file = copied / "speech_processor.json"
    config = json.loads(file.read_text())
    del config["feature_extraction"]["sequence"][0]["operation"]["attrs"]["max_samples"]
    file.write_text(json.dumps(config))
    result = run(copied, prompt="?", audios=[sound], max_new_tokens=1)
    assert "ONNX Runtime GenAI reads only the first 30 s of 31.0 s" in result.notes[0]


def test_a_device_other_than_0_in_the_config_is_refused_with_the_way_around(copied: Path) -> None:
    def change(config: Any) -> None:
        options = config["model"]["decoder"].setdefault("session_options", {})
        options["provider_options"] = [{"cuda": {"device_id": "1"}}]

    edit_config(copied, change)
    with pytest.raises(PackageError, match="CUDA_VISIBLE_DEVICES=1"):
        run(copied, prompt="Hi")


@pytest.mark.parametrize("name", ["phi-4-mm-vision.onnx", "phi-4-mm-text.onnx", "phi-4-mm-embedding.onnx"])
def test_a_graph_that_is_a_pointer_or_missing_is_named(copied: Path, name: str) -> None:
    (copied / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(PackageError) as damaged:
        run(copied, prompt="Hi")
    assert name in damaged.value.where
    (copied / name).unlink()
    with pytest.raises(PackageError, match=name):
        run(copied, prompt="Hi")


@pytest.mark.parametrize(
    "name", ["vision_processor.json", "speech_processor.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_broken_processor_or_tokenizer_file_is_named(copied: Path, name: str) -> None:
    (copied / name).unlink()
    (copied / name).write_text('{"broken": ')
    with pytest.raises(PackageError) as caught:
        run(copied, prompt="Hi")
    assert caught.value.where == name


def test_a_tokenizer_class_that_the_runtime_does_not_know_is_named_with_its_key(copied: Path) -> None:
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    (copied / "tokenizer_config.json").unlink()
    (copied / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "AutoTokenizer"}))
    with pytest.raises(PackageError) as caught:
        run(copied, prompt="Hi")
    assert caught.value.where == "tokenizer_config.json: tokenizer_class"


def test_missing_external_data_is_a_package_error_with_the_graph(copied: Path) -> None:
    (copied / "phi-4-mm-speech.onnx.data").unlink()
    with pytest.raises(PackageError) as caught:
        run(copied, prompt="Hi")
    assert "phi-4-mm-speech.onnx" in str(caught.value)


@pytest.mark.parametrize("kind", ["nothing", "a file", "an empty folder"])
def test_what_is_no_package_is_refused(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "x"
    if kind == "a file":
        target.write_text("")
    elif kind == "an empty folder":
        target.mkdir()
    with pytest.raises(UsageError, match=r"expected a package folder with genai_config\.json"):
        run(target, prompt="Hi")


def test_another_model_type_is_refused(copied: Path) -> None:
    edit_config(copied, lambda c: c["model"].update(type="phi3v"))
    with pytest.raises(PackageError, match="expected model type 'phi4mm', found 'phi3v'"):
        run(copied, prompt="Hi")
