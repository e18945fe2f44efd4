"""Names that no file can have, wherever they come from: refused in a sentence or reported, never an exception.

Too long, with a null character, of half a surrogate pair, below a file, a loop of links: the system answers each in
another way, and none of these answers may reach the user.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import checkpoints
from support.packages import build_package, edit_config, edit_graph, named
from support.sealed import seal
from typer.testing import CliRunner

from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.checkpoint.shards import read_shards
from phi4mm_export.cli.app import app
from phi4mm_export.errors import CheckpointError, UsageError
from phi4mm_export.runtime.calibration_prompts import find_prompts
from phi4mm_export.runtime.calibration_sources import SampleKind, find_files
from phi4mm_export.runtime.media import read_medium

NAMES = {
    "a part of 300 characters": "x" * 300,
    "a path of 6,000 characters": "/".join(["d" * 200] * 30),
    "a null character": "a\0b",
    "half a surrogate pair": "\ud800",
    "a file as a folder": "taken/below",
    "a loop of links": "loop",
}
ON_COMMANDS = {title: NAMES[title] for title in ("a part of 300 characters", "a null character", "a loop of links")}
"""One for each exception that Python has for such names: OSError, ValueError, RuntimeError."""
CONFIG_KEYS = {
    "a graph": ("decoder", "filename"),
    "the speech graph": ("speech", "filename"),
    "a processor": ("vision", "config_filename"),
    "an adapter": ("speech", "adapter_filename"),
}
OF_A_PACKAGE = (
    "validate {}",
    "inspect {}",
    "verify {}",
    "doctor {} --fix out",
    "diff {} {clean}",
    "diff {}",
    "config {checkpoint} --package {} --dry-run",
    "plan {}",
    "quantize {} -o out --method rtn --component vision",
    "run {} -p hello",
    "evaluate {} --against {clean} --prompts taken",
    "export {checkpoint} -o out --component speech --from-package {}",
)
ARGUMENTS = (
    "export {} -o out",
    "export {checkpoint} -o {}",
    "export {checkpoint} -o out --adapter-path {}",
    "export {checkpoint} -o out --component speech --from-package {}",
    "export {checkpoint} -o out --component speech --work-dir {}",
    "quantize {} -o out --method rtn --component vision",
    "quantize {clean} -o {} --method rtn --component vision",
    "quantize {clean} -o out --component vision --calibration {}",
    "quantize {clean} -o out --component vision --calibration {samples} --validation {}",
    "quantize {clean} -o out --component vision --calibration {samples} --statistics {}",
    "quantize {clean} -o out --component vision --calibration {samples} --save-statistics {}",
    "quantize {clean} -o out --component vision --calibration {samples} --work-dir {}",
    "config {} --package {clean} --dry-run",
    "config {checkpoint} --package {}",
    "validate {}",
    "validate {clean} --contract {}",
    "validate {clean} --adapter-path {}",
    "verify {}",
    "verify {clean} --expect {}",
    "verify {clean} --write-lock {}",
    "verify {clean} --signature {}",
    "diff {} {clean}",
    "diff {clean} {}",
    "diff {}",
    "doctor {}",
    "doctor {clean} --fix {}",
    "run {} -p hello",
    "run {clean} -p @{}",
    "run {clean} -p hello --image {}",
    "run {clean} -p hello --audio {}",
    "evaluate {} --against {clean} --prompts taken",
    "evaluate {clean} --against {} --prompts taken",
    "evaluate {clean} --against {clean} --images {}",
    "evaluate {clean} --against {clean} --audio {}",
    "evaluate {clean} --against {clean} --prompts {}",
    "evaluate {clean} --against {clean} --text {}",
    "evaluate {clean} --against {clean} --prompts taken --fields {}",
    "evaluate {clean} --against {clean} --prompts taken --references {}",
    "evaluate {clean} --against {clean} --prompts taken --report {}",
    "evaluate {clean} --against {clean} --prompts taken --work-dir {}",
    "inspect {}",
    "plan {}",
    "plan {checkpoint} --adapter-path {}",
    "plan {checkpoint} --errors {}",
    "synth {} --size tiny",
)
every_name = pytest.mark.parametrize("name", list(NAMES.values()), ids=list(NAMES))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> dict[str, str]:
    """What the command lines above call `clean`, `checkpoint` and `samples`; read-only."""
    clean = build_package(tmp_path_factory.mktemp("names") / "clean")
    seal(clean)
    shapes = {"pixel_values": (1, 1, 3, 2, 448), "image_attention_mask": (1, 1, 32, 32)}
    samples = tmp_path_factory.mktemp("samples")
    for seed in range(4):
        rng = np.random.default_rng(seed)
        arrays = {key: rng.standard_normal(shape, np.float32) for key, shape in shapes.items()}
        np.savez(samples / f"{seed}.npz", image_sizes=np.array([[448, 448]]), **arrays)
    return {"clean": str(clean), "checkpoint": str(tiny_checkpoint), "samples": str(samples)}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a file stands in the way, and a link leads to itself."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    _spoil(tmp_path / "here")
    return tmp_path / "here"


def _spoil(folder: Path) -> None:
    (folder / "taken").write_text("a file")
    (folder / "loop").symlink_to("loop")


def _answers(line: str, name: str, places: dict[str, str]) -> str:
    """What is wrong with the command's answer; empty for a sentence and an exit code that is not "our bug"."""
    result = CliRunner().invoke(app, [part.format(name, **places) for part in line.split()])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return repr(result.exception)
    told = result.exit_code in (0, 2, 3, 4, 5, 6) and "bug of phi4mm" not in result.stderr
    return "" if told else f"exit {result.exit_code}: {result.stderr}"


@pytest.mark.parametrize("line", ARGUMENTS)
def test_an_argument_that_can_name_no_file_is_answered(here: Path, places: dict[str, str], line: str) -> None:
    wrong = {title: _answers(line, name, places) for title, name in ON_COMMANDS.items()}
    assert not any(wrong.values()), wrong
    assert sorted(path.name for path in here.iterdir() if not path.name.startswith("out")) == ["loop", "taken"]


def _config(place: tuple[str, str]) -> Callable[[Path, str], None]:
    section, key = place
    return lambda package, name: edit_config(package, lambda config: config["model"][section].update({key: name}))


def _location(package: Path, name: str) -> None:
    def change(model: onnx.ModelProto) -> None:
        entries = named(model.graph.initializer, "qkv").external_data
        next(entry for entry in entries if entry.key == "location").value = name

    edit_graph(package, "decoder", change)


HARMS = {**{title: _config(place) for title, place in CONFIG_KEYS.items()}, "a data file": _location}


@pytest.mark.parametrize("harm", list(HARMS.values()), ids=list(HARMS))
@pytest.mark.parametrize("line", OF_A_PACKAGE)
@pytest.mark.usefixtures("here")
def test_a_package_that_names_no_possible_file_is_answered(
    tmp_path: Path, places: dict[str, str], line: str, harm: Callable[[Path, str], None]
) -> None:
    wrong = {}
    for number, (title, name) in enumerate(ON_COMMANDS.items()):
        package = build_package(tmp_path / str(number))
        _spoil(package)
        harm(package, name)
        if line.startswith("verify"):
            seal(package)
        wrong[title] = _answers(line, str(package), places)
    assert not any(wrong.values()), wrong


@every_name
def test_an_index_that_names_no_possible_shard_is_refused(tmp_path: Path, name: str) -> None:
    folder = checkpoints.original().write(tmp_path / "model")
    _spoil(folder)
    weight_map = checkpoints.read_index(folder)
    weight_map["model.norm.weight"] = f"{name}.safetensors"
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    checkpoints.write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json|safetensors"):
        read_shards(folder)


@every_name
def test_a_list_that_names_no_possible_file_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    _spoil(tmp_path)
    (tmp_path / "list.txt").write_text(f"# samples\n{name}\n", encoding="utf-8", errors="surrogatepass")
    with pytest.raises(UsageError, match=r"line 2|not UTF-8"):
        find_files(tmp_path / "list.txt", SampleKind.IMAGE)


@every_name
def test_a_prompt_that_names_no_possible_picture_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    _spoil(tmp_path)
    checkpoints.write_json(tmp_path / "prompts.jsonl", {"prompt": "what is this", "images": [name]})
    with pytest.raises(UsageError, match="line 1"):
        find_prompts(tmp_path / "prompts.jsonl")


@every_name
def test_a_medium_that_no_file_can_be_is_refused(here: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"does not exist|cannot be read"):
        read_medium(here / name)


@pytest.mark.subprocess
def test_a_folder_whose_name_is_no_text_is_inspected(tmp_path: Path) -> None:
    import subprocess
    import sys

    folder = checkpoints.original().write(tmp_path / os.fsdecode(b"m\xffdel"))
    for options in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "phi4mm_export", "inspect", folder, *options], capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"m\\udcffdel" in done.stdout


@pytest.mark.parametrize("name", ["modèle fine-tuné №2 #1 100%", "-dash", "with space "])
def test_awkward_folder_names_are_no_fault(tmp_path: Path, name: str) -> None:
    open_checkpoint(str(checkpoints.original().write(tmp_path / name)) + "/").close()
