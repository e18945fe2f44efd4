"""The guard around all tests refuses what it must, and the markers open what they say."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
from support.audit import ForbiddenError, Guard


def _refused(event: str, *args: object, network: bool = False, programs: bool = False) -> bool:
    return bool(Guard(network=network, programs=programs).refusal(event, args))


def _connect(address: tuple[str, int]) -> None:
    with socket.socket() as made:
        made.connect(address)


@pytest.mark.parametrize(
    "attempt",
    [
        pytest.param(lambda: subprocess.run([sys.executable, "-c", ""], check=False), marks=pytest.mark.subprocess),
        pytest.param(lambda: os.system("true"), marks=pytest.mark.subprocess),
        pytest.param(lambda: _connect(("127.0.0.1", 9)), marks=pytest.mark.network),
        pytest.param(lambda: socket.getaddrinfo("localhost", 80), marks=pytest.mark.network),
    ],
    ids=["subprocess", "system", "connect", "names"],
)
def test_a_guarded_block_refuses_it(attempt: Callable[[], object]) -> None:
    guard = Guard()
    guard.install()
    with guard.around(network=False, programs=False), pytest.raises(ForbiddenError):
        attempt()
    assert len(guard.tried) == 1


def test_the_marker_network_opens_loopback_and_nothing_else() -> None:
    assert not _refused("socket.connect", None, ("127.0.0.1", 80), network=True)
    assert _refused("socket.connect", None, ("192.0.2.1", 80), network=True)
    assert _refused("socket.connect", None, ("127.0.0.1", 80))


def test_the_marker_subprocess_opens_programs_only() -> None:
    assert not _refused("subprocess.Popen", "sh", programs=True)
    assert _refused("socket.bind", None, ("127.0.0.1", 80), programs=True)
    assert _refused("pickle.find_class", "os", "system", programs=True, network=True)


def test_a_marker_that_opened_nothing_is_named() -> None:
    guard = Guard()
    with guard.around(network=True, programs=True):
        assert guard.surplus() == {"network", "subprocess"}
        guard._hear("subprocess.Popen", ("sh",))
        assert guard.surplus() == {"network"}
        guard._hear("socket.connect", (None, ("127.0.0.1", 80)))
        assert guard.surplus() == set()
