"""Fixtures that several test folders use. What is expensive is built once per test run; nobody writes into it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings
from support.audit import Guard

from phi4mm_export.pipeline.synth import synth
from phi4mm_export.spec.model import Layout

BuildOnce = Callable[[str, Callable[[Path], object]], Path]
GUARD = Guard()
settings.register_profile("repeatable", deadline=None, database=None, derandomize=True)
settings.load_profile("repeatable")
"""Properties are tried on the same examples in every run, without a clock and without a folder of their own."""


def pytest_configure() -> None:
    """Watch the whole process: see support/audit.py."""
    GUARD.install()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Every phase of a test, its fixtures included, keeps to what its markers allow."""
    network, programs = (item.get_closest_marker(name) is not None for name in ("network", "subprocess"))
    with GUARD.around(network=network, programs=programs):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that passes needed its markers, except those that say why they may be needed elsewhere."""
    result = yield
    sure = {mark.name for mark in item.iter_markers() if not mark.args} & GUARD.surplus()
    assert item.get_closest_marker("shared") or not sure, f"the test needs no marker {sorted(sure)}"
    return result


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """What was tried fails the test even if the code under test swallowed the refusal."""
    assert not GUARD.tried, GUARD.tried


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> BuildOnce:
    """`built_once(name, build)`: the folder that `build(folder)` creates, built by one worker and shared by all.

    `build` must create its folder in one step (by a rename), as our commands do.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def build_once(name: str, build: Callable[[Path], object]) -> Path:
        folder = shared / "built" / name
        folder.parent.mkdir(exist_ok=True)
        with FileLock(folder.with_name(f"{name}.lock")):
            if not folder.exists():
                build(folder)
        return folder

    return build_once


@pytest.fixture(scope="session")
def tiny_checkpoint(built_once: BuildOnce) -> Path:
    """The tiny synthetic checkpoint in Microsoft's layout; read-only."""
    return built_once("tiny-original", lambda folder: synth(folder))


@pytest.fixture(scope="session")
def tiny_native(built_once: BuildOnce) -> Path:
    """The same model in the layout of transformers, with adapter folders; read-only."""
    return built_once("tiny-native", lambda folder: synth(folder, layout=Layout.NATIVE))
