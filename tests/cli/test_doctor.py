"""`phi4mm doctor` as it is typed, on a real export and on faults that people run into."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import onnx
import pytest
from support.packages import build_package, edit_config, edit_json
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.pipeline.export import export
from phi4mm_export.pipeline.verify import verify

DATA = "phi-4-mm-text.onnx.data"


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "package"
    export(tiny_checkpoint, folder)
    return folder


@pytest.fixture
def package(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "package")
    return tmp_path / "package"


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_nothing_is_wrong_with_an_export(exported: Path) -> None:
    result = _run(exported)
    assert result.exit_code == 0
    assert "nothing is wrong" in result.stdout.splitlines()[-1]
    assert "error" not in result.stdout


def test_a_cause_is_told_with_place_symptom_and_repair_and_the_exit_code_is_4(package: Path) -> None:
    edit_config(package, lambda c: c["search"].update(max_length=131073))
    result = _run(package)
    assert result.exit_code == 4
    for line in (
        "error C320 search.max_length is no possible length",
        "    where: genai_config.json: search.max_length",
        "    the runtime shows: max_length (N) cannot be greater than model context_length (M)",
        "    --fix: patch to genai_config.json",
        '-        "max_length": 131073,',
        '+        "max_length": 131072,',
    ):
        assert line in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1] == "1 error, 0 warnings, 3 remarks; --fix repairs 1"


@pytest.mark.skipif(shutil.which("patch") is None, reason="the program patch is not installed")
@pytest.mark.subprocess
def test_the_printed_patch_applies_and_cures(package: Path) -> None:
    edit_config(package, lambda c: c["search"].update(max_length=0, num_beams=4))
    edit_json(package / "tokenizer_config.json", lambda c: c.update(tokenizer_class="AutoTokenizer"))
    patch = json.loads(_run(package, "--json").stdout)["patch"]
    subprocess.run(["patch", "-p1", "--quiet"], cwd=package, input=patch, text=True, check=True)
    (package / "phi4mm.json").unlink()
    assert _run(package).exit_code == 0


def test_a_corrected_copy_is_written_and_the_source_left_alone(package: Path, tmp_path: Path) -> None:
    edit_config(package, lambda c: c["search"].update(max_length=131073))
    before = {path: path.stat().st_mtime_ns for path in package.iterdir()}
    result = _run(package, "--fix", tmp_path / "fixed")
    assert result.exit_code == 0, result.output
    assert "a corrected copy was written to fixed" in result.stdout
    assert _run(tmp_path / "fixed").exit_code == 0
    assert verify(tmp_path / "fixed").ok
    assert {path: path.stat().st_mtime_ns for path in package.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"package", "fixed"}


def test_an_existing_target_is_replaced_only_when_asked(package: Path, tmp_path: Path) -> None:
    build_package(tmp_path / "fixed")
    assert _run(package, "--fix", tmp_path / "fixed").exit_code == 2
    assert _run(package, "--fix", tmp_path / "fixed", "--overwrite").exit_code == 0
    assert (tmp_path / "fixed" / DATA).stat().st_size == (package / DATA).stat().st_size


def test_a_target_inside_the_package_and_a_path_that_is_no_package_are_usage_errors(
    package: Path, tmp_path: Path
) -> None:
    assert _run(package, "--fix", package / "fixed").exit_code == 2
    assert _run(tmp_path / "nothing").exit_code == 2
    (tmp_path / "empty").mkdir()
    assert _run(tmp_path / "empty").exit_code == 2


def test_a_checkpoint_is_called_one(tiny_checkpoint: Path) -> None:
    result = _run(tiny_checkpoint)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "found a checkpoint, expected a package" in result.stderr


def test_json_is_one_document(package: Path) -> None:
    edit_config(package, lambda c: c["model"].update(foo=1))
    document = json.loads(_run(package, "--json").stdout)
    assert list(document) == ["package", "ok", "diagnoses", "patch", "copied_to", "left"]
    assert list(document["diagnoses"][0])[:6] == ["cause", "symptom", "upstream", "repair", "code", "severity"]


# ------------------------------------------------------------------ what people run into


def _fixed(package: Path, tmp_path: Path) -> str:
    result = _run(package, "--fix", tmp_path / "fixed")
    assert result.exit_code == 0, result.output
    assert verify(tmp_path / "fixed").ok
    return result.stdout


def test_a_snapshot_under_hard_links_is_nothing_wrong(package: Path, tmp_path: Path) -> None:
    for path in package.iterdir():
        (tmp_path / f"twin-{path.name}").hardlink_to(path)
    assert "nothing is wrong" in _run(package).stdout


def test_data_left_under_another_name(package: Path, tmp_path: Path) -> None:
    (package / DATA).rename(package / "decoder.onnx.data")
    assert f"--fix: decoder.onnx.data becomes {DATA}" in _fixed(package, tmp_path)


def test_a_data_file_with_a_dead_copy_in_front(package: Path, tmp_path: Path) -> None:
    old = (package / DATA).read_bytes()
    (package / DATA).write_bytes(old + old)
    for name in ("phi-4-mm-text.onnx", "phi-4-mm-embedding.onnx"):
        model = onnx.load(package / name, load_external_data=False)
        for tensor in model.graph.initializer:
            entries = {entry.key: entry for entry in tensor.external_data}
            if tensor.data_location == onnx.TensorProto.EXTERNAL and entries["location"].value == DATA:
                entries["offset"].value = str(int(entries["offset"].value) + len(old))
        onnx.save(model, package / name)
    output = _run(package, "--fix", tmp_path / "fixed").stdout
    assert "dead bytes: data was saved twice into one file" in output
    assert (tmp_path / "fixed" / DATA).read_bytes() == old
    assert _run(tmp_path / "fixed").exit_code == 0


def test_one_bit_one_file_too_few_and_one_too_many(package: Path, tmp_path: Path) -> None:
    data = bytearray((package / DATA).read_bytes())
    data[len(data) // 2] ^= 0x10
    (package / DATA).write_bytes(data)
    (package / "vision_processor.json").unlink()
    (package / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    result = _run(package, "--fix", tmp_path / "fixed")
    assert result.exit_code == 4
    assert "vision_processor.json is written with the very bytes that the manifest lists" in result.stdout
    assert f"still there: D801 {DATA}: a file is not what was packaged" in result.stdout
    assert not (tmp_path / "fixed" / ".DS_Store").exists()


def test_a_class_that_a_current_transformers_writes(package: Path, tmp_path: Path) -> None:
    edit_json(package / "tokenizer_config.json", lambda c: c.update(tokenizer_class="AutoTokenizer"))
    assert "a tokenizer class that the runtime does not load" in _fixed(package, tmp_path)


def test_a_target_that_cannot_be_is_refused_before_the_package_is_read(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    result = _run(tmp_path / "no package", "--fix", tmp_path / "there")
    assert result.exit_code == 2
    assert "the target exists already" in result.stderr
