"""Coverage-guided fuzzing of the readers with atheris (optional: pip install atheris, Linux).

The seed corpus is written from the valid files of tests/support/fuzzing.py. Arguments after `--` go to libFuzzer.

Example: python scripts/atheris_headers.py --kind header --corpus corpus/header -- -runs=1000000 -max_len=4096
         python scripts/atheris_headers.py --kind manifest --corpus corpus/manifest --seeds-only
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

NUM_DAMAGED_SEEDS = 40


def main() -> int:
    own, _, theirs = (list(part) for part in _split(sys.argv[1:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="header")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of seeds, made when it is empty")
    parser.add_argument("--seeds-only", action="store_true", help="write the seeds and stop")
    options = parser.parse_args(own)
    if options.seeds_only:
        write_seeds(options.kind, options.corpus)
        return 0
    try:
        import atheris
    except ImportError:
        print("atheris is not installed: pip install atheris", file=sys.stderr)
        return 6
    with atheris.instrument_imports(include=["phi4mm_export"]):  # the first import of the readers
        from support.fuzzing import KINDS, attempt, scratch

    kind = KINDS[options.kind]
    write_seeds(options.kind, options.corpus)
    with scratch() as folder:
        path = kind.prepare(Path(folder))

        def once(data: bytes) -> None:
            attempt(kind, path, data)

        atheris.Setup([sys.argv[0], *theirs, str(options.corpus)], once)
        atheris.Fuzz()
    return 0


def write_seeds(name: str, corpus: Path) -> None:
    """The valid file and some damaged ones, unless the folder has files already."""
    from support.fuzzing import KINDS, damaged, scratch

    corpus.mkdir(parents=True, exist_ok=True)
    if any(corpus.iterdir()):
        return
    with scratch() as folder:
        valid = KINDS[name].prepare(Path(folder)).read_bytes()
    rng = random.Random(name)
    (corpus / "valid").write_bytes(valid)
    for number in range(NUM_DAMAGED_SEEDS):
        (corpus / f"damaged-{number:02d}").write_bytes(damaged(KINDS[name], valid, rng))


def _split(arguments: list[str]) -> tuple[list[str], list[str], list[str]]:
    if "--" not in arguments:
        return arguments, [], []
    at = arguments.index("--")
    return arguments[:at], ["--"], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
