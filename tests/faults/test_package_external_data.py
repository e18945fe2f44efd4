"""External data that lies: every reference is judged from headers, nothing is read, nothing hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto
from support.packages import (
    DATA_FILE,
    FILES,
    TABLE_NBYTES,
    build_package,
    edit_config,
    edit_graph,
    external,
    named,
    only,
)

from phi4mm_export.checks.report import Severity
from phi4mm_export.pipeline.validate import validate


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return build_package(tmp_path / "package")


def _entry(tensor: TensorProto, key: str, value: str) -> None:
    entry = next((entry for entry in tensor.external_data if entry.key == key), None)
    if entry is None:
        entry = tensor.external_data.add(key=key)
    entry.value = value


def _set(key: str, value: str) -> Callable[[onnx.ModelProto], None]:
    return lambda model: _entry(named(model.graph.initializer, "qkv"), key, value)


OUTSIDE = {
    "a parent folder": "../other.data",
    "a detour": "sub/../../other.data",
    "an absolute path": "/etc/passwd",
    "a Windows drive": "C:\\data",
    "a Windows share": "\\\\server\\data",
    "a backslash": "sub\\data",
    "the process table": "/proc/self/environ",
    "a parent in Windows spelling": "..\\other.data",
    "a zero byte": "a\0b",
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_a_location_outside_the_folder_is_refused(package: Path, case: str) -> None:
    (package.parent / "other.data").write_bytes(bytes(4096))
    edit_graph(package, "decoder", _set("location", OUTSIDE[case]))
    finding = only(validate(package), "C202")
    assert finding.where == f"{FILES['decoder']}: qkv"
    assert finding.severity is Severity.ERROR


HEADERS = {
    "no location": ("location", "", "C213"),
    "a negative offset": ("offset", "-1", "C215"),
    "an offset of 2^63": ("offset", str(2**63), "C215"),
    "an offset that ends beyond 2^63": ("offset", str(2**63 - 2), "C215"),
    "an offset of a thousand digits": ("offset", "9" * 1000, "C215"),
    "an offset with a sign": ("offset", "+4096", "C215"),
    "an offset in other digits": ("offset", "٤٠٩٦", "C215"),
    "a fraction": ("offset", "0.5", "C215"),
    "a negative length": ("length", "-2048", "C215"),
    "a length that does not fit the dims": ("length", "2044", "C217"),
    "a length of zero": ("length", "0", "C217"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_cannot_be_right_is_refused(package: Path, case: str) -> None:
    key, value, code = HEADERS[case]
    edit_graph(package, "decoder", _set(key, value))
    assert only(validate(package), code).where == f"{FILES['decoder']}: qkv"


def test_a_key_that_occurs_twice_is_refused(package: Path) -> None:
    edit_graph(
        package,
        "decoder",
        lambda model: named(model.graph.initializer, "qkv").external_data.add(key="offset", value="0"),
    )
    assert only(validate(package), "C212").found == "offset"


def test_a_constant_with_bytes_in_two_places_is_refused(package: Path) -> None:
    def both(model: onnx.ModelProto) -> None:
        named(model.graph.initializer, "qkv").raw_data = b"1234"

    edit_graph(package, "decoder", both)
    assert "qkv" in only(validate(package), "C214").where


def test_a_negative_dim_is_refused(package: Path) -> None:
    def negative(model: onnx.ModelProto) -> None:
        named(model.graph.initializer, "qkv").dims[0] = -16

    edit_graph(package, "decoder", negative)
    assert "qkv" in only(validate(package), "C210").where


def test_a_constant_larger_than_any_file_is_refused(package: Path) -> None:
    def huge(model: onnx.ModelProto) -> None:
        named(model.graph.initializer, "qkv").dims[:] = [2**40, 2**40]

    edit_graph(package, "decoder", huge)
    assert "qkv" in only(validate(package), "C210").where


def test_inline_bytes_that_do_not_fit_their_dims_are_refused(package: Path) -> None:
    def cut(model: onnx.ModelProto) -> None:
        weight = named(model.graph.initializer, "weight")
        weight.raw_data = weight.raw_data[:-4]

    edit_graph(package, "speech", cut)
    assert "weight" in only(validate(package), "C218").where


def test_a_missing_data_file_names_the_bytes_it_must_have_and_a_file_of_that_size(package: Path) -> None:
    (package / DATA_FILE).rename(package / "decoder.onnx.data")
    findings = [finding for finding in validate(package).errors if finding.code == "C203"]
    assert [finding.where for finding in findings] == [f"{FILES[c]}: {DATA_FILE}" for c in ("decoder", "embedding")]
    nbytes = TABLE_NBYTES + 16 * 32 * 4
    assert f"{nbytes:,} bytes" in findings[0].expected
    assert findings[0].fix == f"decoder.onnx.data has that size: rename it to {DATA_FILE}"


def test_a_missing_data_file_without_a_twin_is_only_named(package: Path) -> None:
    (package / DATA_FILE).unlink()
    findings = [finding for finding in validate(package).errors if finding.code == "C203"]
    assert findings[0].fix == f"put {DATA_FILE} beside the graph"


def test_a_truncated_data_file_names_both_sizes(package: Path) -> None:
    os.truncate(package / DATA_FILE, TABLE_NBYTES + 100)
    finding = only(validate(package), "C206")
    assert finding.expected == f"{TABLE_NBYTES + 2048:,} bytes"
    assert finding.found == f"{TABLE_NBYTES + 100:,} bytes"


def test_a_folder_in_place_of_the_data_is_refused(package: Path) -> None:
    (package / DATA_FILE).unlink()
    (package / DATA_FILE).mkdir()
    codes = {finding.code for finding in validate(package).errors}
    assert codes == {"C204"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_in_place_of_the_data_is_refused_without_waiting(package: Path) -> None:
    (package / DATA_FILE).unlink()
    os.mkfifo(package / DATA_FILE)
    assert {finding.code for finding in validate(package).errors} == {"C204"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_in_place_of_a_graph_is_refused_without_waiting(package: Path) -> None:
    (package / FILES["speech"]).unlink()
    os.mkfifo(package / FILES["speech"])
    assert "C201" in {finding.code for finding in validate(package).errors}


def test_a_link_out_of_the_folder_is_refused(package: Path) -> None:
    real = package.parent / "elsewhere.data"
    (package / DATA_FILE).rename(real)
    (package / DATA_FILE).symlink_to(real)
    assert {finding.code for finding in validate(package).errors} == {"C205"}


def test_a_dangling_link_is_a_missing_file(package: Path) -> None:
    (package / DATA_FILE).unlink()
    (package / DATA_FILE).symlink_to(package / "gone")
    findings = [finding for finding in validate(package).errors if finding.code == "C203"]
    assert findings[0].found == "a dangling link"


def test_a_loop_of_links_is_refused(package: Path) -> None:
    (package / DATA_FILE).unlink()
    (package / DATA_FILE).symlink_to(package / DATA_FILE)
    assert {finding.code for finding in validate(package).errors} == {"C204"}


def test_links_of_a_download_cache_are_fine(tmp_path: Path) -> None:
    blobs = build_package(tmp_path / "blobs")
    package = tmp_path / "package"
    package.mkdir()
    for file in sorted(blobs.iterdir()):
        (package / file.name).symlink_to(os.path.relpath(file, package))
    assert validate(package).findings == ()


def test_hard_links_are_plain_files(package: Path) -> None:
    twin = package.parent / "snapshot"
    twin.mkdir()
    for file in package.iterdir():
        os.link(file, twin / file.name)
    assert validate(package).findings == ()
    assert validate(twin).findings == ()


def test_identical_ranges_of_two_graphs_are_shared_bytes(package: Path) -> None:
    assert "C207" not in {finding.code for finding in validate(package).findings}


def test_ranges_that_overlap_in_part_are_an_error(package: Path) -> None:
    edit_graph(package, "decoder", _set("offset", str(TABLE_NBYTES - 4)))
    finding = only(validate(package), "C207")
    assert "table" in finding.what


def test_a_dead_copy_in_front_is_reported_with_its_size(package: Path) -> None:
    dead = 16384
    path = package / DATA_FILE
    with path.open("r+b") as file:
        file.truncate(dead + TABLE_NBYTES + 2048)
    for component, offsets in (
        ("decoder", {"table": dead, "qkv": dead + TABLE_NBYTES}),
        ("embedding", {"table": dead}),
    ):
        for name, offset in offsets.items():
            edit_graph(
                package,
                component,
                lambda model, name=name, offset=offset: _entry(
                    named(model.graph.initializer, name), "offset", str(offset)
                ),
            )
    report = validate(package)
    finding = only(report, "C220")
    assert finding.severity is Severity.WARNING
    assert finding.what.startswith("16,384 orphaned bytes")
    assert report.ok


def test_alignment_padding_is_not_orphaned(package: Path) -> None:
    path = package / DATA_FILE
    os.truncate(path, TABLE_NBYTES + 65536 + 2048)
    edit_graph(package, "decoder", _set("offset", str(-(-TABLE_NBYTES // 65536) * 65536)))
    os.truncate(path, -(-TABLE_NBYTES // 65536) * 65536 + 2048)
    assert "C220" not in {finding.code for finding in validate(package).findings}


def test_a_gap_that_holds_bytes_is_orphaned_even_if_it_aligns(package: Path) -> None:
    start = -(-TABLE_NBYTES // 65536) * 65536
    os.truncate(package / DATA_FILE, start + 2048)
    edit_graph(package, "decoder", _set("offset", str(start)))
    with (package / DATA_FILE).open("r+b") as file:
        file.seek(start - 1)
        file.write(b"x")
    assert DATA_FILE in only(validate(package), "C220").where


def test_a_data_file_of_no_graph_is_reported(package: Path) -> None:
    (package / "old.onnx.data").write_bytes(bytes(1000))
    assert only(validate(package), "C221").what.startswith("1,000 orphaned bytes")


def test_a_sparse_terabyte_is_judged_by_its_size_alone(package: Path) -> None:
    try:
        os.truncate(package / DATA_FILE, 1 << 40)
    except OSError:
        pytest.skip("the file system holds no file of a terabyte")
    assert only(validate(package), "C220").severity is Severity.WARNING


def test_a_constant_of_a_node_is_judged_like_an_initializer(package: Path) -> None:
    def attribute(model: onnx.ModelProto) -> None:
        value = external("hidden", TensorProto.FLOAT, [4], 0, location="../x")
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["unused"], name="const", value=value))

    edit_graph(package, "speech", attribute)
    assert only(validate(package), "C202").where == f"{FILES['speech']}: const.value"


def test_a_constant_inside_a_branch_is_judged_too(package: Path) -> None:
    def branch(model: onnx.ModelProto) -> None:
        inner = onnx.helper.make_graph(
            [onnx.helper.make_node("Identity", ["inside"], ["out"])],
            "branch",
            [],
            [onnx.helper.make_tensor_value_info("out", TensorProto.FLOAT, [4])],
            [external("inside", TensorProto.FLOAT, [4], 0, location="../x")],
        )
        condition = onnx.helper.make_tensor("yes", TensorProto.BOOL, [], [True])
        model.graph.initializer.append(condition)
        node = onnx.helper.make_node("If", ["yes"], ["chosen"], name="choice", then_branch=inner, else_branch=inner)
        model.graph.node.insert(0, node)

    edit_graph(package, "speech", branch)
    finding = only(validate(package), "C202")
    assert "choice/inside" in finding.where


def test_a_git_lfs_pointer_is_called_by_its_name(package: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"
    (package / FILES["vision"]).write_text(pointer)
    finding = only(validate(package), "C201")
    assert "Git LFS pointer" in finding.what


def test_bytes_that_are_no_graph_are_refused(package: Path) -> None:
    (package / FILES["vision"]).write_bytes(b"\xff" * 100)
    assert only(validate(package), "C201").where == FILES["vision"]


def test_a_graph_file_beyond_two_gibibytes_is_refused_without_reading_it(package: Path) -> None:
    os.truncate(package / FILES["vision"], 1 << 31)
    assert "2,147,483,647" in only(validate(package), "C201").what


def test_a_missing_graph_is_one_error(package: Path) -> None:
    (package / FILES["vision"]).unlink()
    report = validate(package)
    assert [finding.code for finding in report.errors] == ["C201"]


def test_a_second_decoder_in_the_folder_is_judged_for_its_data(package: Path) -> None:
    (package / "other.onnx").write_bytes((package / FILES["decoder"]).read_bytes())
    edit_config(package, lambda c: c)
    assert validate(package).findings == ()


def test_a_name_that_is_no_text_is_refused(package: Path) -> None:
    path = package / FILES["vision"]
    path.write_bytes(path.read_bytes().replace(b"num_images", b"num_im\xffges"))
    assert "no UTF-8 text" in only(validate(package), "C201").what
