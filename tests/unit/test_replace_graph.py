"""One graph of a package replaced: every other file stays, and no graph loses its bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from phi4mm_export.errors import PackageError
from phi4mm_export.package.replace_graph import copy_files, data_files, plan_copy

TABLE = np.arange(5000, dtype=np.float32)
OTHER = np.arange(24, dtype=np.float32).reshape(4, 6)


def tensor(name: str, value: np.ndarray, location: str, offset: int) -> onnx.TensorProto:
    made = onnx.TensorProto(
        name=name, data_type=onnx.TensorProto.FLOAT, dims=value.shape, data_location=onnx.TensorProto.EXTERNAL
    )
    for key, text in (("location", location), ("offset", str(offset)), ("length", str(value.nbytes))):
        made.external_data.add(key=key, value=text)
    return made


def write_graph(path: Path, *tensors: onnx.TensorProto, inside: onnx.TensorProto | None = None) -> None:
    """A graph that hands its tensors out; `inside` is held by a node's attribute."""
    names = [t.name for t in tensors]
    nodes = [helper.make_node("Identity", [name], [f"{name}.out"]) for name in names]
    if inside is not None:
        names.append("inside")
        nodes.append(helper.make_node("Constant", [], ["inside.out"], value=inside))
    outputs = [helper.make_tensor_value_info(f"{name}.out", onnx.TensorProto.FLOAT, None) for name in names]
    graph = helper.make_graph(nodes, "g", [], outputs, list(tensors))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """a.onnx and b.onnx keep their tables in a's data file; c.onnx has its own under a name of its own."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "a.onnx.data").write_bytes(bytes(64) + TABLE.tobytes() + OTHER.tobytes())
    (folder / "c.bin").write_bytes(OTHER.tobytes())
    write_graph(folder / "a.onnx", tensor("table", TABLE, "a.onnx.data", 64))
    write_graph(
        folder / "b.onnx",
        tensor("table", TABLE, "a.onnx.data", 64),
        tensor("same", TABLE, "a.onnx.data", 64),
        inside=tensor("other", OTHER, "a.onnx.data", 64 + TABLE.nbytes),
    )
    for name in ("genai_config.json", "phi4mm.json", "SHA256SUMS", "README.md"):
        (folder / name).write_text("{}", encoding="utf-8")
    write_graph(folder / "c.onnx", tensor("other", OTHER, "c.bin", 0))
    return folder


def copied(package: Path, graph: str, target: Path) -> list[str]:
    target.mkdir()
    return sorted(copy_files(plan_copy(package, graph), target))


def loaded(path: Path) -> dict[str, np.ndarray]:
    graph = onnx.load(path).graph
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    return values | {
        n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in graph.node if n.op_type == "Constant"
    }


def test_a_graph_that_shares_the_replaced_graphs_data_gets_its_own_copy(package: Path, tmp_path: Path) -> None:
    written = copied(package, "a.onnx", tmp_path / "new")
    values = loaded(tmp_path / "new" / "b.onnx")
    assert written == ["b.onnx", "b.onnx.data", "c.bin", "c.onnx", "genai_config.json"]
    np.testing.assert_array_equal(values["table"], TABLE)
    np.testing.assert_array_equal(values["same"], TABLE)
    np.testing.assert_array_equal(values["inside.out"], OTHER)


def test_a_tensor_under_two_names_is_copied_once_at_an_aligned_offset(package: Path, tmp_path: Path) -> None:
    copied(package, "a.onnx", tmp_path / "new")
    graph = onnx.load(tmp_path / "new" / "b.onnx", load_external_data=False).graph
    offsets = [int(e.value) for t in graph.initializer for e in t.external_data if e.key == "offset"]
    assert offsets[0] == offsets[1]
    assert offsets[0] % 4096 == 0
    assert (tmp_path / "new" / "b.onnx.data").stat().st_size < 2 * TABLE.nbytes


def test_data_that_another_graph_needs_stays_when_the_sharing_graph_is_replaced(package: Path, tmp_path: Path) -> None:
    written = copied(package, "c.onnx", tmp_path / "new")
    assert written == ["a.onnx", "a.onnx.data", "b.onnx", "genai_config.json"]
    assert (tmp_path / "new" / "a.onnx.data").read_bytes() == (package / "a.onnx.data").read_bytes()


def test_files_that_describe_the_whole_package_are_left_out(package: Path) -> None:
    assert set(plan_copy(package, "c.onnx").dropped) >= {"phi4mm.json", "SHA256SUMS", "README.md", "c.bin"}


def test_the_names_inside_the_graph_count_not_a_name_derived_from_its_own(package: Path) -> None:
    assert data_files(package, "c.onnx") == {"c.bin"}


def test_a_data_file_that_is_too_short_is_named_with_the_bytes_it_must_have(package: Path) -> None:
    (package / "c.bin").write_bytes(b"short")
    with pytest.raises(PackageError, match=r"c.onnx: expected the data files c.bin \(96 bytes\)"):
        plan_copy(package, "a.onnx")


@pytest.mark.parametrize("location", ["../outside.bin", "/etc/passwd", ""])
def test_a_location_outside_the_package_is_refused(package: Path, location: str) -> None:
    write_graph(package / "d.onnx", tensor("other", OTHER, location, 0))
    with pytest.raises(PackageError, match="inside the package"):
        plan_copy(package, "a.onnx")


def test_links_become_files(package: Path, tmp_path: Path) -> None:
    (package / "c.bin").rename(tmp_path / "blob")
    (package / "c.bin").symlink_to(tmp_path / "blob")
    copied(package, "a.onnx", tmp_path / "new")
    assert not (tmp_path / "new" / "c.bin").is_symlink()
    assert (tmp_path / "new" / "c.bin").read_bytes() == OTHER.tobytes()
