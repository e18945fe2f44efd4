"""The quantizer's linear algebra in torch against the same in numpy: moments, factors, codes, files, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from phi4mm_export.errors import SystemLimitError, UsageError
from phi4mm_export.pipeline.export import export
from phi4mm_export.pipeline.quantize import quantize
from phi4mm_export.quant.algebra import Algebra, algebra_of
from phi4mm_export.quant.arithmetic import NotPositiveDefiniteError
from phi4mm_export.quant.engine import QuantResult, QuantSettings, quantize_graph
from phi4mm_export.quant.hessian import Moments, Pairs, moments
from phi4mm_export.quant.torch_device import device_memory, open_device
from phi4mm_export.spec.recipe import Precision, Recipe
from tests.quantize.small_graphs import Reader, feeds, two_layers

torch = pytest.importorskip("torch", reason='needs torch: pip install "phi4mm[reference]"')
pytestmark = pytest.mark.reference

BuildOnce = Callable[[str, Callable[[Path], object]], Path]
IN_NUMPY = QuantSettings(block_size=32, exact=False)
IN_TORCH = replace(IN_NUMPY, torch_device="cpu")
CHANNELS, OUTPUTS = 48, 20
HEAVY = np.logspace(1, -1, CHANNELS).astype(np.float32)


def tokens(count: int, seed: int) -> NDArray[np.float32]:
    """Channels of very different size, with a mean that is far from zero."""
    values = np.random.default_rng(seed).standard_normal((count, CHANNELS)) + 0.5
    return values.astype(np.float32) * HEAVY


def both(pairs: Pairs, **options: Any) -> tuple[Moments, Moments]:
    """The moments in numpy and in torch."""
    found = [
        moments(pairs, CHANNELS, flip=False, summing=algebra_of(settings).summing, **options)
        for settings in (IN_NUMPY, IN_TORCH)
    ]
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


def close(found: NDArray[Any] | None, expected: NDArray[Any] | None, tolerance: float) -> None:
    assert found is not None
    assert expected is not None
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def damped_hessian(channels: int) -> NDArray[np.float64]:
    x = np.random.default_rng(3).standard_normal((4 * channels, channels))
    x += np.random.default_rng(4).standard_normal((4 * channels, 1))
    hessian = x.T @ x
    hessian[np.diag_indices(channels)] += 0.01 * np.diagonal(hessian).mean()
    return hessian


def algebras() -> tuple[Algebra, Algebra]:
    return algebra_of(IN_NUMPY), algebra_of(IN_TORCH)


@pytest.mark.parametrize("count", [5, 700, 5000])
@pytest.mark.parametrize("behind_weights", [False, True])
def test_second_moments_are_those_of_numpy(count: int, behind_weights: bool) -> None:
    weights = np.random.default_rng(9).standard_normal((CHANNELS, OUTPUTS)).astype(np.float32)
    pairs = [(tokens(count, 0), tokens(count, 1)), (None, tokens(count, 2))]
    expected, found = both(pairs, weights=weights if behind_weights else None)
    assert (found.tokens, found.paired) == (expected.tokens, expected.paired)
    for name in ("hessian", "drift", "mean", "mean_exact"):
        close(getattr(found, name), getattr(expected, name), 1e-6)
    np.testing.assert_array_equal(found.hessian, found.hessian.T)


def test_one_stream_leaves_no_drift_on_the_device_either() -> None:
    x = tokens(300, 0)
    expected, found = both([(x, x)])
    assert (found.drift, expected.drift) == (None, None)
    close(found.hessian, expected.hessian, 1e-6)


def test_values_that_are_not_finite_show_in_the_moments_without_a_warning() -> None:
    x = tokens(10, 0)
    x[3, 2] = np.inf
    _, found = both([(x, x)])
    assert not np.isfinite(found.hessian[2]).any()


@pytest.mark.parametrize("channels", [1, 33, 300])
def test_the_factor_and_its_solutions_are_those_of_numpy(channels: int) -> None:
    ours, theirs = algebras()
    hessian, right = damped_hessian(channels), np.random.default_rng(5).standard_normal((channels, 7))
    v, there = ours.factor(hessian), theirs.factor(hessian)
    close(there.numpy(), v, 1e-10)
    close(theirs.solve(there, right), ours.solve(v, right), 1e-10)


def test_products_with_a_large_factor_are_those_of_numpy() -> None:
    ours, theirs = (each.math for each in algebras())
    left, right = damped_hessian(40), np.random.default_rng(5).standard_normal((40, 7))
    close(theirs.times(left)(right), ours.times(left)(right), 1e-12)
    close(theirs.coarsely(right)(left), ours.coarsely(right)(left), 1e-12)


@pytest.mark.parametrize("matrix", [np.array([[1.0, 2.0], [2.0, 1.0]]), np.array([[np.nan]]), -np.eye(3)])
def test_a_matrix_without_a_factor_is_refused_as_in_numpy(matrix: NDArray[np.float64]) -> None:
    for algebra in algebras():
        with pytest.raises(NotPositiveDefiniteError, match="pivot"):
            algebra.factor(matrix)


def run(folder: Path, settings: QuantSettings, *, work: Path | None = None) -> QuantResult:
    """A graph of two layers quantized; h has fewer channels than tokens, and the streams part after the first layer."""
    folder.mkdir()
    source = two_layers(folder / "m.onnx", channels=192)
    reader = Reader(feeds(12, 192, seed=1))
    return quantize_graph(source, folder / "q.onnx", reader=reader, settings=settings, work_dir=work)


def codes_of(folder: Path) -> NDArray[np.uint8]:
    """All codes of a graph, one byte each."""
    constants = onnx.load(folder / "q.onnx").graph.initializer
    packed = np.concatenate([numpy_helper.to_array(c).ravel() for c in constants if c.name.endswith(".codes")])
    return np.stack([packed & 15, packed >> 4])


@pytest.mark.parametrize(
    "changes",
    [{}, {"symmetric": False}, {"rotate": True}, {"block_size": 128}, {"order": "natural"}, {"bits": 8}],
    ids=["as it is", "zero points", "rotated", "large blocks", "natural order", "8 bits"],
)
def test_codes_agree_nearly_everywhere_and_errors_within_a_percent(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours, theirs = (
        run(tmp_path / name, replace(settings, **changes))
        for name, settings in (("numpy", IN_NUMPY), ("torch", IN_TORCH))
    )
    assert (codes_of(tmp_path / "torch") == codes_of(tmp_path / "numpy")).mean() > 0.99
    for found, expected in zip(theirs.layers, ours.layers, strict=True):
        assert (found.method_used, found.damp) == ("gptq", expected.damp)
        assert found.error_before == pytest.approx(expected.error_before, rel=0.01)
        assert found.error_after == pytest.approx(expected.error_after, rel=0.01)


def test_a_budget_gives_the_same_layers_8_bits(tmp_path: Path) -> None:
    bits = [
        [layer.bits for layer in run(tmp_path / name, replace(settings, budget_nbytes=9_000)).layers]
        for name, settings in (("numpy", IN_NUMPY), ("torch", IN_TORCH))
    ]
    assert bits[0] == bits[1]
    assert set(bits[0]) == {4, 8}


def test_jobs_do_not_change_a_byte(tmp_path: Path) -> None:
    for jobs in (1, 3):
        run(tmp_path / str(jobs), replace(IN_TORCH, jobs=jobs))
    assert (tmp_path / "1" / "q.onnx").read_bytes() == (tmp_path / "3" / "q.onnx").read_bytes()
    np.testing.assert_array_equal(codes_of(tmp_path / "1"), codes_of(tmp_path / "3"))


def test_layers_of_another_arithmetic_are_not_taken_up_and_those_of_the_same_are(tmp_path: Path) -> None:
    settings = (IN_NUMPY, IN_TORCH, IN_TORCH)
    reused = [run(tmp_path / str(n), each, work=tmp_path / "work").reused for n, each in enumerate(settings)]
    assert reused == [0, 0, 2]


def test_a_package_says_on_what_its_bytes_depend(built_once: BuildOnce, tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = Recipe.resolve(precision=Precision.FP32)
    source = built_once("reference-float", lambda folder: export(tiny_checkpoint, folder, recipe=recipe))
    options = {"calibration": "builtin", "num_samples": 2, "torch_device": "cpu", "quality_gate": False}
    quantize(source, tmp_path / "kept", save_statistics=tmp_path / "statistics", **options)
    del options["calibration"], options["num_samples"]
    quantize(source, tmp_path / "out", statistics=tmp_path / "statistics", **options)
    for name in ("kept", "out"):
        manifest = json.loads((tmp_path / name / "phi4mm.json").read_text(encoding="utf-8"))
        (entry,) = manifest["quantization"]
        assert (entry["exact"], entry["torch_device"]) == (False, "cpu")
        assert manifest["libraries"]["torch"] == torch.__version__
        classes = {each["name"]: each["reproducibility"] for each in manifest["files"]}
        assert {name for name, kind in classes.items() if kind == "same-machine"} == {
            "phi-4-mm-vision.onnx",
            "phi-4-mm-vision.onnx.data",
        }


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "meta", "0"])
def test_what_is_no_device_to_compute_on_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_device(name)
    assert str(caught.value).startswith(f"--torch-device {name}: expected a device on which torch")
    assert str(caught.value).endswith("or leave --torch-device out")


def test_too_little_memory_names_the_option() -> None:
    with (
        pytest.raises(SystemLimitError, match=r"--torch-device cpu: .*; leave --torch-device out"),
        device_memory("cpu"),
    ):
        torch.empty(1 << 60)


def test_too_little_memory_of_a_graphics_card_names_the_option() -> None:
    text = "CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has a total capacity of 8.00 GiB."
    message = r"--torch-device cuda: .* Tried to allocate 20.00 GiB. GPU 0 .*; leave --torch-device out"
    with pytest.raises(SystemLimitError, match=message), device_memory("cuda"):
        raise torch.OutOfMemoryError(text)


def test_other_faults_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="another fault"), device_memory("cuda"):
        raise RuntimeError("another fault")
