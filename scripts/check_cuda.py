"""Export, validate, run and measure on a CUDA device, in one command.

    python scripts/check_cuda.py [MODEL] [--precision int8 --precision int4] [--work DIR] [--require] [--rehearse]

MODEL is a checkpoint folder or hub id; without one a small synthetic checkpoint is made. For each precision the package
is exported with `--ep cuda`, validated, and asked in all four modes on device 0 and again on the CPU. The table shows
tokens/s, the peak of the device's memory, and how many greedy tokens agree with the CPU. Without a CUDA device it says
so and exits 0 (6 with `--require`); `--rehearse` goes through the same steps on the CPU.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from phi4mm_export.errors import ExitCode, MissingExtraError, Phi4mmError, install_line
from phi4mm_export.pipeline.export import export
from phi4mm_export.pipeline.synth import synth
from phi4mm_export.pipeline.validate import validate
from phi4mm_export.runtime.audio import SAMPLE_RATE_HZ, Clip, decode_audio
from phi4mm_export.runtime.generate import Generation, TextGenerator
from phi4mm_export.runtime.images import Picture, decode_image
from phi4mm_export.runtime.ort import import_genai, import_onnxruntime
from phi4mm_export.runtime.package import open_package
from phi4mm_export.runtime.prompts import build_prompt
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.recipe import Precision, Recipe

NEW_TOKENS = 64
SAMPLE_EVERY_MS = 50


@dataclass
class Memory:
    """Bytes of device 0 in use: before, and the most that was seen."""

    before_mib: int = 0
    peak_mib: int = 0
    samples: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One mode of one package."""

    precision: str
    mode: str
    answer: Generation
    peak_mib: int
    agreeing: int


def why_no_cuda() -> str | None:
    """What is missing for running on CUDA, None if nothing is."""
    try:
        ort = import_onnxruntime(cuda=True)
        genai = import_genai(cuda=True)
    except MissingExtraError as err:
        return str(err)
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return f"the installed onnxruntime has no CUDA provider ({install_line('cuda')})"
    if not genai.is_cuda_available():
        return f"the installed onnxruntime-genai has no CUDA support ({install_line('cuda')})"
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not there"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return None if listed.returncode == 0 and "GPU 0" in listed.stdout else "nvidia-smi lists no GPU"


@contextmanager
def watched(*, on_cuda: bool) -> Iterator[Memory]:
    """Sample the memory in use on device 0 while the block runs."""
    memory = Memory()
    if not on_cuda:
        yield memory
        return
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    memory.before_mib = int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    watcher = subprocess.Popen([*query, f"--loop-ms={SAMPLE_EVERY_MS}"], stdout=subprocess.PIPE, text=True)

    def collect() -> None:
        for line in watcher.stdout or ():
            if line.strip().isdigit():
                memory.samples.append(int(line))

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        watcher.terminate()
        watcher.wait()
        thread.join()
        memory.peak_mib = max([memory.before_mib, *memory.samples])


def media() -> tuple[list[Picture], list[Clip]]:
    """A seeded picture and a seeded clip of three seconds."""
    from PIL import Image

    rng = np.random.default_rng(1)
    buffer = io.BytesIO()
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    coarse.resize((1344, 896), Image.Resampling.BICUBIC).save(buffer, "PNG")
    picture = decode_image(buffer.getvalue(), "picture.png")

    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, 0.1 * rng.standard_normal(3 * SAMPLE_RATE_HZ), SAMPLE_RATE_HZ, format="WAV")
    return [picture], [decode_audio(buffer.getvalue(), "clip.wav")]


def ask(package: Path, provider: Provider) -> Iterator[tuple[str, Generation, int]]:
    """Mode, answer and peak MiB of every mode on one provider."""
    pictures, clips = media()
    modes = {"text": ([], []), "image": (pictures, []), "audio": ([], clips), "both": (pictures, clips)}
    generator = TextGenerator(open_package(package), provider=provider)
    for mode, (images, audios) in modes.items():
        prompt = build_prompt("Describe what you get.", num_images=len(images), num_audios=len(audios))
        request = generator.processor(prompt.text, images, audios)
        generator.generate(request, max_new_tokens=2)  # the first run loads kernels
        with watched(on_cuda=provider is Provider.CUDA) as memory:
            answer = generator.generate(request, max_new_tokens=NEW_TOKENS)
        yield mode, answer, memory.peak_mib


def check(model: Path | str, work: Path, precision: Precision, *, device: Provider) -> list[Row]:
    """Export for CUDA, validate, run on `device` and on the CPU. Raises the errors of each step."""
    package = work / f"package-{precision}"
    report = export(model, package, recipe=Recipe.resolve(provider=Provider.CUDA, precision=precision))
    print(f"{precision}: exported {report.nbytes:,} bytes")
    findings = validate(package, provider=Provider.CUDA).findings
    print(f"{precision}: validate has {len(findings)} findings", *findings, sep="\n  ")
    expected = {mode: answer.token_ids for mode, answer, _ in ask(package, Provider.CPU)}
    return [
        Row(str(precision), mode, answer, peak_mib, _agreeing(answer.token_ids, expected[mode]))
        for mode, answer, peak_mib in ask(package, device)
    ]


def _agreeing(ours: tuple[int, ...], cpu: tuple[int, ...]) -> int:
    """Tokens before the first difference."""
    pairs = enumerate(zip(ours, cpu, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(ours), len(cpu)))


def show(rows: list[Row]) -> None:
    """Print the table."""
    heads = ("prompt", "prompt s", "tokens/s", "peak MiB")
    print(f"\n{'precision':10s}{'mode':7s}" + "".join(f"{head:>10s}" for head in heads) + "  as on the CPU")
    for row in rows:
        answer, same = row.answer, f"{row.agreeing} of {len(row.answer.token_ids)} tokens"
        print(
            f"{row.precision:10s}{row.mode:7s}{answer.prompt_tokens:10,d}{answer.prompt_seconds:10.3f}"
            f"{answer.tokens_per_second:10.1f}{row.peak_mib:10,d}  {same}"
        )


def main() -> int:
    """Run every check; the exit code is that of `phi4mm`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="checkpoint folder or hub id (default: a synthetic one)")
    parser.add_argument("--precision", action="append", choices=[p.value for p in Precision if p is not Precision.FP32])
    parser.add_argument("--work", type=Path, help="folder for the packages (default: a temporary one)")
    parser.add_argument("--require", action="store_true", help="exit 6 when there is no CUDA device")
    parser.add_argument("--rehearse", action="store_true", help="go through the steps on the CPU")
    args = parser.parse_args()

    reason = why_no_cuda()
    if reason is not None and not args.rehearse:
        print(f"no CUDA device: {reason}")
        return ExitCode.SYSTEM if args.require else ExitCode.OK
    device = Provider.CPU if args.rehearse else Provider.CUDA
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        try:
            model = args.model or synth(work / "checkpoint", overwrite=True).path
            rows = [
                row for name in args.precision or ["int8", "int4", "fp16"]
                for row in check(model, work, Precision(name), device=device)
            ]  # fmt: skip
        except Phi4mmError as err:
            print(f"error: {err}", file=sys.stderr)
            return int(err.exit_code)
        show(rows)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
