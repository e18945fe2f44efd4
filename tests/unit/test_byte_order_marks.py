"""One rule: a byte order mark is skipped in what people edit, and refused in what machines write and check."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from phi4mm_export.checkpoint.documents import read_object as read_document
from phi4mm_export.checkpoint.header import read_header
from phi4mm_export.checks.text_probes import read_fields, read_references
from phi4mm_export.errors import Phi4mmError
from phi4mm_export.package.lock_file import read_lock
from phi4mm_export.package.manifest_read import read_manifest
from phi4mm_export.quant.statistics import VERSION, SavedStatistics
from phi4mm_export.spec.build_recipe_read import read_recipe
from phi4mm_export.spec.contract_file import load_contract
from phi4mm_export.spec.json_text import read_object

MARK = b"\xef\xbb\xbf"
CONTRACT = resources.files("phi4mm_export.spec").joinpath("data", "contract-official.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("config.json", b'{"a": 1}', lambda path: read_document(path, path.name)),
        ("genai_config.json", b'{"a": 1}', read_object),
        ("mine.toml", b"name = 'a'", read_recipe),
        ("contract.json", CONTRACT, lambda path: load_contract(str(path))),
        ("fields.json", b'{"a.png": {"Total": "12.50"}}', read_fields),
        ("references.json", b'{"a.wav": "hello"}', read_references),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_changes_nothing_in_what_people_edit(
    tmp_path: Path, name: str, text: bytes, read: Callable[[Path], object]
) -> None:
    (tmp_path / name).write_bytes(text)
    plain = read(tmp_path / name)
    (tmp_path / name).write_bytes(MARK + text)
    assert read(tmp_path / name) == plain


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("phi4mm.json", b"{}", lambda path: read_manifest(path.parent)),
        ("phi4mm.lock", b"{}", read_lock),
        (
            "statistics.json",
            json.dumps({"version": VERSION, "samples": [], "stages": []}).encode(),
            lambda path: SavedStatistics(path.parent).check(),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_is_refused_by_name_in_what_machines_write(
    tmp_path: Path, name: str, text: bytes, read: Callable[[Path], object]
) -> None:
    (tmp_path / name).write_bytes(MARK + text)
    with pytest.raises(Phi4mmError, match=f"{name}.*starts with a byte order mark"):
        read(tmp_path / name)


def test_it_is_refused_in_the_header_of_a_shard(tmp_path: Path) -> None:
    data = save({"a": np.zeros(2, np.float32)})
    nbytes = int.from_bytes(data[:8], "little")
    marked = (nbytes + len(MARK)).to_bytes(8, "little") + MARK + data[8:]
    (tmp_path / "model.safetensors").write_bytes(marked)
    with pytest.raises(Phi4mmError, match=r"model\.safetensors"):
        read_header(tmp_path / "model.safetensors", "model.safetensors")
