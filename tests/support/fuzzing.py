"""Damaged files of every kind that comes from outside, and the readers that must refuse them in a sentence.

A kind is a valid file in its place and a reader. Its bytes are damaged (flips, cuts, splices, huge numbers), or, for
JSON, its values are (other types, deep nesting, duplicate and odd keys), from a seed. A reader may accept the result
or raise one of our own errors; anything else is a fault.
"""

from __future__ import annotations

import io
import json
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import soundfile
from onnx import TensorProto, helper
from PIL import Image
from support import checkpoints, media_files, packages
from support.sealed import sealed_package

from phi4mm_export.checkpoint.header import read_header
from phi4mm_export.checkpoint.open import open_checkpoint
from phi4mm_export.checkpoint.shards import read_shards
from phi4mm_export.errors import CheckpointError, PackageError, Phi4mmError
from phi4mm_export.package.graph_io import read_graph_io
from phi4mm_export.package.lock_file import lock_bytes, lock_of, read_lock
from phi4mm_export.package.manifest_read import parse_manifest, read_manifest
from phi4mm_export.package.tokenizer import tokenizer_files
from phi4mm_export.pipeline.inspect import inspect
from phi4mm_export.pipeline.validate import validate
from phi4mm_export.pipeline.verify import verify
from phi4mm_export.quant.graph import read_graph
from phi4mm_export.runtime.audio import decode_audio
from phi4mm_export.runtime.calibration_npz import parse_npz
from phi4mm_export.runtime.calibration_prompts import find_prompts
from phi4mm_export.runtime.calibration_sources import SampleKind, find_files
from phi4mm_export.runtime.images import decode_image
from phi4mm_export.spec.build_recipe import BuildRecipe
from phi4mm_export.spec.build_recipe_read import read_recipe, recipe_of, toml_text
from phi4mm_export.spec.contract_file import load_contract
from phi4mm_export.spec.json_text import parse_json, parse_object
from phi4mm_export.spec.model import Role

NUMBERS = (0, -1, 1, 2**31, 2**32, 2**63, 2**64, 10**30, 1e308, 0.5, -0.0)
TEXTS = ("", ".", "..", "../x", "/etc/passwd", "a/b", "\u0000", "\ud83d\ude00", "x" * 5000, "con", "nan", "*", "%s")
KEYS = ("", "..", "__metadata__", "__class__", "a.b", "dtype", "shape")


@dataclass(frozen=True)
class Kind:
    """`prepare(folder)` writes what surrounds the file and returns its path; `read(path)` is what is tested."""

    name: str
    prepare: Callable[[Path], Path]
    read: Callable[[Path], object]
    is_json: bool = False


def attempt(kind: Kind, path: Path, data: bytes) -> bool:
    """Let the reader have the damaged bytes; True if it accepts them, False if it refuses them in a sentence.

    Raises whatever else the reader raises, and AssertionError for a refusal without text.
    """
    path.write_bytes(data)
    try:
        kind.read(path)
    except Phi4mmError as err:
        sentence = str(err)
    else:
        return True
    assert sentence.strip()
    assert "\n" not in sentence
    return False


def damaged(kind: Kind, valid: bytes, rng: random.Random) -> bytes:
    """One damaged form of a valid file."""
    if kind.name == "header":
        return _damaged_header(valid, rng)
    if kind.is_json and rng.random() < 0.7:
        return _damaged_json(valid, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        valid = _damaged_bytes(valid, rng)
    return valid


def _damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return rng.randbytes(rng.randrange(40))
    at, what = rng.randrange(len(data)), rng.randrange(9)
    if what == 0:
        return data[:at]
    if what == 1:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if what == 2:
        return data[:at] + bytes([rng.choice((0, 255, 127, 128, (data[at] + 1) % 256))]) + data[at + 1 :]
    if what == 3:
        return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
    if what == 4:
        return data[:at] + data[at + rng.randrange(1, 40) :]
    if what == 5:
        start = rng.randrange(len(data))
        return data[:at] + data[start : start + rng.randrange(1, 200)] + data[at:]
    if what == 6:
        number = rng.choice((0, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
        return data[:at] + struct.pack("<Q", number)[: rng.choice((4, 8))] + data[at + 8 :]
    if what == 7:
        piece = rng.choice((b"\xef\xbb\xbf", b"NaN", b"[" * 2000, b'{"a":' * 500, b"\xff\xfe", b"\\ud800", b'""'))
        return data[:at] + piece + data[at:]
    return data + rng.randbytes(rng.randrange(1, 60))


def _damaged_header(valid: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose JSON header is damaged, with a header length that fits it most of the time."""
    (length,) = struct.unpack("<Q", valid[:8])
    text, body = valid[8 : 8 + length], valid[8 + length :]
    text = _damaged_json(text, rng) if rng.random() < 0.6 else _damaged_bytes(text, rng)
    if rng.random() < 0.9:
        length = len(text)
    if rng.random() < 0.1:
        body = _damaged_bytes(body, rng)
    return struct.pack("<Q", length % 2**64) + text + body


def _damaged_json(valid: bytes, rng: random.Random) -> bytes:
    value = json.loads(valid)
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = _changed(value, rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1 and text.startswith("{") and len(text) > 2:
        text = '{"' + rng.choice(KEYS) + '": 1, ' + text[1:]
        text = text if rng.random() < 0.5 else '{"twice": 1, "twice": 2, ' + text[1:]
    return text.encode("utf-8", "surrogatepass")


def _changed(value: Any, rng: random.Random) -> Any:
    """One change somewhere in a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key, changed = rng.choice(list(value)), dict(value)
        what = rng.random()
        if what < 0.1:
            del changed[key]
        elif what < 0.2:
            changed[rng.choice(KEYS) or key + "x"] = changed.pop(key)
        elif what < 0.25:
            changed[rng.choice(TEXTS)] = _odd(rng)
        else:
            changed[key] = _changed(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.85:
        at, changed_list = rng.randrange(len(value)), list(value)
        if rng.random() < 0.2:
            changed_list.insert(at, _odd(rng))
        elif rng.random() < 0.2:
            del changed_list[at]
        else:
            changed_list[at] = _changed(value[at], rng)
        return changed_list
    return _odd(rng)


def _odd(rng: random.Random) -> Any:
    what = rng.randrange(8)
    if what < 3:
        return rng.choice(NUMBERS)
    if what < 5:
        return rng.choice(TEXTS)
    if what == 5:
        return rng.choice((None, True, False, [], {}, [[]], [0, 0, 0], {"a": {}}))
    if what == 6:
        deep: Any = 0
        for _ in range(rng.choice((5, 99, 101, 400))):
            deep = [deep]
        return deep
    return [rng.choice(NUMBERS)] * rng.choice((1, 9, 300))


def _checkpoint(folder: Path) -> Path:
    return checkpoints.original().write(folder / "checkpoint")


def _small_shard(folder: Path) -> Path:
    tensors = {
        "model.norm.weight": checkpoints.Stored((16,)),
        "model.layers.0.a.weight": checkpoints.Stored((4, 6), "F16"),
        "lm_head.weight": checkpoints.stored_f32(np.ones((3, 5), np.float32)),
    }
    checkpoints.write_safetensors(folder / "model.safetensors", tensors)
    return folder / "model.safetensors"


def _adapter(folder: Path) -> Path:
    _checkpoint(folder)
    return checkpoints.write_adapter(folder / "adapter") / "adapter_config.json"


def _open_with_adapter(path: Path) -> None:
    open_checkpoint(path.parent.parent / "checkpoint", adapter_paths={Role.VISION: path.parent}).close()


def _tokenizer(name: str) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        packages.write_json(folder / "tokenizer.json", packages.tokenizer())
        packages.write_json(folder / "tokenizer_config.json", packages.tokenizer_config())
        return folder / name

    return prepare


def _read_tokenizer(path: Path) -> None:
    tokenizer_files(path.parent, vocab_size=packages.VOCAB)


def _package(name: str) -> Callable[[Path], Path]:
    return lambda folder: packages.build_package(folder / "package") / name


def _judge_package(path: Path) -> None:
    validate(path.parent)


def _sealed(name: str) -> Callable[[Path], Path]:
    return lambda folder: sealed_package(folder / "package") / name


def _lock(folder: Path) -> Path:
    package = sealed_package(folder / "package")
    (folder / "phi4mm.lock").write_bytes(lock_bytes(lock_of(read_manifest(package))))
    return folder / "phi4mm.lock"


def _recipe(folder: Path) -> Path:
    (folder / "mine.toml").write_text(toml_text(_every_choice().plain()), encoding="utf-8")
    return folder / "mine.toml"


def _recorded_recipe(folder: Path) -> Path:
    packages.write_json(folder / "recorded.json", _every_choice().recorded())
    return folder / "recorded.json"


def _every_choice() -> BuildRecipe:
    """A recipe in which every kind of value occurs."""
    settings = ["export.memory_budget=4GiB", "quantize.vision.exclude=['a']", "evaluate.prompts=['b']"]
    settings += ["card.tags=['c']", "model=owner/name", "calibration=pages"]
    return read_recipe("int8-gptq", settings).resolved()


def _read_recorded(path: Path) -> None:
    body = parse_object(path.read_bytes(), path.name, error=PackageError)
    recipe_of(body, path.name, error=PackageError).resolved()


def _graph(folder: Path) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])
    inside = helper.make_tensor("b", TensorProto.FLOAT, [3], np.zeros(3, np.float32).tobytes(), raw=True)
    outside = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 3], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "graph.onnx.data"), ("offset", "0"), ("length", "48")):
        outside.external_data.add(key=key, value=value)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Add", ["z", "b"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x], [y], [inside, outside])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "graph.onnx")
    (folder / "graph.onnx.data").write_bytes(bytes(48))
    return folder / "graph.onnx"


def _read_onnx(path: Path) -> None:
    read_graph_io(path, error=CheckpointError)
    graph = read_graph(path)
    for name in ("w", "b"):
        if name in graph.constants:
            graph.constant(name)


def _picture(folder: Path, suffix: str) -> Path:
    made, buffer = Image.open(io.BytesIO(media_files.picture_bytes(40, 30))), io.BytesIO()
    made.convert("RGB").save(buffer, {"jpg": "JPEG", "tif": "TIFF"}.get(suffix, suffix.upper()))
    (folder / f"page.{suffix}").write_bytes(buffer.getvalue())
    return folder / f"page.{suffix}"


def _sound(folder: Path, suffix: str) -> Path:
    (folder / "clip.wav").write_bytes(media_files.sound_bytes(0.1))
    if suffix != "wav":
        samples, rate = soundfile.read(io.BytesIO(media_files.sound_bytes(0.1)))
        soundfile.write(folder / f"clip.{suffix}", samples, rate)
    return folder / f"clip.{suffix}"


def _samples(folder: Path) -> Path:
    np.savez(folder / "sample.npz", pixels=np.ones((2, 3), np.float32), sizes=np.array([4], np.int64))
    return folder / "sample.npz"


def _archive(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "pages.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(2):
            archive.writestr(f"pages/{number}.png", media_files.picture_bytes(40, 30))
    return folder / "pages.zip"


def _read_archive(path: Path) -> None:
    for file in find_files(path, SampleKind.IMAGE).files:
        file.read()


def _list(folder: Path) -> Path:
    for name in ("one.png", "two.png"):
        (folder / name).write_bytes(b"pixels")
    (folder / "pages.txt").write_text("# pages\none.png\n\ntwo.png\n", encoding="utf-8")
    return folder / "pages.txt"


def _prompts(folder: Path) -> Path:
    (folder / "one.png").write_bytes(b"pixels")
    line = json.dumps({"prompt": "what is this", "images": ["one.png"], "system": "be brief"})
    (folder / "prompts.jsonl").write_text(f"{line}\n{line}\n", encoding="utf-8")
    return folder / "prompts.jsonl"


def _contract(folder: Path) -> Path:
    shipped = resources.files("phi4mm_export.spec").joinpath("data", "contract-official.json")
    (folder / "contract.json").write_bytes(shipped.read_bytes())
    return folder / "contract.json"


def _picture_kind(suffix: str) -> Kind:
    return Kind(f"image-{suffix}", lambda f: _picture(f, suffix), lambda p: decode_image(p.read_bytes(), p.name))


def _sound_kind(suffix: str) -> Kind:
    return Kind(f"audio-{suffix}", lambda f: _sound(f, suffix), lambda p: decode_audio(p.read_bytes(), p.name))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("header", _small_shard, lambda p: read_header(p, p.name)),
        Kind("index", lambda f: _checkpoint(f) / checkpoints.INDEX, lambda p: read_shards(p.parent), is_json=True),
        Kind(
            "config",
            lambda f: _checkpoint(f) / "config.json",
            lambda p: open_checkpoint(p.parent).close(),
            is_json=True,
        ),
        Kind("adapter_config", _adapter, _open_with_adapter, is_json=True),
        Kind("tokenizer", _tokenizer("tokenizer.json"), _read_tokenizer, is_json=True),
        Kind("tokenizer_config", _tokenizer("tokenizer_config.json"), _read_tokenizer, is_json=True),
        Kind("genai_config", _package("genai_config.json"), _judge_package, is_json=True),
        Kind("json", _sealed("settings.json"), lambda p: parse_json(p.read_bytes(), p.name), is_json=True),
        Kind("manifest", _sealed("phi4mm.json"), lambda p: parse_manifest(p.read_bytes()), is_json=True),
        Kind("lock", _lock, read_lock, is_json=True),
        Kind("verify-manifest", _sealed("phi4mm.json"), lambda p: verify(p.parent), is_json=True),
        Kind("verify-sums", _sealed("SHA256SUMS"), lambda p: verify(p.parent)),
        Kind("verify-graph", _sealed("graph.onnx"), lambda p: verify(p.parent)),
        Kind("recipe", _recipe, lambda p: read_recipe(p).resolved().placed()),
        Kind("recorded-recipe", _recorded_recipe, _read_recorded, is_json=True),
        Kind("onnx", _graph, _read_onnx),
        Kind("onnx-inspect", _graph, inspect),
        Kind("npz", _samples, lambda p: parse_npz(p.read_bytes(), p.name)),
        Kind("zip", _archive, _read_archive),
        Kind("list", _list, lambda p: find_files(p, SampleKind.IMAGE)),
        Kind("prompts", _prompts, find_prompts),
        Kind("contract", _contract, lambda p: load_contract(str(p)), is_json=True),
        *(_picture_kind(suffix) for suffix in ("png", "jpg", "webp", "gif", "bmp", "tif")),
        *(_sound_kind(suffix) for suffix in ("wav", "flac", "ogg")),
    )
}


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for one kind's files, removed at the end."""
    return tempfile.TemporaryDirectory(prefix="phi4mm-fuzz-")
