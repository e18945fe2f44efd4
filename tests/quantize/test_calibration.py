"""Calibration: samples, biases, fallbacks, statistics, resumption; the same bytes however a run is made."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from safetensors.numpy import load_file, save_file

from phi4mm_export.errors import UsageError
from phi4mm_export.quant import calibrate as calibration
from phi4mm_export.quant.engine import Method, QuantProgress, QuantResult, QuantSettings, quantize_graph
from tests.quantize.small_graphs import Feed, Reader, feeds, matrix, relative, run, save, two_layers

SETTINGS = QuantSettings(block_size=32)


def digest(folder: Path) -> str:
    """sha256 over the files of an output folder."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def quantized(
    source: Path, folder: Path, samples: list[Feed], settings: QuantSettings = SETTINGS, work: Path | None = None
) -> QuantResult:
    folder.mkdir()
    return quantize_graph(source, folder / "q.onnx", reader=Reader(samples), settings=settings, work_dir=work)


def test_other_calibration_data_give_other_bytes_and_the_same_data_the_same(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    for name, seed in (("a", 1), ("b", 2), ("again", 1)):
        quantized(source, tmp_path / name, feeds(6, 64, seed=seed))
    assert digest(tmp_path / "a") == digest(tmp_path / "again")
    assert digest(tmp_path / "a") != digest(tmp_path / "b")


def test_the_order_of_samples_and_the_number_of_jobs_do_not_matter(tmp_path: Path) -> None:
    source, samples = two_layers(tmp_path / "m.onnx"), feeds(6, 64, seed=1)
    quantized(source, tmp_path / "a", samples)
    quantized(source, tmp_path / "b", samples[::-1])
    quantized(source, tmp_path / "c", samples, QuantSettings(block_size=32, jobs=2))
    assert digest(tmp_path / "a") == digest(tmp_path / "b") == digest(tmp_path / "c")


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("exact", [False, True])
def test_one_and_two_blas_threads_give_the_same_bytes(tmp_path: Path, exact: bool) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from phi4mm_export.quant.engine import QuantSettings, quantize_graph\n"
        "from tests.quantize.small_graphs import Reader, feeds, two_layers\n"
        "out = Path(sys.argv[1]); source = two_layers(out.parent / 'm.onnx', channels=400)\n"
        f"settings = QuantSettings(block_size=64, exact={exact})\n"
        "quantize_graph(source, out / 'q.onnx', reader=Reader(feeds(9, 400, seed=1, rows=150)), settings=settings)\n"
    )
    root = Path(__file__).parents[2]
    for threads in ("1", "2"):
        (tmp_path / threads).mkdir()
        env = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(root)}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / threads)], check=True, env=env, cwd=tmp_path)
    assert digest(tmp_path / "1") == digest(tmp_path / "2")


def test_gptq_is_better_than_rounding_to_nearest_on_other_inputs(tmp_path: Path) -> None:
    source, test = two_layers(tmp_path / "m.onnx"), feeds(4, 64, seed=7)
    exact = run(source, test)
    errors = {}
    for method in (Method.RTN, Method.GPTQ):
        quantized(source, tmp_path / method, feeds(12, 64, seed=1), QuantSettings(method=method, block_size=32))
        errors[method] = relative(run(tmp_path / method / "q.onnx", test), exact)
    assert errors[Method.GPTQ] < 0.6 * errors[Method.RTN]


def test_bias_correction_keeps_the_mean_output(tmp_path: Path) -> None:
    """With and without an Add to take it; the mean is that of the float graph over the calibration inputs."""
    for number, nodes in enumerate(
        (
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])],
            [helper.make_node("Gemm", ["x", "w"], ["y"])],
        )
    ):
        weights = {"w": matrix(64, 40)} | ({"b": matrix(40, seed=2)} if len(nodes) > 1 else {})
        source = save(tmp_path / f"m{number}.onnx", nodes, weights, channels=64, width=40)
        samples = feeds(6, 64, seed=1)
        exact = run(source, samples).mean(axis=0)
        drift = []
        for correcting in (False, True):
            folder = tmp_path / f"{number}{correcting}"
            quantized(source, folder, samples, QuantSettings(block_size=32, bias_correction=correcting))
            drift.append(np.abs(run(folder / "q.onnx", samples).mean(axis=0) - exact).max())
        assert drift[1] < 1e-4 < drift[0]


def test_gptq_without_samples_is_refused(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="without calibration samples"):
        quantize_graph(source, tmp_path / "q.onnx", reader=None, settings=SETTINGS)
    with pytest.raises(UsageError, match="the calibration reader gave no sample"):
        quantize_graph(source, tmp_path / "q.onnx", reader=Reader([]), settings=SETTINGS)


def test_a_used_reader_is_rewound(tmp_path: Path) -> None:
    source, reader = two_layers(tmp_path / "m.onnx"), Reader(feeds(3, 64, seed=1))
    while reader.get_next() is not None:
        pass
    assert quantize_graph(source, tmp_path / "q.onnx", reader=reader, settings=SETTINGS).samples == 3


def test_channels_that_never_vary_are_reported_and_keep_finite_scales(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    source = save(tmp_path / "m.onnx", [node], {"w": matrix(64, 40)}, channels=64, width=40)
    samples = feeds(6, 64, seed=1)
    for sample in samples:
        sample["x"][:, 3:6] = 0
    result = quantized(source, tmp_path / "out", samples)
    assert result.layers[0].method_used == "gptq"
    assert result.layers[0].reason == "3 of 64 input channels never vary"
    assert np.isfinite(run(tmp_path / "out" / "q.onnx", feeds(2, 64, seed=3))).all()


def test_one_constant_sample_still_gives_a_finite_graph(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    result = quantized(source, tmp_path / "out", [{"x": np.ones((1, 64), np.float32)}])
    assert all(layer.reason.endswith("input channels never vary") for layer in result.layers)
    assert np.isfinite(run(tmp_path / "out" / "q.onnx", feeds(2, 64, seed=3))).all()


def test_inputs_that_are_not_finite_fall_back_to_rounding(tmp_path: Path) -> None:
    source, samples = two_layers(tmp_path / "m.onnx"), feeds(3, 64, seed=1)
    samples[1]["x"][0, 0] = np.inf
    result = quantized(source, tmp_path / "out", samples)
    assert {(layer.method_used, layer.reason) for layer in result.layers} == {
        ("rtn", "its calibration inputs are not finite")
    }


def test_saved_statistics_give_the_bytes_of_the_run_that_saved_them(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    kept = tmp_path / "statistics"
    reader = Reader(feeds(5, 64, seed=1))
    quantize_graph(source, tmp_path / "a" / "q.onnx", reader=reader, settings=SETTINGS, save_statistics=kept)
    again = quantize_graph(source, tmp_path / "b" / "q.onnx", reader=None, settings=SETTINGS, statistics=kept)
    assert again.samples == 5
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_statistics_of_another_graph_are_refused(tmp_path: Path) -> None:
    source, other = two_layers(tmp_path / "m.onnx"), two_layers(tmp_path / "n.onnx", named=False)
    kept = tmp_path / "statistics"
    reader = Reader(feeds(5, 64, seed=1))
    quantize_graph(source, tmp_path / "q.onnx", reader=reader, settings=SETTINGS, save_statistics=kept)
    with pytest.raises(UsageError, match="those of another graph"):
        quantize_graph(other, tmp_path / "p.onnx", reader=None, settings=SETTINGS, statistics=kept)


def test_statistics_of_a_drift_of_another_shape_are_refused(tmp_path: Path) -> None:
    source, kept = two_layers(tmp_path / "m.onnx"), tmp_path / "statistics"
    reader = Reader(feeds(5, 64, seed=1))
    quantize_graph(source, tmp_path / "q.onnx", reader=reader, settings=SETTINGS, save_statistics=kept)
    second = kept / "00001.safetensors"
    arrays = load_file(second)
    assert arrays["drift"].shape == (48, 40)
    save_file({**arrays, "drift": np.zeros((48, 48), np.float32)}, second)
    with pytest.raises(UsageError, match=r"the drift has the shape \[48, 48\]"):
        quantize_graph(source, tmp_path / "p.onnx", reader=None, settings=SETTINGS, statistics=kept)


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, samples, work = two_layers(tmp_path / "m.onnx"), feeds(5, 64, seed=1), tmp_path / "work"
    quantized(source, tmp_path / "clean", samples)

    def kill(step: QuantProgress) -> None:
        raise KeyboardInterrupt(step.layer)

    (tmp_path / "killed").mkdir()
    with pytest.raises(KeyboardInterrupt, match="first"):
        quantize_graph(
            source,
            tmp_path / "killed" / "q.onnx",
            reader=Reader(samples),
            settings=SETTINGS,
            work_dir=work,
            progress=kill,
        )
    solved: list[int] = []
    solve = calibration.solve_stage
    monkeypatch.setattr(calibration, "solve_stage", lambda *given: solved.append(len(given[0])) or solve(*given))
    result = quantized(source, tmp_path / "resumed", samples, work=work)
    assert (result.reused, solved) == (1, [1])
    assert digest(tmp_path / "resumed") == digest(tmp_path / "clean")


def test_changed_samples_or_settings_never_meet_finished_layers(tmp_path: Path) -> None:
    source, work = two_layers(tmp_path / "m.onnx"), tmp_path / "work"
    quantized(source, tmp_path / "a", feeds(5, 64, seed=1), work=work)
    assert quantized(source, tmp_path / "b", feeds(5, 64, seed=2), work=work).reused == 0
    other = QuantSettings(block_size=32, damp=0.02)
    assert quantized(source, tmp_path / "c", feeds(5, 64, seed=1), other, work=work).reused == 0
    assert quantized(source, tmp_path / "d", feeds(5, 64, seed=1), work=work).reused == 2


def test_a_damaged_finished_layer_is_made_again(tmp_path: Path) -> None:
    source, work = two_layers(tmp_path / "m.onnx"), tmp_path / "work"
    quantized(source, tmp_path / "a", feeds(5, 64, seed=1), work=work)
    kept = sorted(work.rglob("*.layer"))[0]
    data = bytearray(kept.read_bytes())
    data[-10] ^= 1
    kept.write_bytes(data)
    assert quantized(source, tmp_path / "b", feeds(5, 64, seed=1), work=work).reused == 1
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_a_budget_gives_8_bits_where_they_help_and_is_kept(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    least = quantized(source, tmp_path / "a", feeds(5, 64, seed=1)).nbytes_after
    budget = least + 1600
    settings = QuantSettings(block_size=32, budget_nbytes=budget)
    result = quantized(source, tmp_path / "b", feeds(5, 64, seed=1), settings)
    assert sorted(layer.bits for layer in result.layers) == [4, 8]
    assert least < result.nbytes_after <= budget
    with pytest.raises(UsageError, match="4 bits for all weights take"):
        quantized(source, tmp_path / "c", feeds(5, 64, seed=1), QuantSettings(block_size=32, budget_nbytes=100))


def test_no_work_folder_remains_beside_the_target(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    quantized(source, tmp_path / "out", feeds(2, 64, seed=1))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["q.onnx", "q.onnx.data"]


def test_graphs_of_token_ids_are_calibrated_on_random_ids_too(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gather", ["table", "ids"], ["x"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    arrays = {"table": matrix(400, 64), "w": matrix(64, 24, seed=1)}
    graph = helper.make_graph(
        nodes,
        "ids",
        [helper.make_tensor_value_info("ids", 7, ["m"])],
        [helper.make_tensor_value_info("y", 1, ["m", 24])],
        [numpy_helper.from_array(value, name) for name, value in arrays.items()],
    )
    source = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), source)
    samples: list[Feed] = [{"ids": np.arange(30)}, {"ids": np.arange(5, 35)}]
    everything: list[Feed] = [{"ids": np.arange(400)}]
    exact, errors = run(source, everything), []
    for augment in (True, False):
        result = quantized(source, tmp_path / str(augment), samples, QuantSettings(block_size=16, augment=augment))
        assert result.samples == 2
        errors.append(relative(run(tmp_path / str(augment) / "q.onnx", everything), exact))
    assert errors[0] < errors[1]
    quantized(source, tmp_path / "again", samples, QuantSettings(block_size=16))
    assert digest(tmp_path / "True") == digest(tmp_path / "again")
    quantized(source, tmp_path / "seed", samples, QuantSettings(block_size=16, seed=1))
    assert digest(tmp_path / "True") != digest(tmp_path / "seed")


def test_damping_grows_where_tokens_are_few(tmp_path: Path) -> None:
    source = two_layers(tmp_path / "m.onnx")
    few, many = (quantized(source, tmp_path / str(n), feeds(n, 64, seed=1)).layers[0].damp for n in (1, 30))
    assert few == pytest.approx(0.01 + 0.3 * 64 / 64)
    assert many == pytest.approx(0.01 + 0.3 * 64 / (30 * 64))


def test_a_vocabulary_of_many_outputs_is_calibrated(tmp_path: Path) -> None:
    width = 200_064  # so many that most tiles of outputs hold none of those that are judged
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="head")
    source = save(tmp_path / "wide.onnx", [node], {"w": matrix(16, width)}, channels=16, width=width)
    settings = QuantSettings(method=Method.GPTQ, block_size=16, augment=False)
    result = quantize_graph(source, tmp_path / "out.onnx", reader=Reader(feeds(2, 16, seed=1)), settings=settings)
    (layer,) = result.layers
    assert layer.method_used == "gptq"
    assert layer.error_after is not None
    assert 0 < layer.error_after < 0.3
