"""What CI asks of `phi4mm plan`: the content key of a build, and whether the disk holds it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from support.hub_server import Hub, serving
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.errors import UsageError
from phi4mm_export.pipeline import plan_build, plan_key
from phi4mm_export.pipeline.plan_key import BLOCK_NBYTES, content_key
from phi4mm_export.spec.recipe import Recipe

WEIGHTS = "model-00001-of-00002.safetensors"
CHOICES = {"export": {"precision": "int8"}}
Usage = namedtuple("Usage", "total used free")


def _run(*words: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def _change(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_copy_elsewhere_with_other_times_has_the_same_key(tiny_checkpoint: Path, checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        os.utime(path, (1, 1))
    assert content_key(checkpoint, choices=CHOICES) == content_key(tiny_checkpoint, choices=CHOICES)


def test_every_small_file_the_head_and_the_end_of_the_weights_count(checkpoint: Path) -> None:
    weights = next(iter(sorted(checkpoint.glob("*.safetensors"))))
    seen = {content_key(checkpoint, choices=CHOICES)}
    for name, offset in (("tokenizer.json", -1), ("preprocessor_config.json", -1), (weights.name, -1)):
        path = checkpoint / name
        if path.suffix == ".json":
            path.write_bytes(path.read_bytes() + b" ")
        else:
            _change(path, offset)
        seen.add(content_key(checkpoint, choices=CHOICES))
    assert len(seen) == 4


def test_blocks_of_a_large_file_are_spread_from_its_first_to_its_last_byte(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "model.safetensors", 100 * BLOCK_NBYTES
    path.write_bytes((10).to_bytes(8, "little") + b"{}        " + bytes(nbytes - 18))

    def digest() -> object:
        return plan_key._of_file("model", path)[2]

    seen = {digest()}
    for offset in (0, 17, nbytes // 5 // BLOCK_NBYTES * BLOCK_NBYTES, nbytes - 1):
        _change(path, offset)
        seen.add(digest())
    assert len(seen) == 5


def test_choices_code_and_samples_are_part_of_the_key(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = tmp_path / "samples"
    samples.mkdir()
    (samples / "a.png").write_bytes(b"a")
    seen = {
        content_key(checkpoint, choices=CHOICES),
        content_key(checkpoint, choices={}),
        content_key(checkpoint, choices=CHOICES, calibration="builtin"),
        content_key(checkpoint, choices=CHOICES, calibration=str(samples)),
    }
    assert content_key(checkpoint, choices=CHOICES, calibration=str(samples / "*.png")) not in seen
    (samples / "a.png").write_bytes(b"b")
    seen.add(content_key(checkpoint, choices=CHOICES, calibration=str(samples)))
    monkeypatch.setattr(plan_key, "code_version", lambda: "another")
    seen.add(content_key(checkpoint, choices=CHOICES))
    assert len(seen) == 6


def test_an_adapter_folder_is_part_of_the_key(tiny_native: Path, tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(tiny_native / "vision-lora", tmp_path / "adapter"))
    with_adapter = content_key(tiny_native, choices=CHOICES, adapter_paths={"vision": adapter})
    _change(adapter / "adapter_model.safetensors", -1)
    assert with_adapter != content_key(tiny_native, choices=CHOICES)
    assert with_adapter != content_key(tiny_native, choices=CHOICES, adapter_paths={"vision": adapter})


def test_samples_that_are_not_there_are_a_usage_error(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such samples"):
        content_key(checkpoint, choices=CHOICES, calibration=str(tmp_path / "nothing"))


@pytest.mark.network
@pytest.mark.subprocess
def test_a_hub_model_has_a_key_without_fetching_its_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")
    keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-m", "phi4mm_export", "plan", "someone/model", "--key"]
    keys = set()
    with serving(Hub("someone/model", tiny_checkpoint)) as hub:
        for home in ("first", "second"):
            settings = {"HF_HOME": str(tmp_path / home), "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env={**keep, **settings}, check=True)
            keys.add(done.stdout)
    assert len(keys) == 1
    fetched = sum(path.stat().st_size for path in (tmp_path / "first").rglob("*") if path.is_file())
    assert fetched < sum(path.stat().st_size for path in tiny_checkpoint.iterdir()) / 2


def test_the_command_prints_the_key_and_nothing_else(checkpoint: Path) -> None:
    result = _run(checkpoint, "--key")
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.fullmatch(r"[0-9a-f]{64}\n", result.stdout)
    assert json.loads(_run(checkpoint, "--key", "--json").stdout) == {"key": result.stdout.strip()}
    assert _run(checkpoint, "--key", "--precision", "int4").stdout != result.stdout


def test_the_key_of_a_recipe_follows_its_choices_and_its_samples(checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[export]\nprecision = "int8"\n', "utf-8")
    first = _run(checkpoint, "--recipe", recipe, "--key").stdout
    recipe.write_text('[export]\nprecision = "int4"\n', "utf-8")
    second = _run(checkpoint, "--recipe", recipe, "--key").stdout
    third = _run(checkpoint, "--recipe", recipe, "--calibration", "builtin", "--key").stdout
    assert len({first, second, third}) == 3


def test_a_recipe_is_planned_as_it_will_be_built(checkpoint: Path) -> None:
    planned = json.loads(_run(checkpoint, "--recipe", "cpu-int4", "--json").stdout)
    assert planned["recipe"]["precision"] == "int4"
    assert planned["recipe"] != json.loads(_run(checkpoint, "--recipe", "fp16", "--json").stdout)["recipe"]


def test_a_disk_with_room_is_said_to_have_it(checkpoint: Path, tmp_path: Path) -> None:
    result = _run(checkpoint, "--check-disk", tmp_path)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith(f"disk of {tmp_path}: enough, ")


def test_a_disk_without_room_is_exit_6_with_both_numbers(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_build.shutil, "disk_usage", lambda _path: Usage(10, 7, 3))
    result = _run(checkpoint, "--check-disk", tmp_path, "--json")
    disk = json.loads(result.stdout)["disk"]
    assert result.exit_code == 6
    assert f"the build needs {disk['needed']:,} bytes of disk, 3 are free" in result.stderr


def test_a_quantized_graph_counts_twice(checkpoint: Path, tmp_path: Path) -> None:
    def planned(*words: str) -> dict[str, int]:
        disk = json.loads(_run(checkpoint, *words, "--check-disk", tmp_path, "--json").stdout)["disk"]
        return dict(disk)

    recipe = tmp_path / "mine.toml"
    recipe.write_text('[export]\nprecision = "int8"\n', "utf-8")
    once = planned("--recipe", str(recipe))
    recipe.write_text('[export]\nprecision = "int8"\n[quantize.vision]\nmethod = "rtn"\n', "utf-8")
    files = json.loads(_run(checkpoint, "--recipe", recipe, "--json").stdout)["files"]
    vision = next(file["nbytes"] for file in files if file["name"] == "phi-4-mm-vision.onnx.data")
    assert planned("--recipe", str(recipe))["needed"] == once["needed"] + vision


def test_a_model_that_has_to_be_fetched_counts_with_its_weights(checkpoint: Path, tmp_path: Path) -> None:
    report = plan_build_report(checkpoint)
    assert report.export is not None
    fetched = plan_build.disk_room(report, tmp_path, model="someone/model")
    streamed = plan_build.disk_room(report, tmp_path, model="someone/model", streamed=True)
    assert fetched.needed - streamed.needed == fetched.fetched == report.export.nbytes_inputs
    assert fetched.fetched == sum(path.stat().st_size for path in checkpoint.iterdir())
    assert plan_build.disk_room(report, tmp_path, model=checkpoint).needed == streamed.needed


def test_check_disk_without_such_a_folder_is_a_usage_error(checkpoint: Path, tmp_path: Path) -> None:
    result = _run(checkpoint, "--check-disk", tmp_path / "nothing")
    assert result.exit_code == 2
    assert "expected a folder" in result.stderr


def plan_build_report(checkpoint: Path) -> plan_build.PlanReport:
    from phi4mm_export.pipeline.plan import plan

    return plan(checkpoint, recipe=Recipe.resolve())
