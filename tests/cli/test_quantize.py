"""`phi4mm quantize` as it is typed, on plain .onnx files."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.plain_models import HIDDEN, OUT, WIDTH, write_feeds, write_model
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.errors import QualityError, UsageError
from phi4mm_export.pipeline.quantize import quantize
from phi4mm_export.pipeline.quantize_gate import split


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def output_error(model: Path, found: Path, feeds: Path) -> float:
    """Relative L2 between two models' outputs over all feeds, from onnxruntime."""
    sessions = [ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]) for path in (model, found)]
    outputs = [[s.run(None, dict(np.load(f)))[0] for f in sorted(feeds.iterdir())] for s in sessions]
    ours, theirs = (np.concatenate(side).astype(np.float64) for side in (outputs[1], outputs[0]))
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def test_a_plain_model_becomes_a_valid_smaller_one_that_computes_nearly_the_same(
    model: Path, feeds: Path, tmp_path: Path
) -> None:
    result = run(model, "-o", tmp_path / "out.onnx", "--calibration", feeds)
    assert result.exit_code == 0, result.stderr
    assert names(tmp_path) == ["feeds", "in", "out.onnx", "out.onnx.data"]
    onnx.checker.check_model(str(tmp_path / "out.onnx"))
    graph = onnx.load(tmp_path / "out.onnx")
    assert [node.op_type for node in graph.graph.node].count("MatMulNBits") == 2
    assert "com.microsoft" in [entry.domain for entry in graph.opset_import]
    assert output_error(model, tmp_path / "out.onnx", feeds) < 0.1
    assert "2 weights (2 gptq), 4 bits, blocks of 32" in result.stdout
    assert "y on 1 held-out sample: relative L2" in result.stdout


@pytest.mark.parametrize(
    "form",
    [
        {"names": False},
        {"gemm": True},
        {"dtype": np.float16},
        {"external": True},
        {"names": False, "gemm": True, "dtype": np.float16, "external": True},
    ],
    ids=["without names", "Gemm", "float16", "external data", "all of these"],
)
def test_models_come_in_many_forms(tmp_path: Path, form: dict[str, object]) -> None:
    model = write_model(tmp_path / "model.onnx", **form)  # type: ignore[arg-type]
    feeds = write_feeds(tmp_path / "feeds", 3, dtype=form.get("dtype", np.float32))  # type: ignore[arg-type]
    report = quantize(model, tmp_path / "out.onnx", calibration=feeds)
    assert [(layer.K, layer.N, layer.method_used) for layer in report.layers] == [
        (WIDTH, HIDDEN, "gptq"),
        (HIDDEN, OUT, "gptq"),
    ]
    assert output_error(model, tmp_path / "out.onnx", feeds) < 0.1


def test_rounding_needs_no_samples_and_says_that_nothing_was_judged(model: Path, tmp_path: Path) -> None:
    result = run(model, "-o", tmp_path / "out.onnx", "--method", "rtn", "--bits", 8, "--block-size", 64)
    assert result.exit_code == 0
    assert "2 weights (2 rtn), 8 bits, blocks of 64" in result.stdout
    assert "was not judged" in result.stderr


def test_method_none_leaves_the_weights_as_they_are(model: Path, feeds: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "out.onnx", method="none")
    assert report.count("kept") == 2
    assert output_error(model, tmp_path / "out.onnx", feeds) == 0


def test_the_report_is_one_json_document(model: Path, feeds: Path, tmp_path: Path) -> None:
    result = run(model, "-o", tmp_path / "out.onnx", "--calibration", feeds, "--json", "--seed", 3, "--jobs", 1)
    report = json.loads(result.stdout)
    assert report["calibration"]["samples"] == 9
    assert len(report["calibration"]["sha256"]) == 9
    assert report["layers"] == {"gptq": 2, "rtn": 0, "kept": 0}
    assert [layer["weight"] for layer in report["per_layer"]] == ["w1", "w2"]
    assert report["gate"]["quantized"]["mean_rel_l2"] < report["gate"]["rounded"]["mean_rel_l2"]
    assert [file["name"] for file in report["files"]] == ["out.onnx", "out.onnx.data"]


def test_every_weight_is_listed_with_its_error_when_asked(model: Path, feeds: Path, tmp_path: Path) -> None:
    result = run(model, "-o", tmp_path / "out.onnx", "--calibration", feeds, "-v")
    table = result.stdout.splitlines()
    assert table[0].split()[:5] == ["layer", "K", "x", "N", "how"]
    assert table[1].split()[:5] == ["first", str(WIDTH), "x", str(HIDDEN), "gptq"]


def test_gptq_without_samples_says_what_it_needs(model: Path, tmp_path: Path) -> None:
    result = run(model, "-o", tmp_path / "out.onnx", "--method", "gptq")
    assert result.exit_code == 2
    assert "gptq was asked for without calibration samples" in result.stderr
    assert "--calibration with a folder, list (.txt), glob or .zip" in result.stderr


def test_nothing_is_left_when_samples_are_missing(model: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("gone.npz\n", encoding="utf-8")
    result = run(model, "-o", tmp_path / "out.onnx", "--calibration", tmp_path / "list.txt")
    assert result.exit_code == 2
    assert "line 1: gone.npz" in result.stderr
    assert names(tmp_path) == ["in", "list.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", 5], "5 bits were asked for"),
        (["--block-size", 48], "a block size of 48 was asked for"),
        (["--damp", 2], "a damping of 2 was asked for"),
        (["--accuracy-level", 7], "accuracy level 7 was asked for"),
        (["--max-rel-l2", 0], "expected a limit above 0"),
        (["--validation", "nowhere"], "--validation nowhere: the file or folder does not exist"),
        (["--seed", -1], "greater than or equal to 0"),
        (["--component", "vision"], "names a graph of a package"),
        (["--calibration", "builtin"], "no builtin set for a plain .onnx file"),
    ],
)
def test_options_without_sense_are_exit_2(model: Path, tmp_path: Path, options: list[object], message: str) -> None:
    result = run(model, "-o", tmp_path / "out.onnx", "--method", "rtn", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_target_for_a_plain_model_must_be_an_onnx_file(model: Path, tmp_path: Path) -> None:
    result = run(model, "-o", tmp_path / "out", "--method", "rtn")
    assert result.exit_code == 2
    assert "write out.onnx" in result.stderr


def test_an_existing_target_is_replaced_only_when_asked(model: Path, tmp_path: Path) -> None:
    first = run(model, "-o", tmp_path / "out.onnx", "--method", "rtn")
    refused = run(model, "-o", tmp_path / "out.onnx", "--method", "rtn", "--bits", 8)
    before = (tmp_path / "out.onnx").read_bytes()
    replaced = run(model, "-o", tmp_path / "out.onnx", "--method", "rtn", "--bits", 8, "--overwrite")
    assert (first.exit_code, refused.exit_code, replaced.exit_code) == (0, 2, 0)
    assert (tmp_path / "out.onnx").read_bytes() != before
    assert names(tmp_path) == ["in", "out.onnx", "out.onnx.data"]


def test_nothing_quantized_is_a_failure(model: Path, tmp_path: Path) -> None:
    result = run(model, "-o", tmp_path / "out.onnx", "--method", "rtn", "--exclude", "*")
    assert result.exit_code == 5
    assert not (tmp_path / "out.onnx").exists()


def test_weights_and_nodes_can_be_left_out_and_chosen(model: Path, tmp_path: Path) -> None:
    left_out = quantize(model, tmp_path / "a.onnx", method="rtn", exclude=["first"])
    chosen = quantize(model, tmp_path / "b.onnx", method="rtn", include=["w1"])
    assert {layer.weight: layer.method_used for layer in left_out.layers} == {"w1": "kept", "w2": "rtn"}
    assert {layer.weight: layer.method_used for layer in chosen.layers} == {"w1": "rtn", "w2": "kept"}


def test_a_missed_limit_is_exit_5_with_figure_and_threshold_and_publishes_nothing(
    model: Path, feeds: Path, tmp_path: Path
) -> None:
    result = run(model, "-o", tmp_path / "out.onnx", "--calibration", feeds, "--max-rel-l2", 0.001)
    assert result.exit_code == 5
    assert "y, 1 held-out sample: relative L2 error 0.0" in result.stderr
    assert "allowed at most 0.001" in result.stderr
    assert names(tmp_path) == ["feeds", "in"]


def test_the_result_is_kept_all_the_same_when_asked(model: Path, feeds: Path, tmp_path: Path) -> None:
    options = ["--calibration", feeds, "--max-rel-l2", 0.001, "--no-quality-gate"]
    result = run(model, "-o", tmp_path / "out.onnx", *options)
    assert result.exit_code == 0
    assert "not judged (--no-quality-gate)" in result.stderr


def test_a_graph_that_is_no_valid_onnx_is_exit_3_before_any_work(model: Path, feeds: Path, tmp_path: Path) -> None:
    graph = onnx.load(model)
    nodes = list(graph.graph.node)
    del graph.graph.node[:]
    graph.graph.node.extend(reversed(nodes))
    onnx.save(graph, model)
    result = run(model, "-o", tmp_path / "out.onnx", "--calibration", feeds)
    assert result.exit_code == 3
    assert "model.onnx: the graph is not valid ONNX: Nodes in a graph must be topologically sorted" in result.stderr
    assert names(tmp_path) == ["feeds", "in"]


def test_a_result_without_any_error_passes(tmp_path: Path, feeds: Path) -> None:
    model = write_model(tmp_path / "in" / "model.onnx")
    graph = onnx.load(model)
    for tensor in graph.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros_like(values), tensor.name))
    onnx.save(graph, model)
    result = run(model, "-o", tmp_path / "out.onnx", "--calibration", feeds, "--no-bias-correction")
    assert result.exit_code == 0, result.stderr


def test_a_graph_without_a_float_output_is_quantized_unjudged_only(model: Path, feeds: Path, tmp_path: Path) -> None:
    graph = onnx.load(model)
    graph.graph.node.append(onnx.helper.make_node("ArgMax", ["y"], ["best"], axis=1))
    del graph.graph.output[:]
    graph.graph.output.append(onnx.helper.make_tensor_value_info("best", onnx.TensorProto.INT64, ["b", 1]))
    onnx.save(graph, model)
    options = [model, "-o", tmp_path / "out.onnx", "--calibration", feeds]
    result = run(*options)
    assert result.exit_code == 3
    assert "no output with float elements to judge by; make the values before it an output, or pass" in result.stderr
    assert run(*options, "--no-quality-gate").exit_code == 0


def test_samples_of_another_world_do_not_pass_as_better_than_rounding(model: Path, tmp_path: Path) -> None:
    calibration = tmp_path / "ones"
    calibration.mkdir()
    for number in range(3):
        np.savez(calibration / f"{number}.npz", x=np.full((4, WIDTH), 1.0 + number, np.float32))
    noise = tmp_path / "noise"
    noise.mkdir()
    np.savez(noise / "0.npz", x=np.random.default_rng(0).standard_normal((64, WIDTH)).astype(np.float32))
    with pytest.raises(QualityError, match="not better than rounding to nearest"):
        quantize(model, tmp_path / "out.onnx", calibration=calibration, validation=noise, bias_correction=True)


def test_validation_samples_take_the_place_of_held_out_ones(model: Path, feeds: Path, tmp_path: Path) -> None:
    others = write_feeds(tmp_path / "others", 4, seed=1)
    report = quantize(model, tmp_path / "out.onnx", calibration=feeds, validation=others)
    assert report.gate is not None
    assert (report.gate.judged_on, report.gate.samples) == ("validation samples", 4)


def test_the_published_model_is_calibrated_on_all_samples(model: Path, feeds: Path, tmp_path: Path) -> None:
    judged = quantize(model, tmp_path / "a.onnx", calibration=feeds)
    unjudged = quantize(model, tmp_path / "b.onnx", calibration=feeds, quality_gate=False)
    assert judged.samples == unjudged.samples == 9
    assert judged.files[1].sha256 == unjudged.files[1].sha256


def test_the_order_of_files_and_their_names_change_no_byte_and_their_content_does(
    model: Path, feeds: Path, tmp_path: Path
) -> None:
    digests = [quantize(model, tmp_path / "a.onnx", calibration=feeds, jobs=1).files[1].sha256]
    (tmp_path / "list.txt").write_text("\n".join(f"feeds/{n:03d}.npz" for n in reversed(range(9))), encoding="utf-8")
    digests.append(quantize(model, tmp_path / "b.onnx", calibration=tmp_path / "list.txt", jobs=2).files[1].sha256)
    other = write_feeds(tmp_path / "other", 9, seed=2)
    different = quantize(model, tmp_path / "c.onnx", calibration=other, quality_gate=False).files[1].sha256
    assert digests[0] == digests[1]
    assert different not in digests


class Foreign:
    """onnxruntime's protocol and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.iterdir())
        self.at = 0

    def get_next(self) -> dict[str, np.ndarray] | None:
        self.at += 1
        return dict(np.load(self.files[self.at - 1])) if self.at <= len(self.files) else None

    def rewind(self) -> None:
        self.at = 0


def test_any_reader_gives_what_the_folder_gives(model: Path, feeds: Path, tmp_path: Path) -> None:
    from_folder = quantize(model, tmp_path / "a.onnx", calibration=feeds)
    from_reader = quantize(model, tmp_path / "b.onnx", reader=Foreign(feeds))
    assert from_folder.files[1].sha256 == from_reader.files[1].sha256


def test_samples_cannot_be_given_twice(model: Path, feeds: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="given twice"):
        quantize(model, tmp_path / "out.onnx", calibration=feeds, reader=Foreign(feeds))


def test_fewer_samples_are_chosen_by_the_seed(model: Path, feeds: Path, tmp_path: Path) -> None:
    reports = [
        quantize(model, tmp_path / f"{seed}.onnx", calibration=feeds, num_samples=3, seed=seed) for seed in (0, 1, 2)
    ]
    assert [report.samples for report in reports] == [3, 3, 3]
    assert len({report.digests for report in reports}) > 1


@pytest.mark.parametrize(
    ("count", "calibrated", "held"), [(1, 1, 1), (2, 1, 1), (7, 6, 1), (8, 7, 1), (16, 14, 2), (17, 15, 2)]
)
def test_every_eighth_sample_by_content_is_held_out(count: int, calibrated: int, held: int) -> None:
    digests = [f"{(number * 7) % 19:02d}" for number in range(count)]
    kept, left_out = split(digests)
    assert (len(kept), len(left_out)) == (calibrated, held)
    if count > 1:
        assert set(kept).isdisjoint(left_out)
    if count == 16:
        assert [sorted(digests).index(digests[index]) for index in left_out] == [7, 15]


def test_all_other_options_are_taken(model: Path, feeds: Path, tmp_path: Path) -> None:
    result = run(
        model, "-o", tmp_path / "out.onnx", "--calibration", f"{feeds}/*.npz", "--num-samples", 8, "--no-symmetric",
        "--damp", 0.05, "--order", "natural", "--no-sequential", "--no-bias-correction", "--accuracy-level", 4,
        "--budget", "1MiB", "--validation", feeds, "--skip-unreadable", "--work-dir", tmp_path / "work",
        "--engine", "native", "--quiet",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert names(tmp_path / "work") == ["phi4mm-work"]


def test_a_budget_buys_8_bits_for_some_weights(model: Path, feeds: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "out.onnx", calibration=feeds, budget=10_000)
    assert sorted(layer.bits for layer in report.layers) == [4, 8]
    assert report.nbytes_after <= 10_000


@pytest.mark.skipif(find_spec("torch") is None, reason="onnxruntime imports torch for its GPTQ")
def test_onnxruntimes_gptq_does_not_pass_the_gate_and_its_defects_are_named_when_it_is_kept(
    model: Path, feeds: Path, tmp_path: Path
) -> None:
    options = ["-o", tmp_path / "out.onnx", "--calibration", feeds, "--engine", "onnxruntime"]
    judged = run(model, *options)
    kept = run(model, *options, "--no-quality-gate")
    assert judged.exit_code == 5
    assert "not better than rounding to nearest" in judged.stderr
    assert kept.exit_code == 0, kept.stderr
    assert "compensates no error" in kept.stderr
    assert "2 weights (2 gptq), 4 bits" in kept.stdout


def test_onnxruntimes_result_replaces_an_older_one_in_the_current_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ([], ["--overwrite"]):
        result = run(model, "-o", "out.onnx", "--method", "rtn", "--engine", "onnxruntime", *words)
        assert result.exit_code == 0, result.stderr
    onnx.checker.check_model("out.onnx")


@pytest.mark.parametrize("method", ["rtn", "k_quant"])
def test_onnxruntimes_other_methods_need_no_samples(model: Path, feeds: Path, tmp_path: Path, method: str) -> None:
    report = quantize(model, tmp_path / "out.onnx", method=method, engine="onnxruntime")
    assert report.count(method) == 2
    assert names(tmp_path) == ["feeds", "in", "out.onnx", "out.onnx.data"]
    assert output_error(model, tmp_path / "out.onnx", feeds) < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "hqq"], "the engine native has no method hqq"),
        (["--method", "rtn", "--engine", "onnxruntime", "--bits", 8], "writes 4 bits whatever it is asked for"),
        (["--method", "rtn", "--engine", "onnxruntime", "--exclude", "first"], "does not heed --exclude"),
        (["--method", "rtn", "--engine", "onnxruntime", "--damp", 0.5], "does not heed --damp"),
    ],
)
def test_what_an_engine_would_get_wrong_in_silence_is_refused(
    model: Path, tmp_path: Path, options: list[object], message: str
) -> None:
    result = run(model, "-o", tmp_path / "out.onnx", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_neural_compressor_is_an_extra_that_is_named_when_it_is_missing(
    model: Path, feeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("neural_compressor", "neural_compressor.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    options = ["--calibration", feeds, "--engine", "neural-compressor", "--no-quality-gate"]
    result = run(model, "-o", tmp_path / "out.onnx", *options)
    assert result.exit_code == 6
    assert "phi4mm[inc]" in result.stderr


def test_the_help_has_an_example() -> None:
    assert "phi4mm quantize model.onnx -o model-int4.onnx" in run("--help").stdout.replace("\n", " ")
