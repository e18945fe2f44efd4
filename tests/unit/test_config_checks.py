"""genai_config.json, processor and tokenizer checks: one broken thing, one code, the right place and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.packages import build_package, drop, edit_config, edit_graph, edit_json, named, only

from phi4mm_export.checks.report import Severity
from phi4mm_export.pipeline.validate import validate

Change = Callable[[Any], object]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return build_package(tmp_path / "package")


def _decoder(key: str, value: object) -> Change:
    return lambda c: c["model"]["decoder"].update({key: value})


def _model(key: str, value: object) -> Change:
    return lambda c: c["model"].update({key: value})


def _search(key: str, value: object) -> Change:
    return lambda c: c["search"].update({key: value})


def _providers(*entries: object) -> Change:
    return lambda c: c["model"]["decoder"]["session_options"].update(provider_options=list(entries))


ERRORS: dict[str, tuple[Change, str, str]] = {
    "an unknown key of a section": (_decoder("foo", 1), "C302", "model.decoder.foo"),
    "a comment": (_model("_comment", "x"), "C302", "model._comment"),
    "a string for a number": (_model("vocab_size", "200064"), "C302", "model.vocab_size"),
    "a number for a bool": (_search("early_stopping", 1), "C302", "search.early_stopping"),
    "a fraction for an integer": (_search("top_k", 1.5), "C302", "search.top_k"),
    "a number as device": (
        _providers({"cuda": {"device_id": 1}}),
        "C302",
        "model.decoder.session_options.provider_options[0].cuda.device_id",
    ),
    "a provider called gpu": (_providers({"gpu": {}}), "C331", "provider_options[0].gpu"),
    "options of the CPU": (_providers({"CPU": {"a": "b"}}), "C332", "provider_options[0].CPU"),
    "onnxruntime's word for an arena strategy": (
        _providers({"cuda": {"arena_extend_strategy": "kSameAsRequested"}}),
        "C334",
        "arena_extend_strategy",
    ),
    "captured graphs": (_providers({"cuda": {"enable_cuda_graph": "1"}}), "C336", "enable_cuda_graph"),
    "another model type": (_model("type", "phi3v"), "C311", "model.type"),
    "a context length of 0": (_model("context_length", 0), "C312", "model.context_length"),
    "no vision section": (lambda c: c["model"].pop("vision"), "C313", "model.vision"),
    "no speech section": (lambda c: c["model"].pop("speech"), "C313", "model.speech"),
    "no vocabulary size": (lambda c: c["model"].pop("vocab_size"), "C315", "model.vocab_size"),
    "a stop id beyond the vocabulary": (_model("eos_token_id", [200020, 200064]), "C317", "model.eos_token_id"),
    "a negative pad id": (_model("pad_token_id", -1), "C317", "model.pad_token_id"),
    "another image token": (_model("image_token_id", 5), "C319", "model.image_token_id"),
    "a length above the context": (_search("max_length", 131073), "C320", "search.max_length"),
    "a length of 0": (_search("max_length", 0), "C320", "search.max_length"),
    "a length with a fraction": (_search("max_length", 4096.0), "C320", "search.max_length"),
    "a length of null": (_search("max_length", None), "C320", "search.max_length"),
    "two beams": (_search("num_beams", 2), "C322", "search.num_beams"),
    "a path out of the package": (_decoder("filename", "../phi-4-mm-text.onnx"), "C341", "model.decoder.filename"),
    "an absolute path": (_decoder("filename", "/phi-4-mm-text.onnx"), "C341", "model.decoder.filename"),
    "a missing processor file": (
        lambda c: c["model"]["vision"].update(config_filename="other.json"),
        "C342",
        "model.vision.config_filename",
    ),
    "a mapped name that is not there": (
        lambda c: c["model"]["speech"]["inputs"].update(audio_embeds="audio"),
        "C344",
        "model.speech.inputs.audio_embeds",
    ),
    "cache names without a layer": (
        lambda c: c["model"]["decoder"]["inputs"].update(past_key_names="past_key_values"),
        "C347",
        "model.decoder.inputs.past_key_names",
    ),
    "another hidden size": (_decoder("hidden_size", 32), "C351", "model.decoder.hidden_size"),
    "another layer count": (_decoder("num_hidden_layers", 3), "C351", "model.decoder.num_hidden_layers"),
    "another head size": (_decoder("head_size", 16), "C351", "model.decoder.head_size"),
    "another KV head count": (_decoder("num_key_value_heads", 2), "C351", "model.decoder.num_key_value_heads"),
    "another head count": (_decoder("num_attention_heads", 4), "C351", "model.decoder.num_attention_heads"),
    "another vocabulary size": (_model("vocab_size", 200063), "C351", "model.vocab_size"),
    "an arena that is not there": (
        lambda c: c["model"]["vision"].update(run_options={"memory.enable_memory_arena_shrinkage": "gpu:0"}),
        "C337",
        "model.vision.run_options",
    ),
}


@pytest.mark.parametrize("fault", ERRORS)
def test_an_error_in_the_config_names_the_key(package: Path, fault: str) -> None:
    change, code, where = ERRORS[fault]
    edit_config(package, change)
    report = validate(package)
    assert int(report.exit_code) == 4
    findings = [finding for finding in report.errors if finding.code == code]
    assert findings, report.findings
    assert findings[0].where.startswith("genai_config.json: ")
    assert where in findings[0].where


WARNINGS: dict[str, tuple[Change, str]] = {
    "no stop token": (lambda c: c["model"].pop("eos_token_id"), "C316"),
    "a stop id twice": (_model("eos_token_id", [200020, 199999, 200020]), "C318"),
    "an adapter file": (lambda c: c["model"]["vision"].update(adapter_filename="a.onnx_adapter"), "C314"),
    "a turn end that does not stop": (_model("eos_token_id", 199999), "C506"),
    "towers left on the CPU": (
        lambda c: (
            _providers({"cuda": {"device_id": "0"}})(c),
            c["model"]["vision"].update(session_options={"provider_options": []}),
        ),
        "C335",
    ),
    "device 1": (_providers({"cuda": {"device_id": "1"}}), "C333"),
}


@pytest.mark.parametrize("fault", WARNINGS)
def test_a_trap_in_the_config_is_a_warning(package: Path, fault: str) -> None:
    change, code = WARNINGS[fault]
    edit_config(package, change)
    finding = only(validate(package, provider="cpu"), code)
    assert finding.severity is Severity.WARNING


def test_both_numbers_are_named_when_max_length_exceeds_the_context(package: Path) -> None:
    edit_config(package, _search("max_length", 131073))
    finding = only(validate(package), "C320")
    assert "131072" in finding.expected
    assert finding.found == "131073"


@pytest.mark.parametrize("context", [-1, 0, "long", None])
def test_no_length_is_asked_for_that_cannot_exist(package: Path, context: object) -> None:
    edit_config(package, _model("context_length", context))
    edit_config(package, _search("max_length", 0))
    finding = only(validate(package), "C320")
    assert finding.expected == "a whole number from 1 on"
    assert finding.fix == "write a length, without a fraction"


@pytest.mark.parametrize("context", [-1, 0, None])
def test_a_length_is_not_measured_against_a_context_that_cannot_be(package: Path, context: object) -> None:
    edit_config(package, _model("context_length", context))
    assert "C320" not in {finding.code for finding in validate(package).findings}


def test_a_misspelt_key_gets_the_nearest_known_one(package: Path) -> None:
    edit_config(package, _search("max_lenght", 5))
    assert "'max_length'" in only(validate(package), "C302").fix


@pytest.mark.parametrize("name", ["cuda", "CUDAExecutionProvider", "CUDA"])
def test_every_spelling_of_cuda_that_the_runtime_takes_is_fine(package: Path, name: str) -> None:
    edit_config(package, _providers({name: {"device_id": "0"}}))
    assert validate(package, provider="cpu").ok


def test_speech_may_be_left_out_with_both_names_empty(package: Path) -> None:
    edit_config(package, _model("speech", {"filename": "", "config_filename": ""}))
    report = validate(package)
    assert report.ok
    assert only(report, "C100").severity is Severity.NOTE


def test_a_byte_order_mark_is_refused(package: Path) -> None:
    path = package / "genai_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert not validate(package).ok
    only(validate(package), "C301")


def test_an_escape_that_the_runtimes_parser_lacks_is_refused(package: Path) -> None:
    path = package / "genai_config.json"
    path.write_text(path.read_text().replace('"phi4mm"', '"phi4m\\u006d"'))
    assert only(validate(package), "C303").where.startswith("genai_config.json")


def test_broken_json_is_reported_and_the_graphs_are_still_judged(package: Path) -> None:
    (package / "genai_config.json").write_text("{")
    report = validate(package)
    assert only(report, "C300").where == "genai_config.json"
    assert sum(row.status == "match" for row in report.rows) > 10


def test_a_concat_cache_cannot_share_its_buffer(package: Path) -> None:
    def concat(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
        node.output[1] = "kept"
        fresh = helper.make_node("Concat", ["past_key_values.0.key", "kept"], ["present.0.key"], axis=2)
        model.graph.node.insert(len(model.graph.node) - 2, fresh)

    edit_graph(package, "decoder", concat)
    assert only(validate(package), "C352").expected == "false"
    edit_config(package, _search("past_present_share_buffer", False))
    assert "C352" not in {finding.code for finding in validate(package).findings}


def test_one_input_name_with_two_types_is_refused(package: Path) -> None:
    extra = helper.make_tensor_value_info("attention_mask", TensorProto.FLOAT, ["n"])
    edit_graph(package, "vision", lambda model: model.graph.input.append(extra))
    finding = only(validate(package), "C348")
    assert (finding.expected, finding.found) in {("int64", "float"), ("float", "int64")}


def test_half_a_pair_of_recurrent_states_is_an_error(tmp_path: Path) -> None:
    package = build_package(tmp_path / "package", gated=True)
    edit_graph(package, "decoder", lambda model: drop(model.graph.input, "past_key_values.0.recurrent_state"))
    assert "recurrent_state" in only(validate(package), "C361").found


def test_a_dynamic_dim_in_a_recurrent_state_is_an_error(tmp_path: Path) -> None:
    package = build_package(tmp_path / "package", gated=True)

    def open_dim(model: onnx.ModelProto) -> None:
        named(model.graph.input, "past_key_values.0.conv_state").type.tensor_type.shape.dim[2].dim_param = "n"

    edit_graph(package, "decoder", open_dim)
    assert "past_key_values.0.conv_state" in only(validate(package), "C363").where


def _with_rope_switch(model: onnx.ModelProto) -> None:
    """Two tables, chosen by whether the total length exceeds 4096, as inputs 7 and 8 of the attention nodes."""
    branches = {}
    for name, rows in (("long", 131072), ("short", 4096)):
        table = TensorProto(name=f"cos_{name}", data_type=TensorProto.FLOAT, dims=[rows, 8])
        table.raw_data = bytes(rows * 8 * 4)
        model.graph.initializer.append(table)
        outputs = [helper.make_tensor_value_info(f"{name}_{i}", TensorProto.FLOAT, None) for i in range(2)]
        nodes = [helper.make_node("Identity", [table.name], [f"{name}_{i}"]) for i in range(2)]
        branches[name] = helper.make_graph(nodes, name, [], outputs)
    limit = numpy_helper.from_array(np.array(4096), "limit")
    model.graph.initializer.append(limit)
    nodes = [
        helper.make_node("Greater", ["total_64", "limit"], ["is_long"]),
        helper.make_node(
            "If", ["is_long"], ["cos", "sin"], then_branch=branches["long"], else_branch=branches["short"]
        ),
    ]
    for offset, node in enumerate(nodes):
        model.graph.node.insert(6 + offset, node)
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input.extend(["cos", "sin"])
            node.attribute.append(helper.make_attribute("do_rotary", 1))


def test_the_note_on_the_rope_switch_says_at_which_length(package: Path) -> None:
    edit_graph(package, "decoder", _with_rope_switch)
    report = validate(package)
    assert report.ok
    assert "beyond 4096 tokens" in only(report, "C371").what


def test_a_context_longer_than_the_rotary_tables_is_an_error(package: Path) -> None:
    edit_graph(package, "decoder", _with_rope_switch)
    edit_config(package, _model("context_length", 131073))
    finding = only(validate(package), "C370")
    assert "131072" in finding.expected


def _attrs(step: int) -> Callable[[Any], dict[str, Any]]:
    def find(document: Any) -> dict[str, Any]:
        body = document.get("processor") or document["feature_extraction"]
        attrs: dict[str, Any] = (body.get("transforms") or body["sequence"])[step]["operation"]["attrs"]
        return attrs

    return find


PROCESSORS: dict[str, tuple[str, Change, str]] = {
    "no image aligner": ("vision", lambda d: d["processor"].pop("output_aligner"), "C403"),
    "no audio aligner": ("speech", lambda d: d["feature_extraction"].pop("output_aligner"), "C403"),
    "a missing operator": ("vision", lambda d: d["processor"]["transforms"].pop(2), "C402"),
    "no operators": ("speech", lambda d: d["feature_extraction"].pop("sequence"), "C401"),
    "two crop sizes": ("vision", lambda d: _attrs(4)(d).update(dyhd_base_resolution=336), "C404"),
    "crops as a fraction": ("vision", lambda d: _attrs(1)(d).update(dynamic_hd=36.0), "C411"),
    "no crops": ("vision", lambda d: _attrs(1)(d).update(dynamic_hd=0), "C411"),
    "an unknown attribute": ("vision", lambda d: _attrs(1)(d).update(bogus=1), "C410"),
    "integers where fractions belong": ("vision", lambda d: _attrs(3)(d).update(std=[1, 1, 1]), "C412"),
    "one sample rate": ("speech", lambda d: _attrs(0)(d).update(target_sample_rates=16000), "C405"),
    "a negative limit": ("speech", lambda d: _attrs(0)(d).update(max_samples=-1), "C406"),
    "an unknown audio attribute": ("speech", lambda d: _attrs(1)(d).update({"logmel/bogus": 1}), "C410"),
    "a string for a number": ("speech", lambda d: _attrs(1)(d).update({"logmel/n_mel": "80"}), "C412"),
    "another compression": ("speech", lambda d: _attrs(1)(d).update(audio_compression_rate=4), "C407"),
}


@pytest.mark.parametrize("fault", PROCESSORS)
def test_a_trap_in_a_processor_file_is_an_error(package: Path, fault: str) -> None:
    kind, change, code = PROCESSORS[fault]
    edit_json(package / f"{kind}_processor.json", change)
    finding = only(validate(package), code)
    assert finding.severity is Severity.ERROR
    assert finding.where.startswith(f"{kind}_processor.json: ")


def test_unknown_names_in_the_lenient_group_are_fine(package: Path) -> None:
    edit_json(package / "speech_processor.json", lambda d: _attrs(1)(d).update({"logmel_8k/bogus": 1}))
    assert validate(package).findings == ()


def test_a_limit_on_samples_is_noted_in_seconds(package: Path) -> None:
    edit_json(package / "speech_processor.json", lambda d: _attrs(0)(d).pop("max_samples"))
    finding = only(validate(package), "C409")
    assert finding.severity is Severity.NOTE
    assert "30 s" in finding.what


def _move_placeholder(document: Any) -> None:
    entries = {entry["content"]: entry for entry in document["added_tokens"]}
    first, second = entries["<|endoftext10|>"], entries["<|end|>"]
    first["id"], second["id"] = second["id"], first["id"]


TOKENIZERS: dict[str, tuple[str, Change, str, str]] = {
    "a moved image placeholder": ("tokenizer.json", _move_placeholder, "C501", "<|endoftext10|>"),
    "an unknown class": ("tokenizer_config.json", lambda d: d.update(tokenizer_class="AutoTokenizer"), "C502", "class"),
    "no class": ("tokenizer_config.json", lambda d: d.pop("tokenizer_class"), "C502", "class"),
    "a list of templates": ("tokenizer_config.json", lambda d: d.update(chat_template=[]), "C503", "chat_template"),
    "a token beyond the vocabulary": (
        "tokenizer.json",
        lambda d: d["added_tokens"].append({"id": 300000, "content": "<|more|>"}),
        "C505",
        "added_tokens",
    ),
}


@pytest.mark.parametrize("fault", TOKENIZERS)
def test_a_trap_in_a_tokenizer_file_is_an_error(package: Path, fault: str) -> None:
    file, change, code, where = TOKENIZERS[fault]
    edit_json(package / file, change)
    finding = only(validate(package), code)
    assert finding.severity is Severity.ERROR
    assert finding.where.startswith(file)
    assert where in finding.where


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_tokenizer_file_is_an_error(package: Path, file: str) -> None:
    (package / file).unlink()
    assert only(validate(package), "C500").where == file


def test_a_placeholder_in_neither_file_is_an_error(package: Path) -> None:
    def without(document: Any) -> None:
        document["added_tokens"] = [e for e in document["added_tokens"] if e["content"] != "<|endoftext11|>"]

    edit_json(package / "tokenizer.json", without)
    edit_json(package / "tokenizer_config.json", lambda d: d["added_tokens_decoder"].pop("200011"))
    assert "<|endoftext11|>" in only(validate(package), "C501").where


def test_a_template_in_its_own_file_is_enough(package: Path) -> None:
    edit_json(package / "tokenizer_config.json", lambda d: d.pop("chat_template"))
    assert only(validate(package), "C504").severity is Severity.WARNING
    (package / "chat_template.jinja").write_text("{{ messages }}")
    assert validate(package).findings == ()


def test_a_tokenizer_in_its_own_folder_is_found(package: Path) -> None:
    (package / "tok").mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (package / file).rename(package / "tok" / file)
    edit_config(package, _model("tokenizer_dir", "tok"))
    assert validate(package).findings == ()
