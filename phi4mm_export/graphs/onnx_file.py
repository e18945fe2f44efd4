"""ONNX files opened: the protobuf alone, checked as far as every reader needs it, external data left where it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phi4mm_export.errors import PackageError, Phi4mmError
from phi4mm_export.spec.on_disk import LFS_POINTER, exists, is_file, is_folder

if TYPE_CHECKING:
    import onnx


def load_graph(path: Path, *, where: str | None = None, error: type[Phi4mmError] = PackageError) -> onnx.ModelProto:
    """The model in an .onnx file without its external data.

    Raises `error` for a missing file, a Git LFS pointer, bytes that are no ONNX model, text that is no UTF-8, and for a
    pipe or device, which is not opened.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # protobuf ships no stubs

    place = where or path.name
    try:
        if not is_file(path):  # a pipe would be waited for
            what = "the graph is no plain file" if exists(path) and not is_folder(path) else "the graph file is missing"
            raise error(what, where=place, fix="put the ONNX file there")
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise error("found a Git LFS pointer, expected an ONNX model", where=place, fix="run: git lfs pull")
            file.seek(0)
            model = onnx.load(file, load_external_data=False)
    except FileNotFoundError as err:
        raise error("the graph file is missing", where=place) from err
    except DecodeError as err:
        raise error(
            "not an ONNX model: the protobuf cannot be parsed", where=place, fix="fetch the file again"
        ) from err
    if not model.HasField("graph") or not model.graph.output:
        raise error("not an ONNX model: it has no graph with outputs", where=place, fix="fetch the file again")
    broken = next(_broken_strings(model), None)
    if broken is not None:
        raise error(
            f"not an ONNX model: a {broken} is no UTF-8 text", where=place, fix="fetch the file again, or export again"
        )
    return model


def _broken_strings(message: Any) -> Iterator[str]:
    """Names of the string fields that hold bytes which are no UTF-8; protobuf hands these out as bytes."""
    for field, value in message.ListFields():
        if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
            continue
        single = isinstance(value, str | bytes) or hasattr(value, "ListFields")
        for item in [value] if single else value:
            if field.type == field.TYPE_MESSAGE:
                yield from _broken_strings(item)
            elif isinstance(item, bytes):
                yield str(field.name)
