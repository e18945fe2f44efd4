"""With --json every error is one JSON object, also one that is none of ours."""

from __future__ import annotations

import json

import pytest

from phi4mm_export.cli import render


@pytest.mark.parametrize(
    ("err", "code", "what", "where"),
    [
        (KeyError("weight"), 1, "KeyError: 'weight'", ""),
        (MemoryError(), 6, "the machine ran out of memory", ""),
        (OSError(28, "No space left on device", "out.onnx"), 6, "No space left on device", "out.onnx"),
        (KeyboardInterrupt(), 130, "interrupted: nothing was left under the target name", ""),
    ],
)
def test_an_error_that_is_none_of_ours_is_one_json_object(
    err: BaseException,
    code: int,
    what: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["phi4mm", "inspect", "x", "--json"])
    render.error(err)
    body = json.loads(capsys.readouterr().err)
    assert (body["exit_code"], body["what"], body["where"]) == (code, what, where)
    assert body["error"] == type(err).__name__


def test_without_json_it_stays_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["phi4mm", "inspect", "x"])
    render.error(OSError(28, "No space left on device", "out.onnx"))
    assert capsys.readouterr().err == "error: out.onnx: No space left on device\n"
