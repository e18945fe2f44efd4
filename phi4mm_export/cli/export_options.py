"""The options of `phi4mm export`: their types and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phi4mm_export.cli.choices import EncoderPrecision
from phi4mm_export.spec.build_recipe import AdapterChoice, HeadOfTwo
from phi4mm_export.spec.contract import Component, PackageLayout
from phi4mm_export.spec.recipe import LoraForm, Precision

Option = typer.Option

Model = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder of a checkpoint, or a hub id.")]
Components = Annotated[list[Component] | None, Option("--component", help="Only these graphs; repeatable.")]
Ep = Annotated[str, Option(metavar="cpu|cuda", help="Execution provider. The float type follows it.")]
DecoderPrecision = Annotated[Precision, Option(help="Decoder weights.")]
EncoderWeights = Annotated[EncoderPrecision | None, Option(help="Vision and speech weights.")]
TableWeights = Annotated[Precision | None, Option(help="Token table.")]
LoraWeights = Annotated[Precision | None, Option(help="Adapters; as the decoder by default.")]
BlockSize = Annotated[int | None, Option(help="Weights per scale: 16 to 256; default 128 for int8, 32 for int4.")]
AccuracyLevel = Annotated[int | None, Option(help="MatMulNBits accuracy level, 0 to 4; default 4 on cpu, 0 on cuda.")]
Rotate = Annotated[
    bool | None,
    Option("--rotate/--no-rotate", help="Mix channels before integer products; default with int8 activations."),
]
Form = Annotated[LoraForm, Option(help="How the adapters reach the decoder.")]
Adapter = Annotated[AdapterChoice | None, Option(help="The adapter of --lora merged and branch; default vision.")]
AdapterPath = Annotated[
    list[str] | None,
    Option(metavar="[ROLE=]DIR", help="PEFT folder that replaces the built-in adapter of its role; repeatable."),
]
FileLayout = Annotated[PackageLayout, Option(help="File names: as published, or one folder per graph.")]
FromPackage = Annotated[
    Path | None, Option(metavar="DIR", help="Take what is not exported from this package, unchanged.")
]
MaxLength = Annotated[int | None, Option(help="Most tokens of prompt and answer; default the context length.")]
MemoryBudget = Annotated[
    str | None, Option(metavar="SIZE", help="Largest max_length whose cache fits, for example 4GiB.")
]
FullLogits = Annotated[bool, Option("--full-logits", help="Logits of every position, not only the last.")]
HeadChoice = Annotated[HeadOfTwo | None, Option(help="Which head counts when a tied one is also stored.")]
ReleaseArena = Annotated[
    bool, Option("--release-arena", help="Give the encoders' memory back after each of their runs.")
]
OriginalAudioLimit = Annotated[
    bool, Option("--original-audio-limit", help="Cut clips at 30 s, as the runtime does by default.")
]
Revision = Annotated[str | None, Option(metavar="REVISION", help="Commit, branch or tag of a hub id.")]
Stream = Annotated[
    bool, Option("--stream/--no-stream", help="Read a hub model in ranges, with no copy of its weights on disk.")
]
MemoryLimit = Annotated[
    str | None, Option(metavar="SIZE", help="Most memory for weights in work, for example 64MiB; never changes a byte.")
]
Jobs = Annotated[int | None, Option(min=1, help="Threads; never changes a byte.")]
WorkDir = Annotated[
    Path | None, Option(metavar="DIR", help="Keep finished weights here after an error, and use them again.")
]
DryRun = Annotated[bool, Option("--dry-run", help="Say what would be written, and stop.")]
