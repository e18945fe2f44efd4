"""Count what a disk may hold after a power failure during publish, and check every such state.

The operations of publishing a package (and an .onnx file with its data) are recorded, then replayed up to each of them
with any `--lost` unsynced ones lost, or all but these. No state may show a package that is neither old nor new; and the
next start must make each different state old or new again.

Example: python scripts/crash_states.py --lost 3
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.crashes import Disk, Recording, crash_states, recording
from support.syscalls import Watch, watched

from phi4mm_export.package.claim import claimed
from phi4mm_export.package.publish import recover, staged
from phi4mm_export.package.publish_model import heal_pair, staged_model

NEW = {
    "genai_config.json": b"new",
    "model.onnx": b"new graph",
    "model.onnx.data": b"new data",
    "phi4mm.json": b"new list",
}
NEW_PAIR = {"out.onnx": b"new graph", "out.onnx.data": b"new data"}
STARTS: dict[str, dict[str, bytes]] = {
    "package, new": {},
    "package, over an old one": {f"out/{name}": b"old" for name in ("genai_config.json", "model.onnx", "phi4mm.json")},
    "pair, new": {},
    "pair, over an old one": {"out.onnx": b"old graph", "out.onnx.data": b"old data"},
    "pair, over an old graph without data": {"out.onnx": b"old graph"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lost", type=int, default=3, help="operations lost (or kept) one by one, at most")
    lost, faults = parser.parse_args().lost, 0
    for name, before in STARTS.items():
        started = time.monotonic()
        is_pair = name.startswith("pair")
        states, different, wrong = check(record(before, is_pair=is_pair), before, is_pair=is_pair, lost=lost)
        faults += wrong
        spent = time.monotonic() - started
        print(
            f"{name}: {states:,} states, {different:,} different ones healed, {wrong} wrong, {spent:.1f} s", flush=True
        )
    return 1 if faults else 0


def record(before: dict[str, bytes], *, is_pair: bool) -> Recording:
    """The operations of one publish."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        write(root, before)
        target = staged_model(root / "out.onnx", overwrite=True) if is_pair else staged(root / "out", overwrite=True)
        with watched(Watch(root, record=True, sync=False)) as watch, target as staging:
            write(staging, NEW_PAIR if is_pair else NEW)
        return recording(before, watch.ops)


def check(recorded: Recording, before: dict[str, bytes], *, is_pair: bool, lost: int) -> tuple[int, int, int]:
    """Number of states, of different ones, and of wrong ones."""
    states, wrong, seen = 0, 0, set()
    whole = (before, NEW_PAIR if is_pair else {f"out/{name}": data for name, data in NEW.items()})
    for disk in crash_states(recorded, lost=lost):
        states += 1
        shown = visible(disk)
        absent = "out.onnx" not in shown if is_pair else not shown
        tree = tuple(sorted(disk.tree().items()))
        fresh = tree not in seen
        seen.add(tree)
        healed_badly = fresh and healed(dict(tree), is_pair=is_pair) not in whole
        if not (absent or shown in whole) or healed_badly:
            wrong += 1
    return states, len(seen), wrong


def visible(disk: Disk) -> dict[str, bytes]:
    """Every file that is not hidden."""
    return {name: data for name, data in disk.tree().items() if not name.startswith(".")}


def healed(tree: dict[str, bytes], *, is_pair: bool) -> dict[str, bytes]:
    """What stands there after the next start."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        write(root, tree)
        with watched(Watch(root, sync=False)):
            if is_pair:
                with claimed(root / "out.onnx", heal=heal_pair):
                    pass
            else:
                recover(root / "out")
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def write(root: Path, files: dict[str, bytes]) -> None:
    """Files with their folders."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


if __name__ == "__main__":
    sys.exit(main())
