"""vision_processor.json and speech_processor.json: what onnxruntime-genai refuses, and what fails without a word.

Observed with onnxruntime-genai 0.18.0: without an output aligner the image mask is all zeros and the audio sizes are 0;
values are read strictly by kind (1 is no 1.0); unknown attributes of most operators are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phi4mm_export.checks.opened import OpenedPackage
from phi4mm_export.checks.report import Finding, error, note, warning
from phi4mm_export.errors import PackageError, some
from phi4mm_export.spec.json_text import json_kind, read_object
from phi4mm_export.spec.model import IMAGE_SIZE
from phi4mm_export.spec.on_disk import is_file, is_inside_name
from phi4mm_export.spec.processors import ProcessorValues, speech_processor, vision_processor

DEFAULT_MAX_SAMPLES = 480_000
"""Samples at 16 kHz after which the runtime's audio decoder cuts a clip unless told otherwise: 30 seconds."""
AUDIO_COMPRESSION_RATE = 8
_PREPROCESS, _RESCALE, _NORMALIZE = "Phi4VisionDynamicPreprocess", "Rescale", "Normalize"
_VISION, _DECODER, _EMBED = "Phi4VisionProcessor", "AudioDecoderEx", "Phi4AudioEmbed"
_LENIENT_PREFIX = "logmel_8k/"
"""The one group of attributes in which the runtime ignores unknown names."""


@dataclass(frozen=True)
class _Operation:
    where: str
    kind: str
    attrs: Mapping[str, Any]


def check_processors(package: OpenedPackage) -> Iterator[Finding]:
    """Findings about both processor files; one that is missing is reported with the config."""
    for section, check in (("vision", _vision), ("speech", _speech)):
        file = package.section(section).get("config_filename")
        if not isinstance(file, str) or not is_inside_name(file) or not is_file(package.folder / file):
            continue
        try:
            document = read_object(package.folder / file, error=PackageError, where=file)
        except PackageError as err:
            yield error("C400", file, err.what, fix=err.fix)
            continue
        yield from check(file, document)


def _vision(file: str, document: Mapping[str, Any]) -> Iterator[Finding]:
    published = vision_processor(ProcessorValues())
    operations: list[_Operation] = []
    yield from _structure(file, document, published, "processor", "transforms", operations)
    resolutions = {}
    for operation in operations:
        if operation.kind == _VISION and operation.attrs.get("interpolation", "CUBIC") != "CUBIC":
            yield error(
                "C413",
                f"{operation.where}.interpolation",
                "the published package says CUBIC; a word that the runtime does not know ends the load",
                expected="CUBIC",
                found=operation.attrs["interpolation"],
            )
        if operation.kind == _PREPROCESS:
            yield from _unknown(operation, {"dynamic_hd", "dyhd_base_resolution"})
            yield from _whole(operation, "dynamic_hd", 1)
            resolutions[operation.where] = operation.attrs.get("dyhd_base_resolution", IMAGE_SIZE)
        elif operation.kind == _VISION:
            resolutions[operation.where] = operation.attrs.get("dyhd_base_resolution", IMAGE_SIZE)
        elif operation.kind == _RESCALE:
            yield from _unknown(operation, {"scale"})
        elif operation.kind == _NORMALIZE:
            yield from _floats(operation)
        elif operation.kind == "DecodeImage" and operation.attrs.get("color_space", "RGB") != "RGB":
            yield warning(
                "C408",
                f"{operation.where}.color_space",
                "the channels are swapped for this model",
                expected="RGB",
                found=operation.attrs["color_space"],
            )
    for where, value in resolutions.items():
        if value != IMAGE_SIZE or isinstance(value, float):
            yield error(
                "C404",
                f"{where}.dyhd_base_resolution",
                "the crop size must be that of the vision graph in both operators; the runtime does not check it",
                expected=IMAGE_SIZE,
                found=value,
            )


def _speech(file: str, document: Mapping[str, Any]) -> Iterator[Finding]:
    published = speech_processor(ProcessorValues())
    operations: list[_Operation] = []
    yield from _structure(file, document, published, "feature_extraction", "sequence", operations)
    for operation in operations:
        if operation.kind == _DECODER:
            yield from _unknown(operation, {"target_sample_rates", "max_samples"})
            yield from _decoder(operation)
        elif operation.kind == _EMBED:
            known = published["feature_extraction"]["sequence"][1]["operation"]["attrs"]
            lenient = {name for name in operation.attrs if name.startswith(_LENIENT_PREFIX)}
            yield from _unknown(operation, {*known, *lenient, "qformer_compression_rate"})
            yield from _same_kinds(operation, known)
            rate = operation.attrs.get("audio_compression_rate", AUDIO_COMPRESSION_RATE)
            if rate != AUDIO_COMPRESSION_RATE:
                yield error(
                    "C407",
                    f"{operation.where}.audio_compression_rate",
                    "the runtime would expect another number of audio tokens than the speech graph gives",
                    expected=AUDIO_COMPRESSION_RATE,
                    found=rate,
                )


def _structure(
    file: str,
    document: Mapping[str, Any],
    published: Mapping[str, Any],
    root: str,
    steps: str,
    operations: list[_Operation],
) -> Iterator[Finding]:
    """The operators in order; appends what it finds to `operations`."""
    body = document.get(root)
    if not isinstance(body, dict) or not isinstance(body.get(steps), list):
        yield error(
            "C401",
            f"{file}: {root}.{steps}",
            "the list of operators is missing",
            expected="a list",
            fix="write the file again with: phi4mm config",
        )
        return
    for index, step in enumerate(body[steps]):
        where = f"{file}: {root}.{steps}[{index}].operation"
        operation = step.get("operation") if isinstance(step, dict) else None
        if not isinstance(operation, dict) or not all(isinstance(operation.get(k), str) for k in ("name", "type")):
            yield error("C401", where, "an operator without name and type", expected="an object with name and type")
            continue
        attrs = operation.get("attrs", {})
        operations.append(_Operation(f"{where}.attrs", operation["type"], attrs if isinstance(attrs, dict) else {}))
    wanted = [step["operation"]["type"] for step in published[root][steps]]
    found = [operation.kind for operation in operations]
    if found != wanted:
        yield error(
            "C402",
            f"{file}: {root}.{steps}",
            "not the operators of this model in their order",
            expected=", ".join(wanted),
            found=", ".join(found) or "none",
        )
    aligner = published[root]["output_aligner"]
    if body.get("output_aligner") != aligner:
        lost = "the image mask comes out as zeros" if root == "processor" else "the audio sizes come out as 0"
        yield error(
            "C403",
            f"{file}: {root}.output_aligner",
            f"without it {lost}, silently",
            expected=aligner,
            found=body.get("output_aligner", "no key"),
        )


def _decoder(operation: _Operation) -> Iterator[Finding]:
    rates = operation.attrs.get("target_sample_rates")
    if "target_sample_rates" in operation.attrs and (
        not isinstance(rates, list) or not all(type(rate) is int for rate in rates)
    ):
        yield error(
            "C405",
            f"{operation.where}.target_sample_rates",
            "the runtime wants a list of whole numbers",
            expected="[8000, 16000]",
            found=rates,
        )
    elif isinstance(rates, list) and 16000 not in rates:
        yield error(
            "C405",
            f"{operation.where}.target_sample_rates",
            "the model hears 16 kHz",
            expected="[8000, 16000]",
            found=rates,
        )
    limit = operation.attrs.get("max_samples", DEFAULT_MAX_SAMPLES)
    where = f"{operation.where}.max_samples"
    if type(limit) is not int or limit < 0:
        yield error("C406", where, "the runtime refuses this limit", expected="a whole number, 0 for none", found=limit)
    elif limit > 0:
        yield note(
            "C409",
            where,
            f"clips are cut silently after {limit:,} samples ({limit / 16000:g} s at 16 kHz)",
            expected="0 for no limit",
            found=operation.attrs.get("max_samples", "no key"),
        )


def _unknown(operation: _Operation, known: set[str]) -> Iterator[Finding]:
    unknown = [name for name in operation.attrs if name not in known]
    if unknown:
        yield error(
            "C410",
            f"{operation.where}.{unknown[0]}",
            f"{operation.kind} refuses attributes it does not know: {some(unknown)}",
            expected=f"some of {', '.join(sorted(known))}",
            fix="remove the attribute",
        )


def _whole(operation: _Operation, name: str, least: int) -> Iterator[Finding]:
    value = operation.attrs.get(name)
    if name in operation.attrs and (type(value) is not int or value < least):
        yield error(
            "C411",
            f"{operation.where}.{name}",
            "a value that the runtime cannot take",
            expected=f"a whole number from {least}",
            found=value,
        )


def _floats(operation: _Operation) -> Iterator[Finding]:
    for name in ("mean", "std"):
        value = operation.attrs.get(name)
        fits = isinstance(value, list) and len(value) == 3 and all(isinstance(number, float) for number in value)
        if name in operation.attrs and not fits:
            yield error(
                "C412",
                f"{operation.where}.{name}",
                "the runtime wants fractions, written with a point",
                expected="three numbers such as 0.5 or 1.0",
                found=value,
            )


def _same_kinds(operation: _Operation, published: Mapping[str, Any]) -> Iterator[Finding]:
    for name, value in operation.attrs.items():
        if name in published and type(value) is not type(published[name]):
            yield error(
                "C412",
                f"{operation.where}.{name}",
                "the runtime reads values strictly by kind",
                expected=json_kind(published[name]),
                found=f"{json_kind(value)}: {value!r:.40}",
            )
