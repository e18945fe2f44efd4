"""`phi4mm validate` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.packages import DATA_FILE, build_package, edit_config
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.spec.contract_file import load_contract


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return build_package(tmp_path / "package")


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["validate", *map(str, arguments)])


def test_a_clean_package_exits_0_and_counts_the_tensors_that_match(package: Path) -> None:
    result = _run(package)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-2:] == [
        "contract official: 24 of 24 tensors match",
        "ok: 0 errors, 0 warnings, 0 notes",
    ]


def test_an_error_exits_4_and_says_where_expected_found_and_fix(package: Path) -> None:
    edit_config(package, lambda c: c["search"].update(max_length=131073))
    result = _run(package)
    assert result.exit_code == 4
    assert "error C320 genai_config.json: search.max_length" in result.stdout
    for label in ("expected: 1 to 131072", "found: 131073", "fix: "):
        assert label in result.stdout
    assert result.stderr == ""


def test_json_is_one_document_with_findings_and_tensors(package: Path) -> None:
    edit_config(package, lambda c: c["model"].update(foo=1))
    result = _run(package, "--json")
    assert result.exit_code == 4
    report = json.loads(result.stdout)
    assert list(report) == ["package", "contract", "ok", "errors", "warnings", "findings", "tensors", "facts"]
    assert report["findings"][0]["where"] == "genai_config.json: model.foo"
    assert list(report["findings"][0]) == ["code", "severity", "where", "what", "expected", "found", "fix"]
    assert {row["status"] for row in report["tensors"]} == {"match", "absent"}


def test_no_path_of_this_machine_is_in_the_report(package: Path) -> None:
    assert str(package.parent) not in _run(package, "--json").stdout


def test_the_provider_option_decides_which_kernels_are_looked_for(package: Path) -> None:
    assert _run(package, "--ep", "cpu").exit_code == 0
    result = _run(package, "--ep", "cuda")
    assert result.exit_code == 4
    assert "GroupQueryAttention" in result.stdout


def test_the_contract_option_takes_a_name_or_a_file(package: Path, tmp_path: Path) -> None:
    assert _run(package, "--contract", "official").exit_code == 0
    assert _run(package, "--contract", "gated").exit_code == 4
    file = tmp_path / "mine.json"
    file.write_text(load_contract("official").model_dump_json())
    assert _run(package, "--contract", file).exit_code == 0


def test_tensors_lists_every_tensor(package: Path) -> None:
    result = _run(package, "--tensors")
    assert "match         phi-4-mm-speech.onnx output audio_features: float [num_audio_tokens, 16]" in result.stdout


@pytest.mark.parametrize("option", [["--contract", "offical"], ["--ep", "tpu"]])
def test_an_unknown_contract_or_provider_is_a_usage_error(package: Path, option: list[str]) -> None:
    assert _run(package, *option).exit_code == 2


def test_a_path_that_is_no_folder_is_a_usage_error(package: Path, tmp_path: Path) -> None:
    assert _run(tmp_path / "nothing").exit_code == 2
    result = _run(package / "genai_config.json")
    assert result.exit_code == 2
    assert "expected a package folder" in result.stderr


def test_an_empty_folder_and_a_checkpoint_are_usage_errors(tmp_path: Path) -> None:
    assert _run(tmp_path).exit_code == 2
    (tmp_path / "model.safetensors").write_bytes(b"")
    result = _run(tmp_path)
    assert result.exit_code == 2
    assert "found a checkpoint" in result.stderr


@pytest.mark.subprocess
def test_it_neither_writes_into_the_package_nor_loads_onnxruntime_or_torch(package: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in package.iterdir()}
    script = (
        "import sys; from phi4mm_export.pipeline.validate import validate; "
        f"assert validate({str(package)!r}).ok; "
        "print(sorted({'onnxruntime', 'torch', 'onnxruntime_genai'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert {path.name: path.stat().st_mtime_ns for path in package.iterdir()} == before


@pytest.mark.parametrize("name", ["cuda", "CUDAExecutionProvider"])
def test_a_provider_may_be_spelled_as_the_runtime_does(package: Path, name: str) -> None:
    assert _run(package, "--ep", name, "--json").exit_code == 4


def test_a_reference_that_is_neither_a_folder_nor_a_hub_id_is_a_usage_error(package: Path) -> None:
    assert _run(package, "--reference", "./no/such/folder").exit_code == 2


def test_parity_is_not_measured_on_graphs_that_cannot_run(package: Path, tiny_checkpoint: Path) -> None:
    (package / DATA_FILE).unlink()
    result = _run(package, "--reference", tiny_checkpoint)
    assert result.exit_code == 4
    assert "C700" in result.stdout


def test_an_adapter_folder_that_does_not_exist_is_a_usage_error(package: Path) -> None:
    assert _run(package, "--adapter-path", "vision=./nowhere").exit_code == 2
