"""The package's tokenizer files: placeholders under the ids the runtime hard-codes, a class it loads, a chat template.

onnxruntime-genai takes the template from tokenizer_config.json, else chat_template.jinja, else chat_template.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phi4mm_export.checks.opened import CONFIG_FILE, OpenedPackage
from phi4mm_export.checks.report import Finding, error, warning
from phi4mm_export.errors import PackageError, some
from phi4mm_export.spec.json_text import json_kind, read_object
from phi4mm_export.spec.on_disk import is_file, is_inside_name
from phi4mm_export.spec.tokens import END_OF_TURN, PLACEHOLDERS, runtime_knows_class

TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def check_tokenizer(package: OpenedPackage) -> Iterator[Finding]:
    """Findings about tokenizer.json, tokenizer_config.json and the chat template."""
    folder = _folder(package)
    files: dict[str, dict[str, Any]] = {}
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
        try:
            files[name] = read_object(folder / name, error=PackageError)
        except PackageError as err:
            yield error("C500", name, err.what, fix=err.fix)
    ids = {name: _added_tokens(name, document) for name, document in files.items()}
    merged = {token: number for tokens in ids.values() for token, number in tokens.items()}
    if files:
        yield from _placeholders(ids)
        yield from _vocabulary(package, merged)
        yield from _end_of_turn(package, merged)
    if TOKENIZER_FILE in files:
        yield from _model(files[TOKENIZER_FILE])
    if TOKENIZER_CONFIG_FILE in files:
        yield from _class_and_template(folder, files[TOKENIZER_CONFIG_FILE])


def _model(document: Mapping[str, Any]) -> Iterator[Finding]:
    """The model with its vocabulary, without which the runtime refuses the file or encodes nothing."""
    model = document.get("model")
    fix = "copy tokenizer.json from the checkpoint again"
    if not isinstance(model, dict):
        what = "the tokenizer has no model: the runtime refuses it"
        yield error("C507", f"{TOKENIZER_FILE}: model", what, expected="an object", found=json_kind(model), fix=fix)
    elif not isinstance(model.get("vocab"), (dict, list)):
        what = "the tokenizer has no vocabulary: no text can be encoded"
        found = json_kind(model.get("vocab"))
        yield warning("C508", f"{TOKENIZER_FILE}: model.vocab", what, expected="token -> id", found=found, fix=fix)


def _folder(package: OpenedPackage) -> Path:
    model = package.config.get("model")
    name = model.get("tokenizer_dir") if isinstance(model, dict) else None
    return package.folder / name if isinstance(name, str) and is_inside_name(name) else package.folder


def _added_tokens(name: str, document: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id, as the file lists its added tokens; entries of another form are left out."""
    if name == TOKENIZER_FILE:
        entries = document.get("added_tokens")
        pairs = (
            [(e.get("content"), e.get("id")) for e in entries if isinstance(e, dict)]
            if isinstance(entries, list)
            else []
        )
    else:
        decoder = document.get("added_tokens_decoder")
        items = decoder.items() if isinstance(decoder, dict) else ()
        pairs = [(e.get("content"), int(key)) for key, e in items if isinstance(e, dict) and key.isdecimal()]
    return {token: number for token, number in pairs if isinstance(token, str) and isinstance(number, int)}


def _placeholders(ids: Mapping[str, Mapping[str, int]]) -> Iterator[Finding]:
    for token, wanted in PLACEHOLDERS.items():
        stated = {name: tokens[token] for name, tokens in ids.items() if token in tokens}
        if not stated:
            yield error(
                "C501",
                f"{TOKENIZER_FILE}: {token}",
                "the placeholder is in neither tokenizer file; media could not be placed",
                expected=f"an added token with the id {wanted}",
                fix="restore the original tokenizer files",
            )
        for name, number in stated.items():
            if number != wanted:
                yield error(
                    "C501",
                    f"{name}: {token}",
                    "the placeholder has another id than the runtime looks for",
                    expected=wanted,
                    found=number,
                    fix="restore the original tokenizer files; these two ids cannot be moved",
                )


def _vocabulary(package: OpenedPackage, tokens: Mapping[str, int]) -> Iterator[Finding]:
    model = package.config.get("model")
    vocab = model.get("vocab_size") if isinstance(model, dict) else None
    outside = [token for token, number in tokens.items() if isinstance(vocab, int) and number >= vocab]
    if outside:
        yield error(
            "C505",
            f"{TOKENIZER_FILE}: added_tokens",
            f"{len(outside)} tokens have ids beyond the vocabulary: {some(outside)}",
            expected=f"ids below {vocab}",
            found=max(tokens.values()),
        )


def _end_of_turn(package: OpenedPackage, tokens: Mapping[str, int]) -> Iterator[Finding]:
    model = package.config.get("model")
    eos = model.get("eos_token_id") if isinstance(model, dict) else None
    stops = eos if isinstance(eos, list) else [eos]
    if eos is not None and END_OF_TURN in tokens and tokens[END_OF_TURN] not in stops:
        yield warning(
            "C506",
            f"{CONFIG_FILE}: model.eos_token_id",
            f"{END_OF_TURN} does not stop generation: every answer runs to max_length",
            expected=f"{tokens[END_OF_TURN]} in the list",
            found=eos,
        )


def _class_and_template(folder: Path, document: Mapping[str, Any]) -> Iterator[Finding]:
    name = document.get("tokenizer_class")
    where = f"{TOKENIZER_CONFIG_FILE}: tokenizer_class"
    if name is None:
        yield error(
            "C502",
            where,
            "the key is missing: the runtime then drops the chat template",
            expected="GPT2TokenizerFast",
            fix="write the class",
        )
    elif not runtime_knows_class(name):
        yield error(
            "C502",
            where,
            "the runtime knows no such tokenizer class, or encodes differently with it",
            expected="GPT2TokenizerFast",
            found=name,
            fix="write GPT2TokenizerFast",
        )
    template = document.get("chat_template")
    if template is not None and not isinstance(template, str):
        yield error(
            "C503",
            f"{TOKENIZER_CONFIG_FILE}: chat_template",
            "the runtime refuses anything but one template",
            expected="a string",
            found=json_kind(template),
            fix="keep the default template only",
        )
    elif template is None and not any(is_file(folder / file) for file in TEMPLATE_FILES):
        yield warning(
            "C504",
            f"{TOKENIZER_CONFIG_FILE}: chat_template",
            "no chat template in the package",
            expected=f"the key, or {TEMPLATE_FILES[0]}",
            found="none",
        )
