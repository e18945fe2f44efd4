"""Samples in .npz files: the graph's inputs, checked before they are used."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from support.plain_models import WIDTH, write_feeds, write_model

from phi4mm_export.errors import UsageError
from phi4mm_export.runtime.calibration_npz import NpzReader, parse_npz
from phi4mm_export.runtime.calibration_samples import collected, digest_of, subset


def npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def test_a_reader_gives_every_sample_in_the_order_of_the_names_and_rewinds(tmp_path: Path) -> None:
    reader = NpzReader(write_feeds(tmp_path / "feeds", 3))
    first = [reader.get_next() for _ in range(4)]
    reader.rewind()
    again = reader.get_next()
    assert first[3] is None
    assert len(reader) == 3
    assert again is not None
    np.testing.assert_array_equal(again["x"], np.load(tmp_path / "feeds" / "000.npz")["x"])


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected .npz files, found none"):
        NpzReader(tmp_path)


def test_keys_must_be_the_inputs_of_the_graph(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx")
    (tmp_path / "a.npz").write_bytes(npz(z=np.zeros((2, WIDTH), np.float32)))
    with pytest.raises(UsageError, match="expected the graph's inputs x: x is missing, z is no input"):
        NpzReader(tmp_path / "a.npz", model)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), np.float32), r"shape \[2, 3\], expected \[any, 64\]"),
        (np.zeros((2, WIDTH), np.int64), "holds int64, expected float32"),
        (np.full((2, WIDTH), np.nan, np.float32), "NaN or infinite"),
    ],
)
def test_arrays_that_do_not_fit_the_input_are_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    model = write_model(tmp_path / "model.onnx")
    (tmp_path / "a.npz").write_bytes(npz(x=array))
    with pytest.raises(UsageError, match=message):
        NpzReader(tmp_path / "a.npz", model)


def test_float64_samples_become_the_element_type_of_the_input(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx", dtype=np.float16)
    reader = NpzReader(write_feeds(tmp_path / "feeds", 1, dtype=np.float64), model)
    assert reader.sample(0)["x"].dtype == np.float16


def test_all_unusable_files_are_named_at_once(tmp_path: Path) -> None:
    folder = write_feeds(tmp_path / "feeds", 2)
    (folder / "x1.npz").write_bytes(b"nothing")
    (folder / "x2.npz").write_bytes(b"")
    with pytest.raises(UsageError) as caught:
        NpzReader(folder)
    assert caught.value.what.startswith("2 files cannot be used")
    assert "x1.npz" in caught.value.what
    assert "x2.npz" in caught.value.what


def test_unusable_files_can_be_left_out_and_are_counted_and_named(tmp_path: Path) -> None:
    folder = write_feeds(tmp_path / "feeds", 2)
    (folder / "x1.npz").write_bytes(b"nothing")
    reader = NpzReader(folder, skip_unreadable=True)
    assert len(reader) == 2
    assert len(reader.unreadable) == 1
    assert reader.notes[0].startswith("1 of 3 files left out")
    assert "x1.npz" in reader.notes[0]


def test_a_reader_without_one_usable_file_is_refused_even_then(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="not an"):
        NpzReader(tmp_path, skip_unreadable=True)


def test_python_objects_are_never_unpickled() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (1,)})
        archive.writestr("x.npy", header.getvalue() + pickle.dumps(["boom"]))
    with pytest.raises(UsageError, match="Python objects"):
        parse_npz(buffer.getvalue(), "a.npz")


def test_a_header_that_promises_more_than_there_is_costs_no_memory() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
        archive.writestr("x.npy", header.getvalue() + b"\0" * 8)
    with pytest.raises(UsageError, match=r"holds 8 bytes, expected 4,398,046,511,104"):
        parse_npz(buffer.getvalue(), "a.npz")


def test_a_file_that_changes_while_it_is_in_use_is_noticed(tmp_path: Path) -> None:
    folder = write_feeds(tmp_path / "feeds", 2)
    reader = NpzReader(folder)
    (folder / "000.npz").write_bytes((folder / "001.npz").read_bytes())
    with pytest.raises(UsageError, match="changed while it was in use"):
        reader.get_next()


def test_a_digest_tells_names_types_shapes_and_values_apart() -> None:
    zeros = np.zeros((2, 3), np.float32)
    variants = [
        {"x": zeros},
        {"y": zeros},
        {"x": zeros.astype(np.float16)},
        {"x": zeros.reshape(3, 2)},
        {"x": zeros + 1},
        {"x": zeros, "y": zeros},
    ]
    assert len({digest_of(feeds) for feeds in variants}) == len(variants)
    assert digest_of({"x": zeros, "y": zeros + 1}) == digest_of({"y": zeros + 1, "x": zeros})


def test_a_subset_keeps_names_digests_and_the_order_asked_for(tmp_path: Path) -> None:
    reader = NpzReader(write_feeds(tmp_path / "feeds", 4))
    part = subset(reader, [3, 1])
    assert part.digests == (reader.digests[3], reader.digests[1])
    np.testing.assert_array_equal(part.sample(1)["x"], reader.sample(1)["x"])


class Foreign:
    """The least that onnxruntime's protocol asks for: it cannot rewind."""

    def __init__(self, samples: list[dict[str, np.ndarray]]) -> None:
        self.samples = samples

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self.samples.pop(0) if self.samples else None


def test_any_object_with_get_next_is_accepted_once(tmp_path: Path) -> None:
    values = [np.full((2, WIDTH), i, np.float32) for i in range(3)]
    samples = collected(Foreign([{"x": value} for value in values]), tmp_path)
    for _ in range(2):
        np.testing.assert_array_equal(samples.sample(2)["x"], values[2])


@pytest.mark.parametrize(("reader", "message"), [(object(), "get_next"), (Foreign([]), "no sample")])
def test_a_foreign_reader_without_samples_is_refused(tmp_path: Path, reader: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        collected(reader, tmp_path)


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("element", [onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16])
def test_bfloat16_is_read_as_numpy_writes_it(tmp_path: Path, stored: type, element: int) -> None:
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    x, y = (onnx.helper.make_tensor_value_info(name, element, [2]) for name in "xy")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y])), tmp_path / "m.onnx")
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in/a.npz", x=np.array([1.5, -2.0], stored))
    feed = NpzReader(tmp_path / "in", tmp_path / "m.onnx").get_next()
    assert feed is not None
    assert feed["x"].dtype == onnx.helper.tensor_dtype_to_np_dtype(element)
    assert feed["x"].astype(np.float32).tolist() == [1.5, -2.0]


def test_bytes_without_an_element_type_are_refused(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y])), tmp_path / "m.onnx")
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in/a.npz", x=np.zeros(2, "V4"))
    with pytest.raises(UsageError, match=r"x holds .*V4, expected float32"):
        NpzReader(tmp_path / "in", tmp_path / "m.onnx")


def test_an_input_of_unknown_rank_takes_any_shape(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y])), tmp_path / "m.onnx")
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in/a.npz", x=np.zeros((2, 3), np.float32))
    feed = NpzReader(tmp_path / "in", tmp_path / "m.onnx").get_next()
    assert feed is not None
    assert feed["x"].shape == (2, 3)
