"""`.onnx_adapter` files of our own writing: what onnxruntime reads, and nothing half written."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from support.syscalls import ERRORS, Watch, failing, watched

from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.errors import PackageError, SystemLimitError
from phi4mm_export.package.adapter_file import AdapterTensor, adapter_nbytes, write_adapter
from phi4mm_export.package.publish import staged
from phi4mm_export.pipeline.export_adapters import adapter_file_sizes, write_adapter_files
from phi4mm_export.spec.contract import FloatType
from phi4mm_export.weights.streams import TensorSpec

KINDS = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16}


def tensor(name: str, values: NDArray[np.generic]) -> AdapterTensor:
    return AdapterTensor(TensorSpec(name, KINDS[values.dtype.name], values.shape), lambda: values)


def some_tensors() -> list[AdapterTensor]:
    """Names of every length modulo 8, both types, one and two dimensions, odd sizes."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((3 + n, 5)).astype("f2" if n % 2 else "f4") for n in range(9)]
    return [tensor("w" * (n + 1), v) for n, v in enumerate(values)] + [tensor("β", np.ones(7, np.float16))]


def read(path: Path) -> dict[str, NDArray[np.generic]]:
    parameters = onnxruntime.AdapterFormat.read_adapter(str(path)).get_parameters()
    return {name: value.numpy().copy() for name, value in parameters.items()}


def test_onnxruntime_reads_every_name_type_shape_and_value(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_adapter(tmp_path, "a.onnx_adapter", tensors)
    found = read(tmp_path / "a.onnx_adapter")
    assert sorted(found) == sorted(t.spec.name for t in tensors)
    for t in tensors:
        assert found[t.spec.name].dtype == t.read().dtype
        assert np.array_equal(found[t.spec.name], t.read())


def test_it_reads_the_versions_that_its_own_writer_states(tmp_path: Path) -> None:
    write_adapter(tmp_path, "a.onnx_adapter", some_tensors())
    found = onnxruntime.AdapterFormat.read_adapter(str(tmp_path / "a.onnx_adapter"))
    assert (found.get_format_version(), found.get_adapter_version(), found.get_model_version()) == (1, 1, 1)


def test_both_writers_say_the_same(tmp_path: Path) -> None:
    tensors = some_tensors()
    theirs = onnxruntime.AdapterFormat()
    theirs.set_adapter_version(1)
    theirs.set_model_version(1)
    values = {t.spec.name: onnxruntime.OrtValue.ortvalue_from_numpy(t.read()) for t in tensors}
    theirs.set_parameters(values)
    theirs.export_adapter(str(tmp_path / "theirs"))
    write_adapter(tmp_path, "ours", tensors)
    ours, others = read(tmp_path / "ours"), read(tmp_path / "theirs")
    assert set(ours) == set(others)
    assert all(np.array_equal(ours[name], others[name]) for name in ours)


def test_values_start_at_multiples_of_eight_bytes(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_adapter(tmp_path, "a", tensors)
    data = (tmp_path / "a").read_bytes()
    assert all(data.find(t.read().tobytes()) % 8 == 0 for t in tensors)


def test_the_size_is_known_before_a_value_is_read_and_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    tensors = some_tensors()
    expected = adapter_nbytes([t.spec for t in tensors])
    written = write_adapter(tmp_path, "a", tensors)
    data = (tmp_path / "a").read_bytes()
    assert (written.nbytes, len(data)) == (expected, expected)
    assert written.sha256 == hashlib.sha256(data).hexdigest()


def test_more_than_the_format_holds_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    huge = TensorSpec("w", ir.DataType.FLOAT, (2**15, 2**14))
    with pytest.raises(PackageError, match="an adapter file holds at most 2,147,483,647"):
        write_adapter(tmp_path, "a", [AdapterTensor(huge, lambda: np.zeros(0))])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_disk_that_fails_at_any_write_publishes_no_adapter_file(tmp_path: Path, error: str, sticky: bool) -> None:
    def publish(on_call: object) -> int:
        with (
            watched(Watch(tmp_path, on_call, sync=False)) as watch,  # type: ignore[arg-type]
            staged(tmp_path / "out", overwrite=True) as folder,
        ):
            write_adapter(folder, "a.onnx_adapter", some_tensors())
            (folder / "genai_config.json").write_text("{}")
        return watch.calls

    total = publish(lambda _number, _call: 0)
    whole = (tmp_path / "out" / "a.onnx_adapter").read_bytes()
    refused = 0
    for number in range(1, total + 1):
        try:
            publish(failing(number, ERRORS[error], sticky=sticky))
        except SystemLimitError:
            refused += 1
        if (tmp_path / "out").exists():
            assert (tmp_path / "out" / "a.onnx_adapter").read_bytes() == whole
        publish(lambda _number, _call: 0)
    assert refused > total // 2


def test_short_writes_are_continued(tmp_path: Path) -> None:
    whole = write_adapter(tmp_path, "clean", some_tensors())
    with watched(Watch(tmp_path, lambda _number, call: ERRORS["short write"] if call == "write" else 0)):
        assert write_adapter(tmp_path, "short", some_tensors()).sha256 == whole.sha256
    assert (tmp_path / "short").read_bytes() == (tmp_path / "clean").read_bytes()


@pytest.mark.parametrize("float_type", list(FloatType))
def test_a_checkpoints_adapters_need_no_onnxruntime_and_have_the_planned_sizes(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, float_type: FloatType
) -> None:
    monkeypatch.setattr(onnxruntime, "AdapterFormat", None)
    with open_checkpoint(tiny_checkpoint) as checkpoint:
        planned = adapter_file_sizes(checkpoint, float_type)
        written = write_adapter_files(tmp_path, checkpoint, float_type)
    assert {file.name: file.nbytes for file in written} == planned


def test_a_tensor_of_another_shape_than_announced_is_a_bug_that_is_noticed(tmp_path: Path) -> None:
    wrong = AdapterTensor(TensorSpec("w", ir.DataType.FLOAT, (2, 2)), lambda: np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="was announced"):
        write_adapter(tmp_path, "a", [wrong])
