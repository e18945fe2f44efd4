"""The conditions under which repro.py builds: processors that this machine can play, and everything around a process.

Processors: BLAS kernels x threads x numpy's dispatch x what libm may use. Surroundings: what Debian's reproducible
builds vary as well (https://tests.reproducible-builds.org).
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

CORETYPE, NUMPY, LIBM = "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "GLIBC_TUNABLES"
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
NUMPY_CORE = "numpy._core._multiarray_umath"
"""Where numpy says what the processor has."""
NO_LIBM = "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F,-AVX512VL,-FMA4,-AVX2_Usable,-FMA_Usable"
KERNELS_X86 = (
    # kernel: what numpy calls the processor features it needs; weakest first
    ("Nehalem", ("SSE42",)),
    ("Sandybridge", ("AVX",)),
    ("Haswell", ("AVX2", "FMA3")),
    ("SkylakeX", ("AVX512_SKX",)),
)
MONTHS_13_S = 396 * 24 * 3600
ODD_NAME = "Ünïcode path, with spaces & more"
OTHER_DISK = Path("/dev/shm")


@dataclass(frozen=True)
class Variation:
    """One way to run a build. environment: on top of the plain one. order: for repro_chain.py. prefix: of the command.

    odd_place: model and output below a path with odd characters. other_disk: temporary and work files on another file
    system. note: what could not be varied as meant.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    order: Mapping[str, Any] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    umask: int = 0o022
    odd_place: bool = False
    elsewhere: bool = False
    other_disk: bool = False
    jobs: int | None = None
    skipped: str = ""
    note: str = ""


def plain_environment() -> dict[str, str]:
    """The parent's, without what would decide arithmetic or order; the tool is imported from this clone."""
    ours = (*THREADS, NUMPY, LIBM, "PYTHONHASHSEED", "TZ", "LC_ALL", "LANG", "TMPDIR")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    root = str(Path(__file__).resolve().parent.parent)
    return kept | {"PYTHONPATH": root, "PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8"}


def processors(*, short: bool) -> list[Variation]:
    """Every processor that this machine can play, after the one it is. short: one thing at a time, no BLAS kernels."""
    levels = [("numpy full", {}), *((f"numpy {name}", {NUMPY: " ".join(off)}) for name, off in numpy_levels())]
    threads = [(f"{n} thread{'s' * (n > 1)}", dict.fromkeys(THREADS, str(n))) for n in (2, 1)]
    libms = [("libm full", dict[str, str]())] + (
        [("libm without AVX2 and FMA", {LIBM: NO_LIBM})] if _has_glibc() else []
    )
    own = [("", dict[str, str]())]
    kernels = own if short else [(name, {CORETYPE: name}) for name in blas_kernels()] or own
    every = [
        Variation(", ".join(part for part, _ in parts if part), _merged(environment for _, environment in parts))
        for parts in product(kernels, threads, levels, libms)
    ]
    chosen = [*(v for v in every if _changes(v) <= 1), every[-1]] if short else every
    return [Variation("as it is"), *chosen]


def blas_kernels() -> list[str]:
    """OpenBLAS kernels that this processor can run; none where the environment has chosen one or none can be chosen."""
    if CORETYPE in os.environ or not blas_can_choose():
        return []
    features = processor_features()
    return [name for name, needs in KERNELS_X86 if all(features.get(need) for need in needs)]


def blas_can_choose() -> bool:
    """Whether numpy's BLAS is an OpenBLAS that carries several kernels."""
    import numpy as np

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return "DYNAMIC_ARCH" in str(blas.get("openblas configuration", ""))


def numpy_levels() -> Iterator[tuple[str, list[str]]]:
    """(name, features switched off) of the levels below the full one that this processor has."""
    features = processor_features()
    there = [name for name in dispatched_features() if features.get(name)]
    wide = [name for name in there if name.startswith(("AVX512", "X86_V4"))]
    if wide and wide != there:
        yield "without AVX-512", wide
    if there:
        yield "baseline", there


def processor_features() -> Mapping[str, bool]:
    """What numpy found in the processor."""
    return dict(importlib.import_module(NUMPY_CORE).__cpu_features__)


def dispatched_features() -> list[str]:
    """What numpy has code for beyond its baseline."""
    return list(importlib.import_module(NUMPY_CORE).__cpu_dispatch__)


def surroundings(scratch: Path) -> list[Variation]:
    """Everything around a process, one thing at a time, and at last all of them at once."""
    alone = [
        Variation("path", odd_place=True),
        _host(),  # before the user: another user may not rename the host
        _user(),
        Variation("umask 077", umask=0o077),
        Variation("time zone", {"TZ": "Pacific/Chatham"}),
        _turkish(),
        Variation("hash seed", {"PYTHONHASHSEED": "4242"}),
        Variation("order of folders", order={"reversed_folders": True}),
        _clock(),
        _other_disk(scratch),
        Variation("one core", order={"cores": 1}, skipped="" if hasattr(os, "sched_setaffinity") else "cannot be set"),
        Variation("current folder", elsewhere=True),
        Variation("one job", jobs=1),
        Variation("four jobs", jobs=4),
    ]
    return [*alone, _all_at_once(alone)]


def _all_at_once(alone: Sequence[Variation]) -> Variation:
    live = [v for v in alone if not v.skipped]
    order = dict[str, Any]()
    for variation in live:
        order |= variation.order
    return Variation(
        f"all {len(live)} at once",
        _merged(v.environment for v in live),
        order,
        tuple(word for v in live for word in v.prefix),
        umask=0o077,
        odd_place=True,
        elsewhere=True,
        other_disk=any(v.other_disk for v in live),
        jobs=4,
    )


def _user() -> Variation:
    """Another user id, by a user namespace: files stay readable whoever owns the interpreter."""
    environment = {"USER": "nobody", "LOGNAME": "nobody", "HOME": "/nonexistent"}
    prefix = ("unshare", "--user")
    fault = "" if _works(prefix) else "this machine allows no user namespaces"
    return Variation("user", environment, prefix=prefix, skipped=fault)


def _host() -> Variation:
    """Another host name, by a namespace where that is allowed, else in Python alone."""
    name = "another-host"
    rename = f'echo {name} > /proc/sys/kernel/hostname && exec "$@"'
    prefix = ("unshare", "--uts", "sh", "-c", rename, "sh")
    if _works(prefix):
        return Variation("host name", prefix=prefix)
    return Variation("host name", order={"host": name}, note="in Python only")


def _clock() -> Variation:
    """13 months later, by libfaketime where it is installed, else in Python alone."""
    if shutil.which("faketime"):
        return Variation("clock", prefix=("faketime", "-f", f"+{MONTHS_13_S}s"))
    return Variation("clock", order={"clock_s": MONTHS_13_S}, note="in Python only: no libfaketime")


def _turkish() -> Variation:
    """Where i and I are not the same letter."""
    environment = {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "LANGUAGE": "tr"}
    probe = [sys.executable, "-c", "import locale; locale.setlocale(locale.LC_ALL, '')"]
    installed = _works((), probe, environment)
    note = "" if installed else "the locale is not installed: only its name is set"
    return Variation("locale tr_TR", environment, {"locale": True} if installed else {}, note=note)


def _other_disk(scratch: Path) -> Variation:
    name = "temporary and work folders on another file system"
    if not OTHER_DISK.is_dir() or OTHER_DISK.stat().st_dev == scratch.stat().st_dev:
        return Variation(name, skipped=f"{OTHER_DISK} is none")
    return Variation(name, other_disk=True)


def _works(
    prefix: Sequence[str], command: Sequence[str] = ("true",), environment: Mapping[str, str] | None = None
) -> bool:
    try:
        done = subprocess.run(
            [*prefix, *command], env={**os.environ, **(environment or {})}, capture_output=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0


def _has_glibc() -> bool:
    return "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {})


def _merged(environments: Any) -> dict[str, str]:
    found = dict[str, str]()
    for environment in environments:
        found |= environment
    return found


def _changes(variation: Variation) -> int:
    """How many things differ from the plain run with two threads."""
    return sum(name in variation.environment for name in (CORETYPE, NUMPY, LIBM)) + (
        variation.environment.get(THREADS[0]) != "2"
    )
