"""The tokenizer and chat template of a package: copied from the checkpoint, checked, corrected for the runtime.

Three corrections, each with a remark: a `tokenizer_class` that onnxruntime-genai does not load becomes one that gives
the same ids; a list of named chat templates becomes the default one; a chat_template.jinja that differs from the
template in tokenizer_config.json replaces it there, as transformers would read them (the runtime reads the latter).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phi4mm_export.errors import CheckpointError, some
from phi4mm_export.spec.json_text import BYTE_ORDER_MARK, json_bytes, json_kind, parse_json, parse_object, read_bytes
from phi4mm_export.spec.on_disk import is_entry
from phi4mm_export.spec.tokens import SAFE_TOKENIZER_CLASS, check_placeholders, runtime_knows_class

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
REQUIRED_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
OPTIONAL_FILES = (
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE_FILE,
    "chat_template.json",
)
HOLES_PER_VOCABULARY = 0.01
"""Ids without a token are normal in small numbers (padding rows); above this share the tokenizer was cut."""


@dataclass(frozen=True)
class TokenizerFiles:
    """`files`: name -> bytes for the package; `special`: added token -> id; `warnings`: corrections and oddities."""

    files: Mapping[str, bytes]
    special: Mapping[str, int]
    warnings: tuple[str, ...]


def tokenizer_files(folder: Path, *, vocab_size: int) -> TokenizerFiles:
    """The tokenizer files of a package, from a checkpoint's folder.

    Raises CheckpointError for a file that is missing or no valid JSON, added tokens that contradict one another, and
    image or audio placeholders with other ids than the runtime's.
    """
    files = {name: read_bytes(folder / name) for name in REQUIRED_FILES}
    files |= {name: read_bytes(folder / name) for name in OPTIONAL_FILES if is_entry(folder / name)}
    files = {name: data.removeprefix(BYTE_ORDER_MARK) for name, data in files.items()}
    parsed = {name: parse_json(data, name) for name, data in files.items() if name.endswith(".json")}
    tokenizer = _object(parsed, TOKENIZER_FILE)
    settings = _object(parsed, TOKENIZER_CONFIG_FILE)
    special = added_tokens(tokenizer, settings, parsed.get("added_tokens.json"))
    check_placeholders(special, where=TOKENIZER_FILE)
    template = _text(files[TEMPLATE_FILE], TEMPLATE_FILE) if TEMPLATE_FILE in files else None
    corrected, remarks = corrected_settings(settings, template)
    if corrected != settings:
        files[TOKENIZER_CONFIG_FILE] = json_bytes(corrected, indent=2)
    if not (corrected.get("chat_template") or template or "chat_template.json" in files):
        remarks = (
            *remarks,
            "the checkpoint has no chat template: prompts must be written out with their special tokens",
        )
    return TokenizerFiles(files, special, (*remarks, *_vocabulary_remarks(tokenizer, special, vocab_size)))


def _object(parsed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A parsed file that must be an object. Raises CheckpointError."""
    value = parsed[name]
    if not isinstance(value, dict):
        raise CheckpointError(f"expected a JSON object at the top, found {json_kind(value)}", where=name)
    return value


def read_added_tokens(folder: Path) -> dict[str, int]:
    """Added token -> id, from tokenizer.json and tokenizer_config.json. Raises CheckpointError."""
    tokenizer, settings = (parse_object(read_bytes(folder / name), name) for name in REQUIRED_FILES)
    return added_tokens(tokenizer, settings, None)


def added_tokens(tokenizer: Mapping[str, Any], settings: Mapping[str, Any], extra: Any) -> dict[str, int]:
    """Added token -> id from `added_tokens` of tokenizer.json, `added_tokens_decoder` of tokenizer_config.json and
    added_tokens.json; the runtime takes them from any of these.

    Raises CheckpointError if an entry is malformed, or if two entries disagree about a token or an id.
    """
    ids: dict[str, int] = {}
    tokens: dict[int, str] = {}
    for content, number, where in _entries(tokenizer, settings, extra):
        if ids.setdefault(content, number) != number:
            raise CheckpointError(
                f"the token {content} has the id {number} here and {ids[content]} elsewhere",
                where=where,
                fix="make tokenizer.json and tokenizer_config.json agree, best by restoring the original files",
            )
        if tokens.setdefault(number, content) != content:
            raise CheckpointError(
                f"the id {number} stands for {content} here and for {tokens[number]} elsewhere",
                where=where,
                fix="make tokenizer.json and tokenizer_config.json agree, best by restoring the original files",
            )
    return ids


def corrected_settings(
    settings: Mapping[str, Any], template_file: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """tokenizer_config.json as the runtime can read it, and a remark for each change; unchanged if it already can.

    `template_file` is the text of chat_template.jinja, None if there is none.
    """
    result, remarks = dict(settings), []
    known = runtime_knows_class(settings.get("tokenizer_class"))
    if not known:
        stated = settings.get("tokenizer_class")
        found = "is absent" if stated is None else f"{stated!r} is not known to ONNX Runtime GenAI"
        result["tokenizer_class"] = SAFE_TOKENIZER_CLASS
        remarks.append(
            f"{TOKENIZER_CONFIG_FILE}: tokenizer_class {found}; the package says {SAFE_TOKENIZER_CLASS}, same ids"
        )
    template = settings.get("chat_template")
    if isinstance(template, list | dict):
        result["chat_template"] = template = _default_template(template)
        remarks.append(
            f"{TOKENIZER_CONFIG_FILE}: chat_template held several templates; the package keeps the default one"
        )
    elif template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"expected a string, found {json_kind(template)}", where=f"{TOKENIZER_CONFIG_FILE}: chat_template"
        )
    if template_file is not None and template is not None and template != template_file:
        result["chat_template"] = template_file
        remarks.append(
            f"{TOKENIZER_CONFIG_FILE}: chat_template differs from {TEMPLATE_FILE}, which transformers prefers; "
            "the package has the latter in both"
        )
    return result, tuple(remarks)


def _default_template(templates: list[Any] | dict[str, Any]) -> str:
    where = f"{TOKENIZER_CONFIG_FILE}: chat_template"
    named: dict[str, str] = {}
    entries = templates.items() if isinstance(templates, dict) else [_named_template(item, where) for item in templates]
    for name, text in entries:
        if not isinstance(text, str):
            raise CheckpointError(f"the template {name!r} is {json_kind(text)}, expected a string", where=where)
        named[name] = text
    if "default" in named:
        return named["default"]
    if len(named) == 1:
        return next(iter(named.values()))
    raise CheckpointError(
        f"found {len(named)} named templates ({some(named)}), expected one called 'default'",
        where=where,
        fix="write the wanted template as a string",
    )


def _named_template(item: Any, where: str) -> tuple[str, Any]:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise CheckpointError("expected objects with name and template", where=where)
    return item["name"], item.get("template")


def _entries(tokenizer: Mapping[str, Any], settings: Mapping[str, Any], extra: Any) -> Iterator[tuple[str, int, str]]:
    """(token, id, place) of every added token."""
    where = f"{TOKENIZER_FILE}: added_tokens"
    listed = tokenizer.get("added_tokens") or []
    if not isinstance(listed, list):
        raise CheckpointError(f"expected a list, found {json_kind(listed)}", where=where)
    for entry in listed:
        body = entry if isinstance(entry, dict) else {}
        yield _entry(body.get("content"), body.get("id"), where)
    where = f"{TOKENIZER_CONFIG_FILE}: added_tokens_decoder"
    table = settings.get("added_tokens_decoder") or {}
    if not isinstance(table, dict):
        raise CheckpointError(f"expected an object, found {json_kind(table)}", where=where)
    for key, entry in table.items():
        number = int(key) if key.isascii() and key.isdigit() else key
        yield _entry(entry.get("content") if isinstance(entry, dict) else None, number, where)
    if isinstance(extra, dict):
        for content, number in extra.items():
            yield _entry(content, number, "added_tokens.json")


def _entry(content: Any, number: Any, where: str) -> tuple[str, int, str]:
    if not isinstance(content, str) or isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise CheckpointError(
            f"expected tokens with a text and a whole number as id, found {content!r} with id {number!r}", where=where
        )
    return content, number, where


def _vocabulary_remarks(tokenizer: Mapping[str, Any], special: Mapping[str, int], vocab_size: int) -> Iterator[str]:
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    numbers = {number for number in vocab.values() if isinstance(number, int)} if isinstance(vocab, dict) else set()
    numbers |= set(special.values())
    beyond = sorted(number for number in numbers if number >= vocab_size)
    if beyond:
        yield (
            f"{TOKENIZER_FILE}: {len(beyond):,} tokens have ids from {vocab_size:,} on, which the model does not have "
            f"({some(map(str, beyond), 3)}); prompts that contain them fail"
        )
    holes = vocab_size - (len(numbers) - len(beyond))
    if holes > vocab_size * HOLES_PER_VOCABULARY:
        yield f"{TOKENIZER_FILE}: {holes:,} of {vocab_size:,} ids have no token; the runtime prints nothing for them"


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as err:
        raise CheckpointError(f"the text is not UTF-8 (byte {err.start:,})", where=name) from err
