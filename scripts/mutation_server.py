"""Runs tests in forks of a process that has imported the libraries already: a mutant costs what its tests cost.

`mutation.py` starts the server in its copy of the repository and gives `ASK` to cosmic-ray as the test command. The
tool itself is never imported before the fork, so each fork sees the mutant of the moment.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path

LIBRARIES = (
    "filelock",
    "google.protobuf.message",
    "hypothesis",
    "ml_dtypes",
    "numpy",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "pydantic",
    "pytest",
    "safetensors.numpy",
    "typer.testing",
    "xdist",
)
OPTIONS = ("-n", "0", "-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--no-header")
ASK = (
    "import socket,sys;s=socket.socket(socket.AF_UNIX);s.connect(sys.argv[1]);"
    "s.sendall((' '.join(sys.argv[2:])+chr(10)).encode());sys.exit(int(s.recv(9)))"
)
"""The client: connects to the address, sends the names of test files, ends with pytest's exit code."""
FAILED = 70
MAX_CPU_S = 60
"""Processor time a fork may take; the time on the clock depends on what else the machine does."""


def main() -> None:
    """Serve until killed: mutation_server.py ADDRESS, in the folder of the repository's copy."""
    sys.path.insert(0, str(Path.cwd()))
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(1)
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                answer(connection)


def answer(connection: socket.socket) -> None:
    """Run what was asked for in a fork, and send its exit code; a client that leaves takes the fork with it."""
    tests = connection.recv(1 << 16).decode().split()
    child = os.fork()
    if not child:
        connection.close()
        run(tests)
    ended = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([ended, connection.fileno()], [], [])
        if ended not in ready:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(ended)
    connection.sendall(str(code if code >= 0 else FAILED).encode())


def run(tests: list[str]) -> None:
    """The fork's work; never returns."""
    code = FAILED
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        import pytest

        code = int(pytest.main([*OPTIONS, *tests]))
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
