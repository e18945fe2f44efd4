"""Packages made to harm: `verify`, `doctor` and `diff` answer each with a sentence, and read nothing outside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.packages import DATA_FILE, FILES, build_package, edit_config, edit_graph, external, named
from support.sealed import seal
from typer.testing import CliRunner, Result

from phi4mm_export.cli.app import app

SECRET = b"the contents of a file outside"
Harm = Callable[[Path], object]


def _entry(key: str, value: str) -> Harm:
    def change(model: onnx.ModelProto) -> None:
        tensor = named(model.graph.initializer, "qkv")
        found = next((entry for entry in tensor.external_data if entry.key == key), None)
        (found or tensor.external_data.add(key=key)).value = value

    return lambda package: edit_graph(package, "decoder", change)


def _twice(package: Path) -> None:
    edit_graph(
        package, "decoder", lambda m: named(m.graph.initializer, "qkv").external_data.add(key="offset", value="0")
    )


def _dims(*dims: int) -> Harm:
    def change(model: onnx.ModelProto) -> None:
        tensor = named(model.graph.initializer, "qkv")
        del tensor.dims[:]
        tensor.dims.extend(dims)

    return lambda package: edit_graph(package, "decoder", change)


def _nested(depth: int) -> Harm:
    """`If` inside `If`, too deep for a recursive reader of another kind."""

    def write(package: Path) -> None:
        out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])]
        condition = onnx.numpy_helper.from_array(np.array(True), "c")
        graph = helper.make_graph([helper.make_node("Identity", ["c"], ["y"])], "g0", [], out, [condition])
        for level in range(depth):
            node = helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=graph if level < 3 else None)
            graph = helper.make_graph([node], f"g{level + 1}", [], out, [condition])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        (package / FILES["vision"]).write_bytes(model.SerializeToString())

    return write


def _replace(name: str, data: bytes) -> Harm:
    return lambda package: (package / name).write_bytes(data)


def _pipe(name: str) -> Harm:
    def change(package: Path) -> None:
        (package / name).unlink()
        os.mkfifo(package / name)

    return change


def _link(name: str, target: str) -> Harm:
    def change(package: Path) -> None:
        (package / name).unlink()
        (package / name).symlink_to(target)

    return change


def _sparse(package: Path) -> None:
    with (package / DATA_FILE).open("r+b") as file:
        file.truncate(1 << 40)


def _broken_text(package: Path) -> None:
    path = package / FILES["vision"]
    path.write_bytes(path.read_bytes().replace(b"image_features", b"image\xff\xfeeatures"))


def _file_name(name: str) -> Harm:
    return lambda package: edit_config(package, lambda c: c["model"]["vision"].update(filename=name))


HARMS: dict[str, Harm] = {
    "a parent folder": _entry("location", "../secret"),
    "an absolute path": _entry("location", "/etc/passwd"),
    "a Windows drive": _entry("location", "C:\\secret"),
    "an empty location": _entry("location", ""),
    "a zero byte": _entry("location", "a\0b"),
    "the folder itself": _entry("location", "."),
    "a negative offset": _entry("offset", "-1"),
    "an offset of 2^63": _entry("offset", str(2**63)),
    "an offset that is no number": _entry("offset", "12x"),
    "a length of 2^63": _entry("length", str(2**63)),
    "a key twice": _twice,
    "dims of 2^62": _dims(2**62, 2**62),
    "negative dims": _dims(-1, 4),
    "no dims": _dims(),
    "graphs in graphs": _nested(20),
    "a graph of one byte": _replace(FILES["vision"], b"\xff"),
    "an empty graph": _replace(FILES["vision"], b""),
    "names that are no text": _broken_text,
    "a pipe for a graph": _pipe(FILES["vision"]),
    "a pipe for data": _pipe(DATA_FILE),
    "a pipe for a config": _pipe("genai_config.json"),
    "a pipe for a tokenizer": _pipe("tokenizer.json"),
    "a link to a device": _link(DATA_FILE, "/dev/zero"),
    "a link to a secret": _link("tokenizer.json", "../secret"),
    "a link to itself": _link("vision_processor.json", "vision_processor.json"),
    "a terabyte of nothing": _sparse,
    "a config of brackets": _replace("genai_config.json", b"[" * 100_000),
    "a config with a key twice": _replace("genai_config.json", b'{"model": {}, "model": {}}'),
    "a config that is a list": _replace("genai_config.json", b"[]"),
    "a config of numbers": _replace("genai_config.json", b'{"model": {"decoder": 1, "vision": [], "speech": 1e999}}'),
    "a processor that is a list": _replace("vision_processor.json", b"[1]"),
    "a processor of wrong kinds": _replace("vision_processor.json", b'{"processor": {"transforms": [1, {}, null]}}'),
    "a tokenizer of wrong kinds": _replace("tokenizer.json", b'{"added_tokens": [1, {"id": "x"}, null]}'),
    "tokens that contradict one another": _replace(
        "tokenizer.json", b'{"added_tokens": [{"id": 1, "content": "a"}, {"id": 2, "content": "a"}]}'
    ),
    "a tokenizer config of wrong kinds": _replace(
        "tokenizer_config.json", b'{"tokenizer_class": [], "chat_template": 1}'
    ),
    "a graph name outside": _file_name("../secret"),
    "an absolute graph name": _file_name("/etc/passwd"),
    "a graph name with a zero byte": _file_name("a\0b"),
    "a graph name that is a folder": _file_name("."),
    "ids of wrong kinds": lambda package: edit_config(
        package, lambda c: c["model"].update(eos_token_id=["a", None, 1.5], vocab_size="x", context_length=[])
    ),
    "sections of wrong kinds": lambda package: edit_config(
        package, lambda c: c["model"].update(vision=1, embedding=[])
    ),
    "providers of wrong kinds": lambda package: edit_config(
        package, lambda c: c["model"]["decoder"]["session_options"].update(provider_options=[1, [], {}, {"cuda": 1}])
    ),
}  # fmt: skip
COMMANDS = ("verify", "doctor", "diff", "text", "fix")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(SECRET)
    return build_package(tmp_path / "package")


def _run(command: str, package: Path) -> Result:
    words = {
        "verify": ["verify", str(package), "--json"],
        "doctor": ["doctor", str(package), "--json"],
        "diff": ["diff", str(package.parent / "sound"), str(package), "--json"],
        "text": ["diff", str(package)],
        "fix": ["doctor", str(package), "--fix", str(package.parent / "fixed"), "--json"],
    }[command]
    return CliRunner().invoke(app, words)


READS_ALL = {("a terabyte of nothing", "text"), ("a terabyte of nothing", "fix")}
"""A digest of every byte, and a copy of every byte, are what these two are asked for."""


@pytest.mark.parametrize(
    ("harm", "command"), [pair for pair in product(HARMS, COMMANDS) if pair not in READS_ALL], ids=" - ".join
)
def test_a_package_made_to_harm_gets_an_answer_and_no_crash(package: Path, harm: str, command: str) -> None:
    if command == "diff":
        build_package(package.parent / "sound")
    seal(package)
    HARMS[harm](package)
    result = _run(command, package)
    assert result.exit_code in (0, 3, 4), result.output
    assert "bug of phi4mm" not in result.output
    assert SECRET.decode() not in result.output
    if result.exit_code == 0 and command != "text":
        assert json.loads(result.stdout)
    if command == "verify":
        assert result.exit_code == 4
    fixed = package.parent / "fixed"
    if fixed.exists():
        assert not [path for path in fixed.rglob("*") if path.is_symlink() or path.read_bytes() == SECRET]


def test_overlap_and_shared_ranges_are_told_apart(package: Path) -> None:
    edit_graph(package, "decoder", lambda m: m.graph.initializer.append(external("again", 1, [200064, 16], 0)))
    seal(package)
    assert _run("verify", package).exit_code == 0
    edit_graph(package, "decoder", lambda m: m.graph.initializer.append(external("part", 1, [16], 4)))
    seal(package)
    faults = json.loads(_run("verify", package).stdout)["faults"]
    assert [fault["kind"] for fault in faults] == ["external data"]
