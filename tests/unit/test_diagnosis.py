"""Diagnoses and remedies: each kind of fault gets its cause, and what leaves no choice is repaired."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto
from support.packages import DATA_FILE, FILES, build_package, edit_config, edit_graph, edit_json, genai_config, named
from support.sealed import seal

from phi4mm_export.checks.causes import CAUSES
from phi4mm_export.pipeline.doctor import DoctorReport, doctor
from phi4mm_export.pipeline.validate import validate
from phi4mm_export.pipeline.verify import verify

ROOT = Path(__file__).parents[2]
Break = Callable[[dict[str, Any]], object]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return build_package(tmp_path / "package")


def _codes(report: DoctorReport) -> set[str]:
    return {item.finding.code for item in report.diagnoses}


def _decoder(config: dict[str, Any]) -> dict[str, Any]:
    return dict.__getitem__(config["model"], "decoder")  # the very object, for assignment


def _providers(*entries: object) -> Break:
    return lambda c: _decoder(c)["session_options"].update(provider_options=list(entries))


def _option(key: str, value: object) -> Break:
    return lambda c: _decoder(c)["session_options"].update({key: value})


CONFIG_FAULTS: dict[str, tuple[str, Break]] = {
    "an unknown key": ("C302", lambda c: c["model"].update(foo=1)),
    "a misspelt key": ("C302", lambda c: c["search"].update(top_kk=c["search"].pop("top_k"))),
    "a string for a number": ("C302", lambda c: c["search"].update(top_k="5")),
    "a number for a truth value": ("C302", lambda c: c["search"].update(early_stopping=1)),
    "another model type": ("C311", lambda c: c["model"].update(type="phi4_multimodal")),
    "no context length": ("C312", lambda c: c["model"].pop("context_length")),
    "no speech section": ("C313", lambda c: c["model"].pop("speech")),
    "adapter file names": ("C314", lambda c: c["model"]["vision"].update(adapter_filename="v.onnx_adapter")),
    "no vocabulary size": ("C315", lambda c: c["model"].pop("vocab_size")),
    "no stop ids": ("C316", lambda c: c["model"].pop("eos_token_id")),
    "a stop id outside": ("C317", lambda c: c["model"].update(eos_token_id=[200020, 300000])),
    "a pad id outside": ("C317", lambda c: c["model"].update(pad_token_id=300000)),
    "a stop id twice": ("C318", lambda c: c["model"].update(eos_token_id=[200020, 200020])),
    "another image id": ("C319", lambda c: c["model"].update(image_token_id=5)),
    "max_length above the context": ("C320", lambda c: c["search"].update(max_length=131073)),
    "max_length of 0": ("C320", lambda c: c["search"].update(max_length=0)),
    "max_length with a fraction": ("C320", lambda c: c["search"].update(max_length=4096.0)),
    "max_length null": ("C320", lambda c: c["search"].update(max_length=None)),
    "min above max": ("C321", lambda c: c["search"].update(min_length=131072, max_length=10)),
    "beams": ("C322", lambda c: c["search"].update(num_beams=3)),
    "a log level of 9": ("C324", _option("log_severity_level", 9)),
    "a library that is elsewhere": ("C325", _option("custom_ops_library", "libours.so")),
    "no name of the image processor": ("C349", lambda c: c["model"]["vision"].pop("config_filename")),
    "an empty name of the image processor": ("C349", lambda c: c["model"]["vision"].update(config_filename="")),
    "an empty name of the audio processor": ("C349", lambda c: c["model"]["speech"].update(config_filename="")),
    "no batch": ("C326", lambda c: c["search"].update(batch_size=0)),
    "no beam": ("C326", lambda c: c["search"].update(num_beams=0)),
    "two answers": ("C326", lambda c: c["search"].update(num_return_sequences=2)),
    "batches": ("C323", lambda c: c["search"].update(batch_size=2)),
    "options of the CPU": ("C332", _providers({"CPU": {"a": "b"}})),
    "an unknown provider": ("C331", _providers({"nosuch": {}})),
    "an arena that is not there": ("C337", lambda c: c["model"]["vision"].update(
        run_options={"memory.enable_memory_arena_shrinkage": "gpu:0"})),
    "a run that is stopped": ("C338", lambda c: c["model"]["speech"].update(run_options={"terminate_session": "1"})),
    "a wrong tensor name": ("C344", lambda c: c["model"]["vision"]["inputs"].update(pixel_values="pixels")),
    "a wrong cache name": ("C347", lambda c: _decoder(c)["inputs"].update(past_key_names="past.%d.k")),
    "no hidden size": ("C350", lambda c: _decoder(c).pop("hidden_size")),
    "a wrong hidden size": ("C351", lambda c: _decoder(c).update(hidden_size=8)),
    "a wrong number of heads": ("C351", lambda c: _decoder(c).update(num_attention_heads=7)),
    "a turn that does not end": ("C506", lambda c: c["model"].update(eos_token_id=199999)),
}  # fmt: skip


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_config_fault_is_named_patched_and_gone_from_the_copy(package: Path, tmp_path: Path, fault: str) -> None:
    code, breaking = CONFIG_FAULTS[fault]
    edit_config(package, breaking)
    report = doctor(package, fix=tmp_path / "fixed")
    found = next(item for item in report.diagnoses if item.finding.code == code)
    assert found.repair == "patch to genai_config.json"
    assert report.patch.startswith("--- a/genai_config.json\n+++ b/genai_config.json\n@@")
    after = validate(tmp_path / "fixed")
    assert after.ok, after.errors
    assert code not in {finding.code for finding in after.findings}


CUDA_FAULTS: dict[str, tuple[str, Break]] = {
    "a device that is a number": ("C302", _providers({"cuda": {"device_id": 1}})),
    "a device other than 0": ("C333", _providers({"cuda": {"device_id": "1"}})),
    "the provider gpu": ("C331", _providers({"gpu": {"device_id": "0"}})),
    "an arena strategy by name": ("C334", _providers({"cuda": {"arena_extend_strategy": "kSameAsRequested"}})),
    "captured graphs": ("C336", _providers({"cuda": {"device_id": "0", "enable_cuda_graph": "1"}})),
    "a tower on the CPU": ("C335", lambda c: (_providers({"cuda": {"device_id": "0"}})(c),
                                              c["model"]["vision"].update(session_options={}))),
    "two providers in one entry": ("C330", _providers({"cuda": {"device_id": "0"}, "CPU": {}})),
}  # fmt: skip


@pytest.mark.parametrize("fault", CUDA_FAULTS)
def test_a_fault_of_provider_options_is_repaired(tmp_path: Path, fault: str) -> None:
    package = build_package(tmp_path / "package", float_type=TensorProto.FLOAT16)
    code, breaking = CUDA_FAULTS[fault]
    edit_config(package, breaking)
    report = doctor(package, fix=tmp_path / "fixed")
    assert next(item for item in report.diagnoses if item.finding.code == code).repair
    fixed = json.loads((tmp_path / "fixed" / "genai_config.json").read_text("utf-8"))
    entries = fixed["model"]["decoder"]["session_options"]["provider_options"]
    assert "cuda" in entries[0]
    assert entries[0]["cuda"].get("device_id", "0") == "0"
    assert code not in {finding.code for finding in validate(tmp_path / "fixed").findings}


def test_a_device_that_is_a_number_is_known_upstream_and_says_how_to_choose_another(package: Path) -> None:
    edit_config(package, _providers({"cuda": {"device_id": 1}}))
    found = next(item for item in doctor(package).diagnoses if item.finding.code == "C302")
    assert "CUDA_VISIBLE_DEVICES" in found.cause
    assert found.upstream == ("onnxruntime-genai#1545", "onnxruntime-genai#730")


PROCESSOR_FAULTS: dict[str, tuple[str, str, Callable[[Any], object]]] = {
    "no aligner": ("vision", "C403", lambda d: d["processor"].pop("output_aligner")),
    "no audio aligner": ("speech", "C403", lambda d: d["feature_extraction"].pop("output_aligner")),
    "an operator too few": ("vision", "C402", lambda d: d["processor"]["transforms"].pop(2)),
    "no operators": ("speech", "C401", lambda d: d["feature_extraction"].pop("sequence")),
    "other crops": ("vision", "C404", lambda d: _attrs(d, 1).update(dyhd_base_resolution=336)),
    "swapped channels": ("vision", "C408", lambda d: _attrs(d, 0).update(color_space="BGR")),
    "another word for cubic": ("vision", "C413", lambda d: _attrs(d, 4).update(interpolation="BICUBIC")),
    "crops with a fraction": ("vision", "C411", lambda d: _attrs(d, 1).update(dynamic_hd=12.0)),
    "whole numbers for fractions": ("vision", "C412", lambda d: _attrs(d, 3).update(mean=[1, 1, 1])),
    "an unknown attribute": ("vision", "C410", lambda d: _attrs(d, 1).update(bogus=1)),
    "one sample rate": ("speech", "C405", lambda d: _attrs(d, 0).update(target_sample_rates=16000)),
    "a negative limit": ("speech", "C406", lambda d: _attrs(d, 0).update(max_samples=-1)),
    "another compression": ("speech", "C407", lambda d: _attrs(d, 1).update(audio_compression_rate=4)),
}


def _attrs(document: dict[str, Any], index: int) -> Any:
    body = document.get("processor") or document["feature_extraction"]
    return (body.get("transforms") or body["sequence"])[index]["operation"]["attrs"]


@pytest.mark.parametrize("fault", PROCESSOR_FAULTS)
def test_a_processor_fault_is_repaired_in_its_own_file(package: Path, tmp_path: Path, fault: str) -> None:
    section, code, breaking = PROCESSOR_FAULTS[fault]
    edit_json(package / f"{section}_processor.json", breaking)
    report = doctor(package, fix=tmp_path / "fixed")
    assert next(item for item in report.diagnoses if item.finding.code == code).repair
    assert validate(tmp_path / "fixed").findings == ()


def test_crops_that_a_fine_tune_chose_stay_its_own(package: Path, tmp_path: Path) -> None:
    edit_json(package / "vision_processor.json", lambda d: _attrs(d, 1).update(dynamic_hd=12.0))
    doctor(package, fix=tmp_path / "fixed")
    assert _attrs(json.loads((tmp_path / "fixed" / "vision_processor.json").read_text("utf-8")), 1)["dynamic_hd"] == 12


@pytest.mark.parametrize(
    ("code", "breaking"),
    [
        ("C502", lambda d: d.update(tokenizer_class="AutoTokenizer")),
        ("C502", lambda d: d.pop("tokenizer_class")),
        (
            "C503",
            lambda d: d.update(chat_template=[{"name": "x", "template": "a"}, {"name": "default", "template": "b"}]),
        ),
    ],
)
def test_a_tokenizer_fault_is_repaired(
    package: Path, tmp_path: Path, code: str, breaking: Callable[[Any], object]
) -> None:
    edit_json(package / "tokenizer_config.json", breaking)
    assert code in _codes(doctor(package, fix=tmp_path / "fixed"))
    assert validate(tmp_path / "fixed").ok
    template = json.loads((tmp_path / "fixed" / "tokenizer_config.json").read_text("utf-8"))["chat_template"]
    assert template == "b" or code == "C502"


def test_a_mark_and_escapes_that_the_parser_refuses_are_written_out(package: Path, tmp_path: Path) -> None:
    config = genai_config()
    config["model"]["decoder"]["session_options"]["log_id"] = "modèle\\u \U0001f600"
    (package / "genai_config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(config).encode())
    report = doctor(package, fix=tmp_path / "fixed")
    assert {"C301", "C303"} <= _codes(report)
    fixed = (tmp_path / "fixed" / "genai_config.json").read_bytes()
    assert not fixed.startswith(b"\xef\xbb\xbf")
    assert json.loads(fixed) == config
    assert "modèle".encode() in fixed


def test_a_section_that_is_missing_is_written_from_the_graph_that_lies_there(package: Path, tmp_path: Path) -> None:
    edit_config(package, lambda c: c["model"].pop("embedding"))
    report = doctor(package, fix=tmp_path / "fixed")
    assert "C313" in _codes(report)
    section = json.loads((tmp_path / "fixed" / "genai_config.json").read_text("utf-8"))["model"]["embedding"]
    assert section == genai_config()["model"]["embedding"]


# ------------------------------------------------------------------ files


def test_data_left_behind_gets_the_name_that_the_graph_wants(package: Path, tmp_path: Path) -> None:
    (package / DATA_FILE).rename(package / "decoder.onnx.data")
    report = doctor(package, fix=tmp_path / "fixed")
    found = next(item for item in report.diagnoses if item.finding.code == "C203")
    assert found.repair == f"decoder.onnx.data becomes {DATA_FILE}"
    assert (tmp_path / "fixed" / DATA_FILE).is_file()
    assert not (tmp_path / "fixed" / "decoder.onnx.data").exists()
    assert validate(tmp_path / "fixed").ok


def test_dead_bytes_go_and_every_weight_stays(package: Path, tmp_path: Path) -> None:
    size = (package / DATA_FILE).stat().st_size
    with (package / DATA_FILE).open("r+b") as file:
        file.truncate(size + 100_000 + 1024)
        file.seek(size)
        file.write(b"\x01" * 100_000)
        file.seek(size + 100_000)
        file.write(bytes(range(256)) * 4)

    def move(model: onnx.ModelProto) -> None:
        entry = next(e for e in named(model.graph.initializer, "qkv").external_data if e.key == "offset")
        entry.value = str(size + 100_000 - 1024)

    edit_graph(package, "decoder", move)
    report = doctor(package, fix=tmp_path / "fixed")
    assert "C220" in _codes(report)
    assert validate(tmp_path / "fixed").findings == ()
    before, after = (
        {t.name: t.raw_data for t in onnx.load(folder / FILES["decoder"]).graph.initializer if t.name == "qkv"}
        for folder in (package, tmp_path / "fixed")
    )
    assert before == after


def test_a_data_file_that_nothing_refers_to_stays_behind(package: Path, tmp_path: Path) -> None:
    (package / "old.onnx.data").write_bytes(b"x" * 5000)
    assert "C221" in _codes(doctor(package, fix=tmp_path / "fixed"))
    assert not (tmp_path / "fixed" / "old.onnx.data").exists()


def test_a_pointer_in_place_of_data_is_called_that(package: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
    (package / DATA_FILE).write_bytes(pointer)
    found = next(item for item in doctor(package).diagnoses if item.finding.code == "D810")
    assert (found.finding.where, found.finding.expected) == (DATA_FILE, "12345 bytes")


def test_a_missing_processor_is_written_and_compared_with_what_the_manifest_lists(
    package: Path, tmp_path: Path
) -> None:
    from phi4mm_export.spec.json_text import json_bytes
    from phi4mm_export.spec.processors import ProcessorValues, vision_processor

    for name, values in (("same", ProcessorValues()), ("other", ProcessorValues(dynamic_hd=12))):
        (package / "vision_processor.json").write_bytes(json_bytes(vision_processor(values)))
        seal(package)
        (package / "vision_processor.json").unlink()
        report = doctor(package, fix=tmp_path / name)
        found = next(item for item in report.diagnoses if item.finding.code == "C342")
        assert ("very bytes" in found.repair) is (name == "same")
        assert validate(tmp_path / name).ok


def test_damage_junk_and_losses_are_told_from_the_manifest(package: Path, tmp_path: Path) -> None:
    seal(package)
    with (package / DATA_FILE).open("r+b") as file:
        file.write(b"\x01")
    (package / ".DS_Store").write_bytes(b"\0")
    report = doctor(package, fix=tmp_path / "fixed")
    assert {(i.finding.code, i.finding.where) for i in report.diagnoses} >= {("D801", DATA_FILE), ("D803", ".DS_Store")}
    assert not (tmp_path / "fixed" / ".DS_Store").exists()
    assert [item.finding.where for item in report.left if item.finding.code == "D801"] == [DATA_FILE]
    assert not report.ok


def test_the_manifest_of_the_copy_follows_the_repair_and_nothing_else(package: Path, tmp_path: Path) -> None:
    edit_config(package, lambda c: c["search"].update(max_length=131073))
    seal(package)
    assert doctor(package, fix=tmp_path / "fixed").ok
    assert verify(tmp_path / "fixed").ok


def test_a_package_without_a_manifest_gets_none(package: Path, tmp_path: Path) -> None:
    doctor(package, fix=tmp_path / "fixed")
    assert not (tmp_path / "fixed" / "phi4mm.json").exists()


def test_hard_links_are_nothing_wrong_and_the_copy_has_none(package: Path, tmp_path: Path) -> None:
    for path in package.iterdir():
        os.link(path, tmp_path / path.name)
    report = doctor(package, fix=tmp_path / "fixed")
    assert report.diagnoses == ()
    assert {path.stat().st_nlink for path in (tmp_path / "fixed").iterdir()} == {1}


def test_a_link_that_leads_out_is_not_followed_into_the_copy(package: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (package / "note.txt").symlink_to(tmp_path / "secret")
    (package / "inside.json").symlink_to("tokenizer.json")
    doctor(package, fix=tmp_path / "fixed")
    assert not (tmp_path / "fixed" / "note.txt").exists()
    assert not (tmp_path / "fixed" / "inside.json").is_symlink()
    assert (tmp_path / "fixed" / "inside.json").read_bytes() == (package / "tokenizer.json").read_bytes()


def test_what_only_a_person_can_decide_is_left_and_said(package: Path, tmp_path: Path) -> None:
    def swap(document: dict[str, Any]) -> None:
        entries = {entry["content"]: entry for entry in document["added_tokens"]}
        entries["<|endoftext10|>"]["id"], entries["<|end|>"]["id"] = 200020, 200010

    edit_json(package / "tokenizer.json", swap)
    report = doctor(package, fix=tmp_path / "fixed")
    found = next(item for item in report.diagnoses if item.finding.code == "C501")
    assert (found.repair, found.upstream) == ("", ("onnxruntime-genai#1680",))
    assert "C501" in {item.finding.code for item in report.left}
    assert not report.ok


# ------------------------------------------------------------------ what only a diagnosis asks


def test_a_vision_graph_in_4_bits_is_the_known_cause_of_poor_answers(package: Path) -> None:
    def coarse(model: onnx.ModelProto) -> None:
        node = onnx.helper.make_node("MatMulNBits", ["a", "b", "c"], ["d"], domain="com.microsoft", bits=4, K=1, N=1)
        model.graph.node.append(node)

    edit_graph(package, "vision", coarse)
    found = next(item for item in doctor(package).diagnoses if item.finding.code == "D811")
    assert found.upstream == ("onnxruntime-genai#1383",)
    seal(package, quantization=({"component": "vision", "method": "gptq"},))
    assert "D811" not in _codes(doctor(package))


def test_the_memory_that_max_length_reserves_is_told_in_bytes(package: Path) -> None:
    edit_config(package, lambda c: c["search"].update(max_length=131072))
    assert "D812" not in _codes(doctor(package))

    def widen(model: onnx.ModelProto) -> None:
        for value in [*model.graph.input, *model.graph.output]:
            if "past_key_values" in value.name or value.name.startswith("present"):
                value.type.tensor_type.shape.dim[3].dim_value = 4096

    edit_graph(package, "decoder", widen)
    found = next(item for item in doctor(package).diagnoses if item.finding.code == "D812")
    assert "8.0 GiB" in found.finding.what


def test_every_issue_number_and_every_cause_is_documented() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text("utf-8")
    issues = {issue for cause in CAUSES.values() for issue in cause.upstream}
    assert {issue for issue in issues if issue not in text} == set()
