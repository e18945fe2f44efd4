"""The lines of the Dockerfile, carried out without a container: a bare environment, and a folder in place of its root.

Absolute paths of the image lie below that folder, because the Dockerfile speaks of PHI4MM_HOME. What an engine would
add (layers, users, isolation) is not rehearsed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

HOME_VARIABLE = "PHI4MM_HOME"
KNOWN = frozenset({"ARG", "FROM", "ENV", "COPY", "RUN", "USER", "WORKDIR", "ENTRYPOINT"})


def instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    """Instruction and arguments, continued lines joined. Raises ValueError for an instruction that is not rehearsed."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word not in KNOWN:
            raise ValueError(f"the Dockerfile has an instruction that is not rehearsed: {word}")
        yield word, rest.strip()


def carry_out(context: Path, root: Path, environment: dict[str, str]) -> Iterator[tuple[str, int, str]]:
    """Every instruction that does something, with its exit code and what it printed; stops at a failure.

    context: the folder that is built from. environment: what an empty image has, PATH with a `python` in it.
    """
    inside: dict[str, str] = {}
    for word, rest in instructions((context / "Dockerfile").read_text("utf-8")):
        if word == "FROM":
            inside = dict(environment)
        elif word == "ENV":
            name, _, value = rest.partition("=")
            inside[name] = str(root) + value if name == HOME_VARIABLE else _filled(value, inside)
        elif word == "COPY":
            _copy(context, rest.split(), inside)
            yield f"COPY {rest}", 0, ""
        elif word == "RUN":
            done = subprocess.run(
                ["sh", "-c", rest], env=inside, cwd=root, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            yield f"RUN {rest}", done.returncode, done.stdout
            if done.returncode:
                return


def _copy(context: Path, words: list[str], inside: dict[str, str]) -> None:
    """COPY SOURCE... TARGET; from an earlier stage the files already lie at their place."""
    staged = words[0].startswith("--from=")
    *sources, target = (Path(_filled(word, inside)) for word in words[staged:])
    for source in sources:
        if staged:
            if not source.exists() or source != target:
                raise ValueError(f"COPY --from {source}: the earlier stage has no such path, or it moves to {target}")
        elif (context / source).is_dir():
            shutil.copytree(context / source, target, dirs_exist_ok=True)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(context / source, target / source.name)


def _filled(text: str, inside: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda found: inside.get(found.group(1), ""), text)
