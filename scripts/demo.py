"""The whole way on a synthetic model: checkpoint, export, validate, run, parity. No torch, no network.

    python scripts/demo.py [FOLDER]

FOLDER (default .demo) is made anew. The model is random, so the texts mean nothing; what the demo shows is that the
package runs in every mode and that its numbers are those of the PyTorch original (tests/goldens).
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
import wave
from pathlib import Path

import numpy as np

from phi4mm_export.checks.cases import Case, Group, InputMode
from phi4mm_export.checks.goldens import golden_table

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"
SAMPLE_RATE_HZ = 16_000
NEW_TOKENS = "24"


def write_photo(path: Path) -> None:
    """A picture of 600 x 400 pixels: two crops wide, with a padded edge."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (600, 400), (236, 240, 245))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((40, 220, 380, 360), fill=(64, 110, 160))
    draw.polygon(((30, 220), (210, 90), (390, 220)), fill=(180, 70, 50))
    draw.ellipse((450, 40, 550, 140), fill=(245, 190, 60))
    picture.save(path)


def write_clip(path: Path, seconds: float = 2.5) -> None:
    """A clip of 16 kHz mono: a tone that glides upward, with a slow tremolo."""
    at = np.arange(int(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    tone = np.sin(2 * np.pi * (220 * at + 90 * at**2)) * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * at))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE_HZ)
        file.writeframes((tone * 12_000).astype("<i2").tobytes())


def phi4mm(folder: Path, *words: str) -> str:
    """Run one command in the folder, showing it and what it prints; standard output is returned. Stops at a failure."""
    print(f"\n$ phi4mm {shlex.join(words)}", flush=True)
    start = time.monotonic()
    command = [sys.executable, "-m", "phi4mm_export", *words]
    result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=False)
    print(result.stdout, end="" if result.stdout.endswith("\n") else "\n")
    print(f"  ({time.monotonic() - start:.1f} s)", flush=True)
    if result.returncode:
        sys.exit(result.returncode)
    return result.stdout


def is_original_choice(case: Case) -> bool:
    """Whether the case is a whole request through all graphs, with the adapter that the original uses for it."""
    return case.group is Group.CHAIN and tuple(case.adapters) == (InputMode(case.mode).adapter,)


def make_and_ask(folder: Path) -> None:
    """The commands of the README, one after the other, inside the folder."""
    write_photo(folder / "photo.png")
    write_clip(folder / "clip.wav")
    phi4mm(folder, "synth", "checkpoint")
    phi4mm(folder, "inspect", "checkpoint")
    phi4mm(folder, "export", "checkpoint", "-o", "int8")
    phi4mm(folder, "export", "checkpoint", "-o", "fp32", "--precision", "fp32")
    phi4mm(folder, "validate", "int8")
    phi4mm(folder, "validate", "fp32")
    ask = ("run", "int8", "--max-new-tokens", NEW_TOKENS)
    phi4mm(folder, *ask, "--prompt", "What is a spectrogram?")
    phi4mm(folder, *ask, "--prompt", "What is shown?", "--image", "photo.png")
    phi4mm(folder, *ask, "--prompt", "What is said?", "--audio", "clip.wav")
    phi4mm(folder, *ask, "--prompt", "What is shown and said?", "--image", "photo.png", "--audio", "clip.wav")


def main() -> int:
    """Run the demo; the exit code is 0 if every command succeeded and both packages agree with the original."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".demo").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    make_and_ask(folder)
    for name in ("fp32", "int8"):
        table = golden_table(folder / name, GOLDENS, only=is_original_choice)
        print(f"\nThe {name} package against the PyTorch original, mode by mode:")
        print("\n".join(table.lines()))
        if not table.ok:
            print(f"\nthe {name} package does not agree with the original in every mode")
            return 4
    print(f"\nevery mode agrees with the original; {time.monotonic() - start:.0f} s in all; packages: {folder.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
