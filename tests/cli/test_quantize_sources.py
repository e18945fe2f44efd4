"""`phi4mm quantize` on .onnx files whose data lie in odd places, or not where the graph says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from support.plain_models import write_feeds, write_model
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app
from phi4mm_export.errors import UsageError
from phi4mm_export.pipeline.quantize import quantize


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "in" / "model.onnx", external=True)


def test_a_graph_in_a_cache_of_links_is_quantized(model: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "a1"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(model.parent.iterdir())):
        file.rename(blobs / f"{number}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number}")
    feeds = write_feeds(tmp_path / "feeds", 9)
    result = run(snapshot / "model.onnx", "-o", tmp_path / "out.onnx", "--calibration", feeds)
    assert result.exit_code == 0, result.stderr


def test_a_missing_data_file_is_exit_3_before_any_sample_is_read(model: Path, tmp_path: Path) -> None:
    (model.parent / "model.weights").unlink()
    result = run(model, "-o", tmp_path / "out.onnx", "--calibration", tmp_path / "no_samples")
    assert result.exit_code == 3
    assert "model.onnx: w1: the external data cannot be read: the data file model.weights is missing" in result.stderr


def test_dims_that_promise_more_than_the_data_file_holds_cost_no_memory(model: Path, tmp_path: Path) -> None:
    graph = onnx.load(model, load_external_data=False)
    weight = next(tensor for tensor in graph.graph.initializer if tensor.name == "w1")
    weight.dims[0] = 1 << 40
    del weight.external_data[:]
    weight.external_data.add(key="location", value="model.weights")
    onnx.save(graph, model)
    result = run(model, "-o", tmp_path / "out.onnx", "--method", "rtn")
    assert result.exit_code == 3
    assert "w1: the external data cannot be read: the data file model.weights ends before the tensor" in result.stderr


def test_data_at_any_offset_are_read(model: Path, tmp_path: Path) -> None:
    graph = onnx.load(model, load_external_data=False)
    data = model.parent / "model.weights"
    data.write_bytes(b"\0" * 3 + data.read_bytes())
    for tensor in graph.graph.initializer:
        facts = {entry.key: entry.value for entry in tensor.external_data}
        del tensor.external_data[:]
        for key, value in (facts | {"offset": str(int(facts.get("offset", "0")) + 3)}).items():
            tensor.external_data.add(key=key, value=value)
    onnx.save(graph, model)
    same = write_model(tmp_path / "same" / "model.onnx", external=True)
    for source, target in ((model, "a.onnx"), (same, "b.onnx")):
        assert run(source, "-o", tmp_path / target, "--method", "rtn").exit_code == 0
    assert (tmp_path / "a.onnx.data").read_bytes() == (tmp_path / "b.onnx.data").read_bytes()


def test_a_weight_of_an_unknown_element_type_stays_with_its_reason(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in" / "model.onnx", dtype=np.float64)
    result = run(model, "-o", tmp_path / "out.onnx", "--method", "rtn")
    assert result.exit_code == 5
    assert "first is double, not float32 or float16" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gtpq"}, "--method: expected gptq or rtn or none, found 'gtpq'"),
        ({"engine": "torch"}, "--engine: expected native or onnxruntime or neural-compressor, found 'torch'"),
        ({"order": "random"}, "--order: expected act or natural, found 'random'"),
    ],
)
def test_a_misspelt_choice_from_python_is_a_usage_error(
    model: Path, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        quantize(model, tmp_path / "out.onnx", calibration=tmp_path, **options)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_the_order_of_a_list_the_jobs_and_the_current_folder_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "in" / "model.onnx")
    feeds = sorted(write_feeds(tmp_path / "feeds", 9).iterdir())
    (tmp_path / "a.txt").write_text("".join(f"{file}\n" for file in feeds))
    (tmp_path / "b.txt").write_text("".join(f"feeds/{file.name}\n" for file in reversed(feeds)))
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "in")
    assert run("model.onnx", "-o", "../a/out.onnx", "--calibration", "../a.txt", "--jobs", 1).exit_code == 0
    monkeypatch.chdir(tmp_path)
    assert run(model, "-o", tmp_path / "b" / "out.onnx", "--calibration", "b.txt", "--jobs", 2).exit_code == 0
    for file in ("out.onnx", "out.onnx.data"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
