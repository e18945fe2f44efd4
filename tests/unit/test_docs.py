"""The documentation cannot drift: commands parse, targets and scripts exist, links resolve, Python blocks compile."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from phi4mm_export.cli.app import COMMANDS, app
from phi4mm_export.errors import install_line

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
EVERYWHERE = {"--help", "--json", "--quiet", "--verbose", "--output", "--overwrite"}
"""Options that mean the same in every command that has them."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every fenced block."""
    yield from BLOCK.findall(page.read_text(encoding="utf-8"))


def lines_of(page: Path, program: str) -> Iterator[list[str]]:
    """The words of every command line of one program, in fenced blocks and as `inline` code with arguments."""
    text = page.read_text(encoding="utf-8")
    fenced = [line for _, block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(rf"`({program} [^`\n]+)`", BLOCK.sub("", text))
    for line in fenced + inline:
        words = shlex.split(line.removeprefix("$ "), comments=True) if line.strip() else []
        if words and words[0] == program:
            yield words[1:]


def complaint(words: list[str]) -> str:
    """Why the command line does not parse, or an empty string.

    Paths need not exist, option values must be possible; a command's name alone is a mention.
    """
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    root = typer.Context(group, info_name="phi4mm")
    if words[0].startswith("-"):
        return "" if words[0] in ("--help", "--version", "-h") else f"unknown option {words[0]}"
    command = group.get_command(root, words[0])
    if not isinstance(command, TyperCommand):
        return f"unknown command {words[0]}"
    if len(words) == 1 or "--help" in words:
        return ""
    context = typer.Context(command, parent=root, info_name=words[0])
    try:
        command.parse_args(context, list(words[1:]))
    except typer.TyperException as err:
        message = err.format_message()
        return "" if "does not exist" in message else message
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_documented_command_line_is_one_the_program_accepts(page: Path) -> None:
    wrong = {shlex.join(words): why for words in lines_of(page, "phi4mm") if (why := complaint(words))}

    assert wrong == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_documented_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = {word for words in lines_of(page, "make") for word in words if "=" not in word}

    assert asked - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_documented_script_exists_and_has_the_options_it_is_given(page: Path) -> None:
    named = set(re.findall(r"\b((?:scripts|examples)/[\w/.-]+\.(?:py|sh))\b", page.read_text(encoding="utf-8")))
    lines = [*lines_of(page, "python"), *([script, *words] for script in named for words in lines_of(page, script))]
    called = [words for words in lines if words and words[0] in named]

    assert [script for script in sorted(named) if not (ROOT / script).is_file()] == []
    assert [
        words for words in called if not {word for word in words if word.startswith("--")} <= options(words[0])
    ] == []


def options(script: str) -> set[str]:
    """Everything in a script, and in the modules beside it that it imports, that looks like an option."""
    text = (ROOT / script).read_text(encoding="utf-8")
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    beside = [path for path in (ROOT / script).parent.glob("*.py") if path.stem in imported]
    return set(re.findall(r"--[a-z][\w-]*", "\n".join([text, *(path.read_text(encoding="utf-8") for path in beside)])))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)

    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors that a Markdown renderer gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_compiles(page: Path) -> None:
    broken = []
    for language, block in blocks(page):
        if language == "python":
            try:
                compile(block, str(page), "exec")
            except SyntaxError as err:
                broken.append(f"{err.msg} at line {err.lineno} of the block")

    assert broken == []


def test_every_page_of_docs_is_reachable_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")

    missing = {page.name for page in ROOT.glob("docs/*.md")} - {"index.md"} - set(LINK.findall(index))

    assert missing == set()


def test_the_readme_lists_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert [name for name in COMMANDS if f"| `phi4mm {name}` |" not in readme] == []


@pytest.mark.parametrize("name", sorted(set(COMMANDS) & {page.stem for page in PAGES}))
def test_the_page_of_a_command_names_every_option_of_it(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    command = group.get_command(typer.Context(group, info_name="phi4mm"), name)
    assert command is not None

    options = [
        {*parameter.opts, *parameter.secondary_opts}
        for parameter in command.params
        if parameter.param_type_name == "option"
    ]

    assert [names for names in options if not names & EVERYWHERE and not any(name in page for name in names)] == []


def test_a_misspelt_option_a_wrong_value_and_a_spare_word_are_noticed() -> None:
    assert "No such option" in complaint(["synth", "OUT", "--sise", "tiny"])
    assert "huge" in complaint(["synth", "OUT", "--size", "huge"])
    assert "OTHER" in complaint(["synth", "OUT", "OTHER"])
    assert complaint(["nothing"]) == "unknown command nothing"


def test_every_extra_that_a_message_names_exists_and_can_be_installed_from_any_shell() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "phi4mm_export").rglob("*.py")]
    raised = {extra for text in sources for extra in re.findall(r'MissingExtraError\("[^"]+", "(\w+)"', text)}
    assert raised <= extras
    assert "media" in raised
    assert install_line("media") == 'pip install "phi4mm[media]"'
    assert not [text for text in sources if "'phi4mm[" in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_runtime_is_not_called_by_a_nickname_before_it_is_explained(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.search(r"\bog\b", text) is None or "`og` is onnxruntime-genai" in text
