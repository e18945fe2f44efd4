"""scripts/repro*.py: what is varied, what is compared, and that a difference is found and named."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))
    for name in ("repro", "repro_matrix", "repro_chain"):
        sys.modules.pop(name, None)


@pytest.fixture
def repro() -> ModuleType:
    return importlib.import_module("repro")


@pytest.fixture
def matrix() -> ModuleType:
    return importlib.import_module("repro_matrix")


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


FILES = {"exported/a": b"12345", "exported/b": b"x", "quantized/c": b"y", "built/d": b"z"}


def test_the_first_file_that_differs_is_named_with_its_variation_and_place(repro: ModuleType, tmp_path: Path) -> None:
    first = write(tmp_path / "first", FILES)
    other = write(tmp_path / "other", FILES | {"exported/a": b"12x45", "quantized/c": b"z"})
    with pytest.raises(repro.ReproError, match=r"^one thread: exported/a differs from byte 2 on$"):
        repro.compare(repro.digests(first), repro.digests(other), first, other, "one thread")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exported/a": b"1234"}, "exported/a differs: 5 bytes against 4"),
        ({"exported/aa": b""}, "exported/aa is extra"),
    ],
)
def test_other_sizes_and_extra_files_are_differences(
    repro: ModuleType, tmp_path: Path, change: dict[str, bytes], message: str
) -> None:
    first, other = write(tmp_path / "first", FILES), write(tmp_path / "other", FILES | change)
    with pytest.raises(repro.ReproError, match=message):
        repro.compare(repro.digests(first), repro.digests(other), first, other, "v")


def test_a_missing_file_is_a_difference(repro: ModuleType, tmp_path: Path) -> None:
    first, other = write(tmp_path / "first", FILES), write(tmp_path / "other", {"exported/a": b"12345"})
    with pytest.raises(repro.ReproError, match="exported/b is missing"):
        repro.compare(repro.digests(first), repro.digests(other), first, other, "v")


def test_one_digest_speaks_of_names_and_contents(repro: ModuleType) -> None:
    assert repro.digest_of({"a": "1", "b": "2"}) == repro.digest_of({"b": "2", "a": "1"})
    assert len({repro.digest_of(d) for d in ({"a": "1", "b": "2"}, {"a": "2", "b": "1"}, {"a": "1"})}) == 3


def test_the_matrix_is_every_kernel_thread_count_numpy_level_and_libm(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "blas_kernels", lambda: ["Nehalem", "Haswell"])
    monkeypatch.setattr(
        matrix, "numpy_levels", lambda: iter([("without AVX-512", ["X86_V4"]), ("baseline", ["X86_V3"])])
    )
    monkeypatch.setattr(matrix, "_has_glibc", lambda: True)
    found = matrix.processors(short=False)
    assert len(found) == 1 + 2 * 2 * 3 * 2
    assert len({tuple(sorted(v.environment.items())) for v in found}) == len(found)
    assert len({v.name for v in found}) == len(found)


def test_the_short_form_changes_one_thing_at_a_time_then_all_and_no_kernel(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "numpy_levels", lambda: iter([("baseline", ["X86_V3"])]))
    monkeypatch.setattr(matrix, "_has_glibc", lambda: True)
    plain, two, *single, every = matrix.processors(short=True)
    assert plain.environment == {}
    assert set(two.environment.values()) == {"2"}
    assert [matrix._changes(v) for v in single] == [1, 1, 1]
    assert matrix._changes(every) == 3
    assert all(matrix.CORETYPE not in v.environment for v in (two, *single, every))


@pytest.mark.parametrize(
    ("features", "kernels"),
    [
        ({"SSE42"}, ["Nehalem"]),
        ({"SSE42", "AVX"}, ["Nehalem", "Sandybridge"]),
        ({"SSE42", "AVX", "AVX2"}, ["Nehalem", "Sandybridge"]),
        ({"SSE42", "AVX", "AVX2", "FMA3"}, ["Nehalem", "Sandybridge", "Haswell"]),
        (set(), []),
    ],
)
def test_no_kernel_that_the_processor_lacks_is_asked_for(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, features: set[str], kernels: list[str]
) -> None:
    monkeypatch.delenv(matrix.CORETYPE, raising=False)
    monkeypatch.setattr(matrix, "processor_features", lambda: dict.fromkeys(features, True))
    monkeypatch.setattr(matrix, "blas_can_choose", lambda: True)
    assert matrix.blas_kernels() == kernels


def test_a_kernel_that_the_environment_chose_is_left_alone(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "blas_can_choose", lambda: True)
    monkeypatch.setenv(matrix.CORETYPE, "Haswell")
    assert matrix.blas_kernels() == []
    assert matrix.plain_environment()[matrix.CORETYPE] == "Haswell"


def test_only_vector_instructions_that_are_there_are_switched_off(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "dispatched_features", lambda: ["X86_V3", "X86_V4", "AVX512_ICL"])
    monkeypatch.setattr(matrix, "processor_features", lambda: {"X86_V3": True, "X86_V4": True, "AVX512_ICL": False})
    assert list(matrix.numpy_levels()) == [("without AVX-512", ["X86_V4"]), ("baseline", ["X86_V3", "X86_V4"])]


@pytest.mark.subprocess
def test_every_surrounding_is_varied_alone_and_then_all_at_once(matrix: ModuleType, tmp_path: Path) -> None:
    *alone, together = matrix.surroundings(tmp_path)
    names = [variation.name for variation in alone]
    assert len(names) == len(set(names)) >= 12
    live = [v for v in alone if not v.skipped]
    assert together.name == f"all {len(live)} at once"
    for variation in live:
        assert set(variation.order) <= set(together.order)
        assert set(variation.environment.items()) <= set(together.environment.items())
        assert set(variation.prefix) <= set(together.prefix)
    assert all(v.skipped for v in alone if v not in live)


def test_kills_come_at_the_first_a_middle_and_the_last_call_with_and_without_a_work_folder(repro: ModuleType) -> None:
    kills = repro.kill_points({"export": {"a": 5}, "quantize": {"a": 1, "b": 2}}, short=False)
    assert [(k.command, k.point, k.number) for k in kills if k.with_work] == [
        ("export", "a", 1), ("export", "a", 3), ("export", "a", 5),
        ("quantize", "a", 1), ("quantize", "b", 1), ("quantize", "b", 2),
    ]  # fmt: skip
    assert len(kills) == 2 * 6
    assert len({kill.name for kill in kills}) == len(kills)


CHILD = """
import json, sys
sys.argv = ["repro_chain.py", sys.argv[1]]
import repro_chain
repro_chain.disturb(json.load(open(sys.argv[1])))
import datetime, os, pathlib, platform, socket, time
print(json.dumps({
    "listed": [p.name for p in pathlib.Path(sys.argv[1]).parent.iterdir()],
    "walked": [d for _, d, _ in os.walk(pathlib.Path(sys.argv[1]).parent)][0],
    "time": time.time(), "year": datetime.datetime.now().year, "local": time.localtime().tm_year,
    "host": [socket.gethostname(), platform.node(), os.uname().nodename],
    "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
}))
"""


def child(folder: Path, **order: Any) -> dict[str, Any]:
    path = folder / "order.json"
    path.write_text(json.dumps(order))
    command = [sys.executable, "-c", CHILD, str(path)]
    done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.subprocess
def test_a_child_sees_folders_reversed_another_clock_and_another_host(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / name).mkdir()
    plain = child(tmp_path)
    other = child(tmp_path, reversed_folders=True, clock_s=2 * 366 * 24 * 3600, host="elsewhere")
    assert other["listed"] == plain["listed"][::-1]
    assert other["walked"] == plain["walked"][::-1]
    assert other["year"] >= plain["year"] + 2
    assert other["local"] == other["year"]
    assert other["time"] - plain["time"] > 2 * 365 * 24 * 3600
    assert set(other["host"]) == {"elsewhere"}


@pytest.mark.subprocess
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be set here")
def test_a_child_can_be_held_to_one_core(tmp_path: Path) -> None:
    assert child(tmp_path, cores=1)["cores"] == 1


@pytest.fixture
def fake(repro: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Builds that take no time; the names in the list get another byte."""
    wrong: list[str] = []

    def attempt(
        bench: Any, commands: Sequence[Sequence[str]], variation: Any, *out: Path, **order: Any
    ) -> tuple[int, Mapping[str, Any], str]:
        del bench, out
        if "kill" in order:
            return -signal.SIGKILL, {}, ""
        files = FILES | ({"exported/b": b"?"} if variation.name in wrong else {})
        for command in commands:
            if command[0] != "synth":
                target = Path(command[command.index("-o") + 1])
                write(target.parent, {n: data for n, data in files.items() if n.startswith(target.name)})
                target.mkdir(exist_ok=True)
        said = {"kernel": "K", "factor": "d", "canaries": {"exp": variation.name}, "calls": {"export": {"a tensor": 2}}}
        return 0, said, ""

    monkeypatch.setattr(repro, "attempt", attempt)
    monkeypatch.setattr(repro, "classes", lambda _out: "3 exact")
    return wrong


def compare_all(repro: ModuleType, tmp_path: Path, *, short: bool = True) -> None:
    for name in ("model", "scratch"):
        (tmp_path / name).mkdir()
    options = argparse.Namespace(checkpoint=tmp_path / "model", samples=2, short=short, jobs=2)
    repro.compare_all(tmp_path / "scratch", options)


@pytest.mark.subprocess
@pytest.mark.usefixtures("fake")
def test_equal_builds_give_one_digest_and_a_count(
    repro: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare_all(repro, tmp_path)
    said = capsys.readouterr().out
    assert f"variations, one digest: {repro.digest_of(repro.digests(tmp_path / 'scratch' / 'first'))}" in said
    assert "2 runs killed and run again, the same digest" in said


@pytest.mark.subprocess
@pytest.mark.usefixtures("fake")
def test_the_long_form_also_calibrates_anew_and_builds_the_published_recipe(
    repro: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare_all(repro, tmp_path, short=False)
    said = capsys.readouterr().out
    assert "runs that calibrate anew on this machine, one digest" in said
    assert "3 packages of the recipe int8-gptq, one digest" in said
    assert "  20 builds are the same" in said


@pytest.mark.subprocess
def test_one_build_that_differs_ends_everything_with_its_name(
    repro: ModuleType, tmp_path: Path, fake: list[str], matrix: ModuleType
) -> None:
    fake.append(matrix.processors(short=True)[2].name)
    with pytest.raises(repro.ReproError, match=f"{fake[0]}: exported/b differs from byte 0 on"):
        compare_all(repro, tmp_path)
