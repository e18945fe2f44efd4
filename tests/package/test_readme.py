"""The README's own lines work, in order, in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.media_files import picture_bytes, sound_bytes
from typer.testing import CliRunner

from phi4mm_export.cli.app import app

README = Path(__file__).parents[2] / "README.md"


def usage_lines() -> list[list[str]]:
    """The words of the first block under "Use", without the program's name."""
    section = README.read_text(encoding="utf-8").split("\n## Use\n")[1]
    block = re.findall(r"```\n(.*?)```", section, re.DOTALL)[0]
    return [shlex.split(line)[1:] for line in block.splitlines()]


@pytest.mark.slow
def test_the_lines_of_the_readme_make_a_package_and_answer_from_an_image_and_a_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photo.png").write_bytes(picture_bytes(300, 200))
    Path("clip.wav").write_bytes(sound_bytes(1.5))

    results = {shlex.join(words): CliRunner().invoke(app, words) for words in usage_lines()}

    assert {line: result.output for line, result in results.items() if result.exit_code} == {}
    answers = [result.stdout for line, result in results.items() if line.startswith("run")]
    assert len(answers) == 3
    assert all(answer.strip() for answer in answers)
