"""Generate text from a prompt, images and audio with ONNX Runtime GenAI.

Example: phi4mm run PACKAGE --prompt "What is shown?" --image page.png
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from phi4mm_export.cli import render
from phi4mm_export.cli.options import JsonFlag, Quiet, Verbose
from phi4mm_export.errors import UsageError

MAX_PROMPT_NBYTES = 16 << 20
"""More than the longest context can hold."""


def command(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE", help="Package folder.", show_default=False)],
    prompt: Annotated[
        str,
        typer.Option(
            "--prompt", "-p", metavar="TEXT", help="The text; @FILE reads it from a file, - from standard input."
        ),
    ],
    image: Annotated[list[Path] | None, typer.Option("--image", metavar="FILE", help="A picture; repeatable.")] = None,
    audio: Annotated[
        list[Path] | None, typer.Option("--audio", metavar="FILE", help="A sound file; repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens of the answer.")] = 256,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", min=1, help="Most tokens of prompt and answer; default: what the request needs."),
    ] = None,
    ep: Annotated[
        str | None, typer.Option("--ep", metavar="cpu|cuda", help="Provider in place of the package's own.")
    ] = None,
    device: Annotated[int, typer.Option("--device", "--device-id", help="CUDA device; only 0 works.")] = 0,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System text before the prompt.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without chat format.")] = False,
    json: JsonFlag = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    from phi4mm_export.pipeline.run import run
    from phi4mm_export.spec.phi4mm_config import parse_provider

    result = run(
        package,
        prompt=read_prompt(prompt),
        images=image or (),
        audios=audio or (),
        system=system,
        raw=raw,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        provider=None if ep is None else parse_provider(ep),
        device=device,
        on_text=None if json else render.stream,
    )
    if json:
        render.document(asdict(result))
        return
    render.text()
    render.warnings(result.notes, quiet=quiet)
    if verbose:
        render.note(
            f"{result.prompt_tokens:,} prompt tokens in {result.prompt_seconds:.2f} s, "
            f"{result.new_tokens:,} new tokens at {result.tokens_per_second:.1f} tokens/s, "
            f"loaded in {result.load_seconds:.2f} s, on {result.device}, finished by {result.finish_reason}"
        )
        if result.restarts:
            render.note("started again with the whole sequence where it became longer than the short LongRoPE range")


def read_prompt(value: str) -> str:
    """The prompt itself, or what `@FILE` or `-` point to. Raises UsageError for a file that cannot be read."""
    if value == "-":
        return _decode(sys.stdin.buffer.read(MAX_PROMPT_NBYTES + 1), "standard input")
    if not value.startswith("@"):
        return value
    path = Path(value[1:])
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PROMPT_NBYTES + 1)
    except (OSError, ValueError) as err:  # ValueError: a name that no file can have
        reason = err.strerror if isinstance(err, OSError) else "no file can have this name"
        raise UsageError(f"the prompt file cannot be read: {reason}", where=str(path)) from err
    return _decode(data, str(path))


def _decode(data: bytes, where: str) -> str:
    if len(data) > MAX_PROMPT_NBYTES:
        raise UsageError(f"the prompt has more than {MAX_PROMPT_NBYTES:,} bytes", where=where)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise UsageError(
            f"the prompt is not UTF-8 text (byte {err.start:,})", where=where, fix="save it as UTF-8"
        ) from err
    return text.replace("\r\n", "\n").removesuffix("\n")
