"""Session, provider and run options in genai_config.json.

The runtime uses a section's own session options instead of the decoder's, never merged; every value of a provider's
options is a string. Behaviour observed with onnxruntime-genai 0.18.0 unless a source is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from phi4mm_export.checks.opened import CONFIG_FILE, OpenedPackage
from phi4mm_export.checks.report import Finding, error, note, warning
from phi4mm_export.errors import some
from phi4mm_export.spec.on_disk import is_file, is_inside_name

PROVIDERS = (
    "CPU",
    "cuda",
    "QNN",
    "WebGPU",
    "DML",
    "OpenVINO",
    "VitisAI",
    "RyzenAI",
    "NvTensorRtRtx",
    "AMDGPU",
)
"""Names that onnxruntime-genai normalizes its spellings to (NormalizeProviderName in its src/config.cpp)."""
CUDA_NUMBERS = (
    "max_mem",
    "arena_extend_strategy",
    "initial_chunk_size_bytes",
    "max_dead_bytes_per_chunk",
    "initial_growth_chunk_size_bytes",
)
"""Options that onnxruntime-genai itself parses as integers inside strings."""
SECTIONS = ("decoder", "vision", "speech", "embedding")


def check_session_options(package: OpenedPackage) -> Iterator[Finding]:
    """Findings about the session_options and run_options of every section."""
    for name in SECTIONS:
        yield from _session(package, name)


def provider_names(package: OpenedPackage, section: str = "decoder") -> list[str]:
    """Normalized provider names a section's session uses: its own session_options, else the decoder's."""
    own = package.section(section).get("session_options")
    options = own if isinstance(own, dict) else package.section("decoder").get("session_options")
    entries = options.get("provider_options") if isinstance(options, dict) else None
    names = (
        [name for entry in entries if isinstance(entry, dict) for name in entry] if isinstance(entries, list) else []
    )
    return [normalized_provider(name) or name for name in names]


def normalized_provider(name: str) -> str | None:
    """The runtime's own name for a provider, or None if it knows no such provider."""
    short = re.sub(r"executionprovider$", "", name.lower())
    return next((known for known in PROVIDERS if known.lower() == short), None)


def _session(package: OpenedPackage, name: str) -> Iterator[Finding]:
    section = package.section(name)
    options = section.get("session_options")
    place = f"{CONFIG_FILE}: model.{name}.session_options"
    if isinstance(options, dict):
        yield from _plain_options(package, place, options)
        entries = options.get("provider_options")
        for index, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, dict):
                if len(entry) != 1:
                    yield error(
                        "C330",
                        f"{place}.provider_options[{index}]",
                        "each entry names one provider",
                        expected="an object with one key",
                        found=f"{len(entry)} keys",
                    )
                for provider, values in entry.items():
                    where = f"{place}.provider_options[{index}].{provider}"
                    yield from _provider(where, provider, values if isinstance(values, dict) else {})
        if name != "decoder" and "cuda" in provider_names(package) and "cuda" not in provider_names(package, name):
            yield warning(
                "C335",
                place,
                "own session options replace the decoder's: this graph runs on the CPU",
                expected="the decoder's providers",
                found=entries,
            )
    yield from _run_options(package, name)


def _plain_options(package: OpenedPackage, place: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Options that belong to no provider, and whose values end the load."""
    level = options.get("log_severity_level")
    if isinstance(level, int | float) and level not in range(5):
        yield error(
            "C324",
            f"{place}.log_severity_level",
            "ONNX Runtime refuses the level",
            expected="0 to 4",
            found=level,
        )
    library = options.get("custom_ops_library")
    if isinstance(library, str) and library:
        there = is_inside_name(library) and is_file(package.folder / library)
        yield (warning if there else error)(
            "C325",
            f"{place}.custom_ops_library",
            "the runtime loads and runs this library"
            + ("" if there else ", which is not in the package: the load fails where it is not installed"),
            expected="no key: the operators of ONNX Runtime suffice for this model",
            found=repr(library),
        )


def _provider(where: str, provider: str, values: Mapping[str, Any]) -> Iterator[Finding]:
    known = normalized_provider(provider)
    if known is None:
        yield error(
            "C331",
            where,
            f"the runtime knows no provider {provider!r}",
            expected=f"one of {', '.join(PROVIDERS)}",
            found=provider,
            fix="write cuda for NVIDIA devices, and [] for the CPU",
        )
    if known == "CPU" and values:
        yield error("C332", where, "the CPU provider takes no options", expected="{}", found=some(values))
    if known != "cuda":
        return
    device = values.get("device_id")
    if isinstance(device, str) and device != "0":
        yield warning(
            "C333",
            f"{where}.device_id",
            "devices other than 0 are reported to fail while loading",
            expected='"0"',
            found=f'"{device}"',
            fix='keep "0" and choose the device with CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER=PCI_BUS_ID',
        )
    for key in CUDA_NUMBERS:
        value = values.get(key)
        if isinstance(value, str) and not re.fullmatch(r"-?\d+", value):
            yield error(
                "C334",
                f"{where}.{key}",
                "the runtime reads this value as a whole number",
                expected='digits in a string, such as "1"',
                found=f'"{value}"',
            )
    if values.get("enable_cuda_graph") == "1" and ".decoder." in where:
        yield error(
            "C336",
            f"{where}.enable_cuda_graph",
            "captured graphs get a mask of fixed length, from which this decoder would misread its lengths",
            expected='"0" or no key',
            found='"1"',
        )


def _run_options(package: OpenedPackage, name: str) -> Iterator[Finding]:
    options = package.section(name).get("run_options")
    if not isinstance(options, dict):
        return
    place = f"{CONFIG_FILE}: model.{name}.run_options"
    providers = provider_names(package, name)
    shrink = options.get("memory.enable_memory_arena_shrinkage")
    if isinstance(shrink, str):
        devices = ["cpu"] + (["gpu"] if "cuda" in providers else [])
        for word in shrink.split(";"):
            if not re.fullmatch(rf"({'|'.join(devices)}):\d+", word.strip()):
                yield error(
                    "C337",
                    f"{place}.memory.enable_memory_arena_shrinkage",
                    "no arena of this device exists in the session, so each run fails",
                    expected=" or ".join(f"{device}:0" for device in devices),
                    found=word,
                )
    if options.get("terminate_session") == "1":
        yield error("C338", f"{place}.terminate_session", "this stops every run", expected="no key", found='"1"')
    if name in ("decoder", "embedding") and shrink is not None:
        yield note("C339", place, "shrinking the arena at every decode step costs time")
