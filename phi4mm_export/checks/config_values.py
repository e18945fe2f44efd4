"""genai_config.json by itself: keys and kinds the parser refuses, and values that fail or mislead later.

Where no other source is named, the behaviour was observed with onnxruntime-genai 0.18.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from phi4mm_export.checks.opened import CONFIG_FILE, OpenedPackage
from phi4mm_export.checks.report import Finding, error, warning
from phi4mm_export.errors import some
from phi4mm_export.spec.genai_keys import refused_keys

MODEL_TYPE = "phi4mm"


def check_values(package: OpenedPackage) -> Iterator[Finding]:
    """Findings about genai_config.json that need neither graphs nor other files."""
    if not package.config:
        return
    yield from _keys(package)
    model = package.config.get("model")
    if not isinstance(model, dict):
        yield error("C310", f"{CONFIG_FILE}: model", "the section is missing", expected="an object")
        return
    yield from _model(model)
    yield from _tokens(model)
    yield from _search(package.config.get("search"), model)


def _keys(package: OpenedPackage) -> Iterator[Finding]:
    for fault in refused_keys(dict(package.config)):
        fix = f"did you mean {fault.nearest!r}?" if fault.nearest else _key_advice(fault.path, fault.expected)
        yield error(
            "C302", f"{CONFIG_FILE}: {fault.path}", fault.what, expected=fault.expected, found=fault.found, fix=fix
        )
    raw = (package.folder / CONFIG_FILE).read_bytes()
    if re.search(rb"\\u[0-9a-fA-F]{4}", raw):
        yield error(
            "C303",
            CONFIG_FILE,
            r"holds a \u escape, which the runtime's parser refuses",
            fix="write the character itself",
        )


def _key_advice(path: str, expected: str) -> str:
    if ".provider_options[" in path and expected == "a string":
        return 'write the value as a string, such as "0"'
    if expected.startswith("one of"):
        return "remove the key"
    return f"write {expected}"


def _model(model: Mapping[str, Any]) -> Iterator[Finding]:
    if model.get("type") != MODEL_TYPE:
        yield error(
            "C311",
            f"{CONFIG_FILE}: model.type",
            "the runtime has no such model for these graphs",
            expected=MODEL_TYPE,
            found=model.get("type"),
        )
    length = model.get("context_length")
    if length is None or (_number(length) and length <= 0):
        yield error(
            "C312",
            f"{CONFIG_FILE}: model.context_length",
            "the context length must be above 0",
            expected="a number above 0",
            found=length,
        )
    for name in ("vision", "embedding"):
        if not isinstance(model.get(name), dict):
            yield error(
                "C313",
                f"{CONFIG_FILE}: model.{name}",
                "the section is missing; the runtime then refuses the folder with a misleading message",
                expected="an object with a filename",
                fix="write the section; vision cannot be left out",
            )
    speech = model.get("speech")
    if not isinstance(speech, dict) or (speech.get("filename") == "" and speech.get("config_filename") != ""):
        yield error(
            "C313",
            f"{CONFIG_FILE}: model.speech",
            "speech can be left out only with both file names empty",
            expected='a section, or {"filename": "", "config_filename": ""}',
        )
    for name in ("vision", "speech"):
        section = model.get(name)
        if isinstance(section, dict) and section.get("adapter_filename"):
            yield warning(
                "C314",
                f"{CONFIG_FILE}: model.{name}.adapter_filename",
                "onnxruntime-genai 0.9 to 0.18 never opens adapter files of this model type",
                found=section["adapter_filename"],
                fix="leave the key out, or apply the file with onnxruntime's own active adapters",
            )


def _tokens(model: Mapping[str, Any]) -> Iterator[Finding]:
    vocab = model.get("vocab_size")
    if not _number(vocab) or vocab <= 0:
        yield error(
            "C315",
            f"{CONFIG_FILE}: model.vocab_size",
            "the vocabulary size is missing or not positive",
            expected="the last dim of logits",
            found=vocab,
        )
        return
    eos = model.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    numbers = [item for item in ids if _number(item)]
    if eos is None or eos == []:
        yield warning(
            "C316", f"{CONFIG_FILE}: model.eos_token_id", "no stop token: the runtime then stops on the pad token"
        )
    outside = [item for item in numbers if not 0 <= item < vocab]
    if outside:
        yield error(
            "C317",
            f"{CONFIG_FILE}: model.eos_token_id",
            f"ids outside the vocabulary: {some(map(str, outside))}",
            expected=f"0 to {int(vocab) - 1}",
            found=some(map(str, outside)),
        )
    if len(set(numbers)) < len(numbers):
        yield warning("C318", f"{CONFIG_FILE}: model.eos_token_id", "an id stands in the list twice", found=ids)
    for key in ("bos_token_id", "pad_token_id"):
        value = model.get(key)
        if _number(value) and not 0 <= value < vocab:
            yield error(
                "C317",
                f"{CONFIG_FILE}: model.{key}",
                "the id is outside the vocabulary",
                expected=f"0 to {int(vocab) - 1}",
                found=value,
            )
    for key, fixed in (("image_token_id", 200010), ("audio_token_id", 200011)):
        if _number(model.get(key)) and model[key] != fixed:
            yield error(
                "C319",
                f"{CONFIG_FILE}: model.{key}",
                "the runtime ignores this key and looks for its own id",
                expected=fixed,
                found=model[key],
            )


def _search(search: Any, model: Mapping[str, Any]) -> Iterator[Finding]:
    if not isinstance(search, dict):
        return
    context = model.get("context_length")
    if "max_length" in search:
        length = search["max_length"]
        whole = isinstance(length, int) and not isinstance(length, bool)
        limit = int(context) if _number(context) and context >= 1 else None  # else C312 says so
        if not whole or length <= 0 or (limit is not None and length > limit):
            yield error(
                "C320",
                f"{CONFIG_FILE}: search.max_length",
                "the length must be a whole number between 1 and model.context_length",
                expected="a whole number from 1 on" if limit is None else f"1 to {limit}",
                found="null" if length is None else length,
                fix=f"write {'a length' if limit is None else f'{limit} or less'}, without a fraction",
            )
        elif _number(search.get("min_length")) and search["min_length"] > length:
            yield error(
                "C321",
                f"{CONFIG_FILE}: search.min_length",
                "longer than search.max_length",
                expected=f"at most {length}",
                found=search["min_length"],
            )
    yield from _counts(search)


def _counts(search: Mapping[str, Any]) -> Iterator[Finding]:
    """Beams, answers and rows of a batch: this model type has one of each."""
    for key, most in (("num_beams", None), ("num_return_sequences", 1), ("batch_size", 32)):
        count = search.get(key)
        if _number(count) and (count < 1 or (most is not None and count > most)):
            yield error(
                "C326",
                f"{CONFIG_FILE}: search.{key}",
                "the runtime refuses to open a generator with this number",
                expected=1 if most in (None, 1) else f"1 to {most}",
                found=count,
            )
    beams = search.get("num_beams", 1)
    if _number(beams) and beams > 1:
        yield error(
            "C322",
            f"{CONFIG_FILE}: search.num_beams",
            "beams fail in the embedding graph of this model type",
            expected=1,
            found=beams,
        )
    if _number(search.get("batch_size")) and 1 < search["batch_size"] <= 32:
        yield warning(
            "C323",
            f"{CONFIG_FILE}: search.batch_size",
            "with images or audio the runtime cuts one prompt into rows without an error",
            expected=1,
            found=search["batch_size"],
        )


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
