"""The options of `phi4mm quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phi4mm_export.cli.choices import QuantMethod
from phi4mm_export.spec import quantization
from phi4mm_export.spec.contract import Component

Source = Annotated[
    Path, typer.Argument(metavar="PACKAGE|FILE", help="Package folder or ONNX file.", show_default=False)
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR|FILE", help="Package folder or ONNX file to write.")
]
Method = Annotated[QuantMethod, typer.Option(help="How codes are chosen; k_quant and hqq with --engine onnxruntime.")]
WhichGraph = Annotated[Component | None, typer.Option(help="Graph of the package; default vision.", show_default=False)]
Bits = Annotated[int, typer.Option(help="4 or 8.")]
BlockSize = Annotated[
    int | None, typer.Option(help="Weights per scale: 16 to 256; default 32 for 4 bits, 128 for 8.", show_default=False)
]
Symmetric = Annotated[bool, typer.Option(help="Without zero points, or with one per block.")]
Calibration = Annotated[
    str | None,
    typer.Option(metavar="PATH|GLOB|LIST|ZIP|builtin", help="Samples; builtin: made-up pages, clips and prompts."),
]
NumSamples = Annotated[int | None, typer.Option(min=1, help="Take this many, chosen by --seed.")]
Validation = Annotated[
    str | None, typer.Option(metavar="PATH", help="Judge by these samples in place of every 8th one.")
]
SkipUnreadable = Annotated[
    bool, typer.Option("--skip-unreadable", help="Leave out files that cannot be read, and name them.")
]
Damp = Annotated[float, typer.Option(help="Damping, as a share of the mean diagonal of the Hessian.")]
Order = Annotated[quantization.Order, typer.Option(help="Order of the columns; the stored order stays.")]
Sequential = Annotated[bool, typer.Option(help="Whether later layers see the quantized earlier ones.")]
BiasCorrection = Annotated[bool, typer.Option(help="Whether mean errors go into the bias.")]
Rotate = Annotated[
    bool | None,
    typer.Option(
        "--rotate/--no-rotate",
        help="Whether groups of 128 channels are mixed before each product; default for gptq, except in a decoder.",
        show_default=False,
    ),
]
PadForCuda = Annotated[
    bool | None,
    typer.Option(
        "--pad-for-cuda/--no-pad-for-cuda",
        help="Whether hidden layers are widened for CUDA's fast kernel; default for packages served there.",
        show_default=False,
    ),
]
Exclude = Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Leave these in float; repeatable.")]
Include = Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Only these; repeatable.")]
AccuracyLevel = Annotated[
    int | None, typer.Option(help="0 to 4; default 4 for a decoder on the CPU, else 0.", show_default=False)
]
Budget = Annotated[str | None, typer.Option(metavar="SIZE", help="What all weights may take; spare bytes buy 8 bits.")]
Seed = Annotated[int, typer.Option(min=0, help="Chooses samples, and draws the builtin ones.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Layers at once; never changes a byte.")]
Engine = Annotated[quantization.Engine, typer.Option(help="Who quantizes.")]
SaveStatistics = Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the Hessians there.")]
Statistics = Annotated[Path | None, typer.Option(metavar="DIR", help="Use Hessians kept by an earlier run.")]
QualityGate = Annotated[bool, typer.Option(help="Whether a bad result is refused with exit code 5.")]
MaxRelL2 = Annotated[float, typer.Option(help="Largest relative L2 error of the output.")]
TorchDevice = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE", help="Do gptq's linear algebra in torch there: cuda, cuda:1, cpu.", show_default=False
    ),
]
WorkDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Keep finished layers there, also after an error.")]
