"""Flip every byte of every small file of a package, and random bytes of its data files: `phi4mm verify` must find each.

    python scripts/verify_every_byte.py PACKAGE [--small 65536] [--random 10000] [--step 1]

Works on a copy beside the package; prints how many changes were made and how many were found.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from phi4mm_export.checks.claims import Claims, read_claims
from phi4mm_export.checks.files import compare_files
from phi4mm_export.package.manifest import MANIFEST_FILE, SUMS_FILE
from phi4mm_export.package.scan import scan
from phi4mm_export.pipeline.verify import verify


def main() -> int:
    """Exit code 1 when a change went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--small", type=int, default=1 << 16, help="files up to this many bytes are flipped whole")
    parser.add_argument("--random", type=int, default=10_000, help="random bytes of the larger files, as many of each")
    parser.add_argument("--step", type=int, default=1, help="distance of the flipped bytes of small files")
    given = parser.parse_args()
    started, lost = time.monotonic(), 0
    with tempfile.TemporaryDirectory(dir=given.package.resolve().parent, prefix="verify-every-byte-") as scratch:
        copy = Path(scratch) / "package"
        shutil.copytree(given.package, copy)
        if not verify(copy).ok:
            print("the package does not verify as it is", file=sys.stderr)
            return 1
        sizes = {path: path.stat().st_size for path in sorted(copy.rglob("*")) if path.is_file()}
        small = {path: size for path, size in sizes.items() if size <= given.small}
        large = {path: size for path, size in sizes.items() if size > given.small}
        for path, size in small.items():
            missed = flipped(copy, path, range(0, size, given.step))
            lost += report(copy, path, len(range(0, size, given.step)), missed)
        rng = random.Random(0)
        for number, path in enumerate(large):
            count = len(range(number, given.random, len(large)))
            offsets = [rng.randrange(large[path]) for _ in range(count)]
            lost += report(copy, path, len(offsets), flipped(copy, path, offsets))
    print(f"{lost} changes went unnoticed; {time.monotonic() - started:,.0f} s")
    return int(lost > 0)


def flipped(package: Path, path: Path, offsets: Iterable[int]) -> int:
    """How many flips of one bit were not put down to this file."""
    name, missed = path.relative_to(package).as_posix(), 0
    untouched = None if name in (MANIFEST_FILE, SUMS_FILE) else read_claims(package)
    with path.open("r+b", buffering=0) as file:
        for number, offset in enumerate(offsets):
            file.seek(offset)
            old = file.read(1)
            file.seek(offset)
            file.write(bytes([old[0] ^ (1 << number % 8)]))
            missed += not found(package, name, untouched or read_claims(package))
            file.seek(offset)
            file.write(old)
    return missed


def found(package: Path, name: str, claims: Claims) -> bool:
    """Whether a fault names the file: what `verify` finds without the graphs' external data, which needs no hash.

    Only the changed file is hashed, so that a package of gigabytes can be tried byte by byte.
    """
    alone = {key: value for key, value in claims.files.items() if key == name}
    entries = {key: entry for key, entry in scan(package).items() if key == name}
    narrowed = type(claims)(claims.manifest, alone, claims.faults, claims.tolerated)
    faults = [*claims.faults, *compare_files(package, narrowed, entries)[0]]
    return any(name in (fault.name, *fault.what.split()) for fault in faults)


def report(package: Path, path: Path, count: int, missed: int) -> int:
    """Print one file's line and return what was missed."""
    print(f"{path.relative_to(package).as_posix()}: {count:,} changes, {count - missed:,} found", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
