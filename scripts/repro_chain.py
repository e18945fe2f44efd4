"""One build in a process of its own, under the conditions of an order; repro.py starts it and compares the bytes.

    python scripts/repro_chain.py ORDER.json

Prints one JSON document: the BLAS kernel that computed, digests of arithmetic that is known to differ between machines
(the canaries), and how often each point at which a run can be killed was reached.
"""

from __future__ import annotations

import ctypes
import datetime
import hashlib
import importlib
import json
import locale
import math
import os
import platform
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POINTS = {
    "a tensor": "phi4mm_export.package.write:DataFile.begin",
    "a small file": "phi4mm_export.pipeline.export:write_file",
    "the manifest of an export": "phi4mm_export.pipeline.export:write_manifest",
    "the check of an export": "phi4mm_export.pipeline.export:check_staged",
    "the first layer": "phi4mm_export.pipeline.quantize_write:run_job",
    "a layer": "phi4mm_export.quant.finished:FinishedLayers.save",
    "the quantized graph": "phi4mm_export.quant.engine:write_quantized",
    "the manifest of a quantization": "phi4mm_export.pipeline.quantize_write:write_manifest",
    "the check of a quantization": "phi4mm_export.pipeline.quantize_write:check_package",
    "publishing": "phi4mm_export.package.publish:publish",
    "a folder on disk": "phi4mm_export.package.publish:sync_folder",
}
"""Where a run is killed: just before the call of this function."""


def main() -> int:
    order = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    disturb(order)
    calls = count_calls(order.get("kill"))
    from phi4mm_export.cli.app import app

    by_command = {}
    for command in order["commands"]:
        calls.clear()
        code = app(command, standalone_mode=False)
        if code:
            return int(code)
        by_command[command[0]] = dict(calls)
    said = {"kernel": blas_kernel(), "canaries": canaries(), "factor": factor_digest(exact=True), "calls": by_command}
    print(json.dumps(said))
    return 0


def disturb(order: dict[str, Any]) -> None:
    """Make the process see another machine: before anything of the tool is imported."""
    if "cores" in order:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: order["cores"]]))
    if order.get("locale"):
        locale.setlocale(locale.LC_ALL, "")
    if order.get("reversed_folders"):
        reverse_folders()
    if "clock_s" in order:
        shift_clock(order["clock_s"])
    if "host" in order:
        rename_host(order["host"])


def reverse_folders() -> None:
    """Give the entries of every folder in reversed order."""
    real_list, real_scan = os.listdir, os.scandir

    class Reversed:
        def __init__(self, *path: Any) -> None:
            with real_scan(*path) as entries:
                self._entries = iter(list(entries)[::-1])

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            return self._entries

        def __exit__(self, *_error: object) -> None:
            return None

        def __iter__(self) -> Iterator[os.DirEntry[str]]:
            return self._entries

        def __next__(self) -> os.DirEntry[str]:
            return next(self._entries)

        def close(self) -> None:
            return None

    vars(os)["listdir"] = lambda *path: real_list(*path)[::-1]
    vars(os)["scandir"] = Reversed


def shift_clock(seconds: int) -> None:
    """Move every clock that Python code reads."""
    real_time, real_ns, real_local, real_utc = time.time, time.time_ns, time.localtime, time.gmtime

    class Moved(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return cls.fromtimestamp(real_time() + seconds, tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.fromtimestamp(real_time() + seconds, datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(real_time() + seconds)

    vars(time)["time"] = lambda: real_time() + seconds
    vars(time)["time_ns"] = lambda: real_ns() + seconds * 1_000_000_000
    vars(time)["localtime"] = lambda at=None: real_local(real_time() + seconds if at is None else at)
    vars(time)["gmtime"] = lambda at=None: real_utc(real_time() + seconds if at is None else at)
    vars(datetime)["datetime"] = Moved


def rename_host(name: str) -> None:
    """Give another host name to whoever asks in Python."""
    system = os.uname()
    renamed = os.uname_result((system.sysname, name, system.release, system.version, system.machine))
    vars(os)["uname"] = lambda: renamed
    vars(socket)["gethostname"] = lambda: name
    vars(socket)["getfqdn"] = lambda _name="": name
    vars(platform)["node"] = lambda: name


def count_calls(kill: dict[str, Any] | None) -> Counter[str]:
    """Count the calls of every point from now on; at call `kill["number"]` of `kill["point"]` the process dies."""
    calls = Counter[str]()
    for point, place in POINTS.items():
        module_name, _, path = place.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module_name)
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, _counted(getattr(owner, name), point, calls, kill))
    return calls


def _counted(real: Any, point: str, calls: Counter[str], kill: dict[str, Any] | None) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        calls[point] += 1
        if kill and kill["point"] == point and kill["number"] == calls[point]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    return call


def canaries() -> dict[str, str]:
    """Digests of arithmetic that is *not* the same everywhere: if these never differ, a matrix proves little."""
    import numpy as np

    rng = np.random.Generator(np.random.PCG64(1))
    rows = rng.standard_normal((512, 192)).astype(np.float32)
    angles = rng.uniform(-100, 100, 20_000)
    libm = np.array([math.sin(a) + math.exp(a / 7) + math.pow(abs(a), 0.3) for a in angles.tolist()])
    return {
        "plain GPTQ factor": factor_digest(exact=False),
        "float32 product": _digest(rows.T @ rows),
        "float64 factor": _digest(np.linalg.cholesky(rows.T.astype(np.float64) @ rows + np.eye(192))),
        "numpy exp and cos": _digest(np.exp(angles / 7) + np.cos(angles)),
        "libm": _digest(libm),
    }


def factor_digest(*, exact: bool) -> str:
    """The factor of GPTQ's Hessian, wide enough for several panels, of a matrix whose values are whole numbers."""
    import numpy as np

    from phi4mm_export.quant.arithmetic import EXACT, PLAIN, upper_factor

    rng = np.random.Generator(np.random.PCG64(2))
    inputs = rng.integers(-8, 9, (1536, 384)).astype(np.float64)
    return _digest(upper_factor(inputs.T @ inputs, EXACT if exact else PLAIN))


def _digest(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:12]


def blas_kernel() -> str:
    """What OpenBLAS says its kernel is; "unknown" for another library."""
    try:
        maps = Path("/proc/self/maps").read_text("utf-8")
    except OSError:
        return "unknown"
    libraries = {line.split()[-1] for line in maps.splitlines() if "openblas" in line}
    for library in sorted(libraries):
        loaded = ctypes.CDLL(library)
        for name in ("scipy_openblas_get_corename64_", "scipy_openblas_get_corename", "openblas_get_corename"):
            if hasattr(loaded, name):
                function = getattr(loaded, name)
                function.restype = ctypes.c_char_p
                return str(function().decode("ascii"))
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
