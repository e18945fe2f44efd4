"""No test reaches the network, starts a program or unpickles a class, unless a marker says that it must.

`network`: loopback sockets; `subprocess`: other programs. A marker that a test does not need fails it. Audit hooks see
what C code does too, and cannot be removed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PROGRAM_EVENTS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"})
SOCKET_EVENTS = frozenset({"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"})
NAME_EVENTS = frozenset({"socket.getaddrinfo", "socket.gethostbyname"})
NEEDS = dict.fromkeys(PROGRAM_EVENTS, "subprocess") | dict.fromkeys(SOCKET_EVENTS | NAME_EVENTS, "network")
"""The marker that opens an event."""
LOOPBACK = ("127.", "::1", "localhost")


class ForbiddenError(RuntimeError):
    """Something that no test may do without saying so."""


@dataclass
class Guard:
    """What the running test may do, and what it tried all the same."""

    active: bool = False
    network: bool = False
    programs: bool = False
    tried: list[str] = field(default_factory=list)
    needed: set[str] = field(default_factory=set)

    def install(self) -> None:
        """Watch this process from now on."""
        sys.addaudithook(self._hear)

    @contextmanager
    def around(self, *, network: bool, programs: bool) -> Iterator[None]:
        """Enforce for a block."""
        self.active, self.network, self.programs = True, network, programs
        self.tried.clear()
        self.needed.clear()
        try:
            yield
        finally:
            self.active = False

    def surplus(self) -> set[str]:
        """Markers that opened nothing so far."""
        return {
            name for name, given in (("network", self.network), ("subprocess", self.programs)) if given
        } - self.needed

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.active and event in NEEDS:
            self.needed.add(NEEDS[event])
        if self.active and (refused := self.refusal(event, args)):
            self.tried.append(refused)
            raise ForbiddenError(refused)

    def refusal(self, event: str, args: tuple[Any, ...]) -> str:
        """What is wrong with an audited event, or nothing."""
        if event in PROGRAM_EVENTS and not self.programs:
            return f"{event} {args[0]!r} in a test without the marker `subprocess`"
        if event in SOCKET_EVENTS | NAME_EVENTS:
            address = args[1] if event in SOCKET_EVENTS else args[0]
            host = address[0] if isinstance(address, tuple) else address
            if not (self.network and isinstance(host, str) and host.startswith(LOOPBACK)):
                return f"{event} {address!r} in a test without the marker `network`, or beyond this machine"
        if event == "pickle.find_class":
            return f"pickle.find_class {args!r}: pickles are never read"
        return ""
