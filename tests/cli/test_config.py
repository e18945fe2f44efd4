"""`phi4mm config`: the three files for graphs that already stand in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import stub_graphs
from support.json_checkpoint import edit, write_checkpoint
from support.stub_graphs import FLAT, FLOAT, INT64, NESTED
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app

WRITTEN = ["genai_config.json", "speech_processor.json", "vision_processor.json"]
TARGET = Path(__file__).parents[1] / "data" / "genai_config.target.json"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return stub_graphs.four_graphs(tmp_path / "package")


def run(checkpoint: Path, package: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["config", str(checkpoint), "--package", str(package), *options])


def written(package: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((package / "genai_config.json").read_text(encoding="utf-8"))
    return config


def json_names(package: Path) -> list[str]:
    return sorted(path.name for path in package.iterdir() if path.is_file())


def test_official_graphs_get_the_published_config_with_the_models_dimensions(checkpoint: Path, package: Path) -> None:
    result = run(checkpoint, package)
    assert result.exit_code == 0, result.output
    sizes = {"head_size": 16, "hidden_size": 16, "num_attention_heads": 1, "num_hidden_layers": 1}
    target = json.loads(TARGET.read_text(encoding="utf-8"))
    target["model"]["decoder"].update(sizes, num_key_value_heads=1)
    assert written(package) == target
    assert json_names(package) == WRITTEN
    assert "16.0 MiB per sequence (128 B per token)" in result.stdout


def test_a_second_run_replaces_the_files_with_the_same_bytes(checkpoint: Path, package: Path) -> None:
    run(checkpoint, package)
    before = {name: (package / name).read_bytes() for name in WRITTEN}
    (package / "genai_config.json").write_bytes(b"{ broken")
    assert run(checkpoint, package).exit_code == 0
    assert {name: (package / name).read_bytes() for name in WRITTEN} == before


def test_flat_packages_are_found_by_the_published_names(checkpoint: Path, tmp_path: Path) -> None:
    package = stub_graphs.four_graphs(tmp_path / "flat", files=FLAT)
    assert run(checkpoint, package).exit_code == 0
    assert {part: written(package)["model"][part]["filename"] for part in FLAT} == FLAT


def test_graphs_under_any_file_name_are_found_by_their_borders(checkpoint: Path, tmp_path: Path) -> None:
    files = {"decoder": "a.onnx", "vision": "deep/b/b.onnx", "speech": "c c.onnx", "embedding": "é.onnx"}
    package = stub_graphs.four_graphs(tmp_path / "any", files=files)
    assert run(checkpoint, package).exit_code == 0
    assert {part: written(package)["model"][part]["filename"] for part in files} == files


def test_cuda_options_are_strings_and_arena_release_names_the_gpu(checkpoint: Path, package: Path) -> None:
    assert run(checkpoint, package, "--ep", "CUDAExecutionProvider", "--release-arena").exit_code == 0
    model = written(package)["model"]
    assert model["decoder"]["session_options"]["provider_options"] == [{"cuda": {"device_id": "0"}}]
    assert model["vision"]["run_options"] == {"memory.enable_memory_arena_shrinkage": "gpu:0"}


def test_a_memory_budget_picks_the_largest_length_that_fits(checkpoint: Path, package: Path) -> None:
    result = run(checkpoint, package, "--memory-budget", "1MiB")
    assert written(package)["search"]["max_length"] == 8192
    assert "8,192" in result.stdout


def test_a_length_can_be_stated(checkpoint: Path, package: Path) -> None:
    run(checkpoint, package, "--max-length", "2048")
    assert written(package)["search"]["max_length"] == 2048
    assert written(package)["model"]["context_length"] == 131072


def test_the_original_audio_limit_is_restored_by_its_flag(checkpoint: Path, package: Path) -> None:
    run(checkpoint, package)
    assert '"max_samples": 0' in (package / "speech_processor.json").read_text(encoding="utf-8")
    run(checkpoint, package, "--original-audio-limit")
    assert "max_samples" not in (package / "speech_processor.json").read_text(encoding="utf-8")


def test_fewer_crops_of_the_checkpoint_reach_the_vision_processor(checkpoint: Path, package: Path) -> None:
    edit(checkpoint / "preprocessor_config.json", lambda body: body.update(dynamic_hd=12))
    run(checkpoint, package)
    assert '"dynamic_hd": 12' in (package / "vision_processor.json").read_text(encoding="utf-8")


def test_a_dry_run_writes_nothing_and_reports_the_documents(checkpoint: Path, package: Path) -> None:
    result = run(checkpoint, package, "--dry-run", "--json")
    assert json_names(package) == []
    report = json.loads(result.stdout)
    assert report["written"] is False
    assert report["graphs"] == NESTED
    assert report["max_length"] * report["kv_bytes_per_token"] == report["kv_cache_bytes"]
    assert report["files"]["genai_config.json"]["model"]["type"] == "phi4mm"


def test_renamed_tensors_are_mapped_and_listed(checkpoint: Path, package: Path) -> None:
    names = {"past_key_values.%d.key": "cache.k.%d", "past_key_values.%d.value": "cache.v.%d", "logits": "scores"}
    stub_graphs.decoder(package / NESTED["decoder"], names=names)
    result = run(checkpoint, package)
    decoder = written(package)["model"]["decoder"]
    assert decoder["inputs"]["past_key_names"] == "cache.k.%d"
    assert decoder["outputs"]["logits"] == "scores"
    assert "model.decoder.outputs.logits -> scores" in result.stdout


def test_another_teams_variant_is_mapped_and_its_losses_are_said(checkpoint: Path, package: Path) -> None:
    stub_graphs.vision(package / NESTED["vision"], inputs=[("pixel_values", FLOAT, ["batch", 3, 448, 448])])
    stub_graphs.speech(
        package / NESTED["speech"],
        inputs=[("audio_features", FLOAT, ["batch", "frames", 80])],
        outputs=("speech_features", "speech_features_for_vision"),
    )
    stub_graphs.embedding(package / NESTED["embedding"], names={"audio_features": "speech_features"})
    result = run(checkpoint, package)
    assert result.exit_code == 0
    assert written(package)["model"]["speech"]["inputs"] == {
        "audio_embeds": "audio_features",
        "audio_sizes": "attention_mask",
    }
    for part in ("image_attention_mask", "rank 4", "audio_sizes", "speech_features_for_vision"):
        assert part in result.stderr


def test_a_concatenated_cache_is_not_shared(checkpoint: Path, package: Path) -> None:
    stub_graphs.decoder(package / NESTED["decoder"], attention="Concat")
    result = run(checkpoint, package)
    assert written(package)["search"]["past_present_share_buffer"] is False
    assert "Concat" in result.stderr


def test_a_package_without_speech_is_configured_for_text_and_images(checkpoint: Path, package: Path) -> None:
    (package / NESTED["speech"]).unlink()
    result = run(checkpoint, package)
    assert result.exit_code == 0
    assert written(package)["model"]["speech"] == {"filename": "", "config_filename": ""}
    assert "no speech graph" in result.stderr


def test_missing_tokenizer_files_are_mentioned_with_what_they_cost(checkpoint: Path, package: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    required, optional = run(checkpoint, package).stderr.splitlines()
    assert "lacks tokenizer.json, tokenizer_config.json" in required
    assert "does not start" in required
    assert "chat_template.jinja, which the checkpoint has" in optional
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (package / name).write_bytes((checkpoint / name).read_bytes())
    assert run(checkpoint, package).stderr == ""


def test_float32_graphs_for_cuda_are_pointed_out(checkpoint: Path, package: Path) -> None:
    assert "CUDA has no GroupQueryAttention" in run(checkpoint, package, "--ep", "cuda").stderr
    assert "GroupQueryAttention" not in run(checkpoint, package, "--ep", "cpu").stderr


def test_quiet_prints_nothing_and_json_keeps_warnings_in_the_document(checkpoint: Path, package: Path) -> None:
    quiet, document = run(checkpoint, package, "-q"), run(checkpoint, package, "--json")
    assert (quiet.stdout, quiet.stderr, document.stderr) == ("", "", "")
    assert "tokenizer.json" in json.loads(document.stdout)["warnings"][0]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("config.json", (), "expected a checkpoint folder or a hub id, found a file"),
        (".", ("--revision", "main"), "expected a hub id, found a folder"),
        ("./missing", (), "there is no such folder"),
    ],
)
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused_in_a_sentence(
    checkpoint: Path, package: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(checkpoint)
    result = CliRunner().invoke(app, ["config", model, "--package", str(package), *options])
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("options", "code", "part"),
    [
        (["--ep", "gpu"], 2, "CUDAExecutionProvider"),
        (["--ep", "cuda", "--device-id", "1"], 2, "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        (["--ep", "cuda", "--device", "1"], 2, "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        (["--max-length", "131073"], 2, "131,072"),
        (["--max-length", "0"], 2, "131,072"),
        (["--memory-budget", "lots"], 2, "12GiB"),
        (["--memory-budget", "1MiB", "--max-length", "8193"], 6, "8,192"),
        (["--memory-budget", "64B"], 6, "128"),
    ],
)
def test_options_that_cannot_be_followed_change_nothing(
    checkpoint: Path, package: Path, options: list[str], code: int, part: str
) -> None:
    result = run(checkpoint, package, *options)
    assert result.exit_code == code
    assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert json_names(package) == []


@pytest.mark.parametrize("missing", ["checkpoint", "package"])
def test_a_folder_that_is_not_there_is_a_usage_error(checkpoint: Path, package: Path, missing: str) -> None:
    folders = {"checkpoint": checkpoint, "package": package, missing: checkpoint.parent / "nowhere"}
    result = run(folders["checkpoint"], folders["package"])
    assert result.exit_code == 2
    assert "nowhere" in result.stderr


@pytest.mark.parametrize("part", ["decoder", "vision", "embedding"])
def test_without_a_graph_that_the_runtime_needs_the_package_cannot_run(
    checkpoint: Path, package: Path, part: str
) -> None:
    (package / NESTED[part]).unlink()
    result = run(checkpoint, package)
    assert result.exit_code == 4
    assert part in result.stderr
    assert json_names(package) == []


def test_a_fixed_name_that_differs_is_refused_and_named(checkpoint: Path, package: Path) -> None:
    stub_graphs.embedding(package / NESTED["embedding"], names={"input_ids": "tokens"})
    result = run(checkpoint, package)
    assert result.exit_code == 4
    assert "tokens" in result.stderr
    assert "input_ids" in result.stderr


def test_two_candidates_for_one_graph_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    package = stub_graphs.four_graphs(tmp_path / "two", files={**NESTED, "vision": "one.onnx"})
    stub_graphs.vision(package / "two.onnx")
    result = run(checkpoint, package)
    assert result.exit_code == 4
    assert "one.onnx, two.onnx" in result.stderr


def test_the_name_of_a_layout_decides_between_two_candidates(checkpoint: Path, package: Path) -> None:
    stub_graphs.vision(package / "backup.onnx")
    assert run(checkpoint, package).exit_code == 0
    assert written(package)["model"]["vision"]["filename"] == NESTED["vision"]


def test_a_broken_graph_file_is_named(checkpoint: Path, package: Path) -> None:
    (package / NESTED["vision"]).write_bytes(b"half a download")
    result = run(checkpoint, package)
    assert result.exit_code == 4
    assert NESTED["vision"] in result.stderr


def test_graphs_of_another_model_are_refused_with_both_sizes(checkpoint: Path, package: Path) -> None:
    edit(checkpoint / "config.json", lambda config: config.update(hidden_size=32, num_attention_heads=2))
    result = run(checkpoint, package)
    assert result.exit_code == 4
    assert "has 16 at axis 2, expected 32 (hidden_size)" in result.stderr


def test_a_moved_placeholder_of_the_checkpoint_is_refused(checkpoint: Path, package: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (checkpoint / name).read_text(encoding="utf-8").replace("200010", "200012")
        (checkpoint / name).write_text(text, encoding="utf-8")
    result = run(checkpoint, package)
    assert result.exit_code == 3
    assert "<|endoftext10|> has the id 200012" in result.stderr


def test_errors_are_one_json_object_with_the_json_flag(
    checkpoint: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["phi4mm", "config", "--json"])
    error = json.loads(run(checkpoint, package, "--device-id", "2", "--json").stderr)
    assert (error["error"], error["exit_code"], error["where"]) == ("UsageError", 2, "--device-id")


def test_positions_of_a_decoder_get_their_key(checkpoint: Path, package: Path) -> None:
    positions = [("position_ids", INT64, ["batch_size", "sequence_length"])]
    stub_graphs.decoder(package / NESTED["decoder"], extra=positions)
    run(checkpoint, package)
    assert written(package)["model"]["decoder"]["inputs"]["position_ids"] == "position_ids"
