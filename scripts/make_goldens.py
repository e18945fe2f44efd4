"""Derive tests/goldens from the PyTorch reference: `make goldens`, or python scripts/make_goldens.py [OUT].

The tiny synthetic checkpoint is made anew, a float32 package is exported from it (onnxruntime-genai's processor needs
one), and the float64 reference runs every case of `checks/goldens.py`. Samples are stored, not whole outputs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.checks.cases import Inputs, chain_case
from phi4mm_export.checks.goldens import CHAIN_ADAPTERS, INPUTS, MANIFEST, TWO_TURNS, golden_cases
from phi4mm_export.checks.media import CLIPS, NEXT_TURN, PICTURES, REQUESTS, clip, picture
from phi4mm_export.checks.sampling import margins, sample_all
from phi4mm_export.oracle.reference import Reference
from phi4mm_export.pipeline.export import export
from phi4mm_export.pipeline.synth import synth
from phi4mm_export.runtime.audio import decode_audio
from phi4mm_export.runtime.generate import TextGenerator
from phi4mm_export.runtime.images import decode_image
from phi4mm_export.runtime.package import open_package
from phi4mm_export.spec.recipe import Precision, Recipe

Array = NDArray[Any]

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
LIBRARIES = ("numpy", "torch", "onnxruntime", "onnxruntime-genai", "safetensors")
NOT_STORED = "long_clip"
"""Its frames alone would take 1.2 MB: its golden tokens are compared with og from the clip on."""
FIRST_ANSWER = 8
"""Tokens of the first answer in a conversation of two turns."""
FIXED_TIME = (2020, 1, 1, 0, 0, 0)


def processed_requests(package: Path) -> dict[str, dict[str, Array]]:
    """og's processor outputs of every request, and the ids of `NEXT_TURN` under "turn"."""
    generator = TextGenerator(open_package(package))
    pictures = {name: decode_image(picture(name), name) for name in PICTURES}
    clips = {name: decode_audio(clip(name), name) for name in CLIPS}
    requests = {}
    for name, request in REQUESTS.items():
        result = generator.processor(
            request.prompt, [pictures[p] for p in request.pictures], [clips[c] for c in request.clips]
        )
        requests[name] = dict(result.arrays)
    requests["turn"] = {"input_ids": generator.processor(NEXT_TURN).arrays["input_ids"]}
    return requests


def with_second_turn(reference: Reference, request: Inputs, turn: Array, name: str) -> dict[str, Array]:
    """A request continued by its own first answer and a second turn."""
    adapter = CHAIN_ADAPTERS[name][0]
    tokens = chain_case(name, request, adapter, steps=FIRST_ANSWER - 1).run(reference, None)["tokens"]
    ids = np.concatenate([request["input_ids"], tokens[None], turn], axis=1)
    return {**request, "input_ids": ids}


def digest(folder: Path) -> dict[str, str]:
    """sha256 of the files that hold the model's numbers."""
    files = [*folder.glob("*.safetensors"), folder / "config.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


def save(path: Path, arrays: Mapping[str, Array]) -> None:
    """A compressed .npz without the time of day in it."""
    import io
    import zipfile

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", FIXED_TIME), member.getvalue(), zipfile.ZIP_DEFLATED, 9)


def stored_inputs(requests: Mapping[str, Inputs]) -> dict[str, Array]:
    """What is stored of the requests; a turn's media are its first turn's."""
    return {
        f"{name}/{key}": array
        for name, request in requests.items()
        for key, array in request.items()
        if name != NOT_STORED and (not name.endswith("_turn") or key == "input_ids")
    }


def main() -> int:
    """Make the goldens and print what each case took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=GOLDENS)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as work:
        checkpoint, package = Path(work) / "tiny", Path(work) / "package"
        synth(checkpoint)
        export(checkpoint, package, recipe=Recipe.resolve(precision=Precision.FP32))
        requests = processed_requests(package)
        reference = Reference.open(checkpoint, "float64")
        digests = digest(checkpoint)
        turn = requests.pop("turn")["input_ids"]
        for name in TWO_TURNS:
            requests[f"{name}_turn"] = with_second_turn(reference, requests[name], turn, f"{name}_turn")
        config = reference.config
        limit = config.rope.original_max_positions
        groups: dict[str, dict[str, Array]] = {}
        cases: dict[str, Any] = {}
        for case in golden_cases(requests, hidden_size=config.hidden_size, limit=limit):
            began = time.perf_counter()
            samples = sample_all(case.run(reference, None), config.vocab_size)
            cases[case.name] = {"group": case.group.value, "mode": case.mode}
            if "tokens" in samples:
                lead = np.concatenate([margins(samples, "prefill_")[:1], margins(samples, "step_")])
                cases[case.name] |= {"tokens": samples["tokens"].tolist(), "margin": round(float(lead.min()), 4)}
            groups.setdefault(case.group.value, {}).update({f"{case.name}/{k}": v for k, v in samples.items()})
            print(f"{case.name:22} {time.perf_counter() - began:6.1f} s  {cases[case.name].get('margin', '')}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for group, arrays in groups.items():
        save(out / f"{group}.npz", arrays)
    save(out / INPUTS, stored_inputs(requests))
    manifest = {
        "source": "float64 PyTorch reference of the original arithmetic, tiny synthetic checkpoint, seed 1",
        "checkpoint": digests,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "model": {
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_layers": config.num_layers,
            "original_max_positions": limit,
        },
        "cases": cases,
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8", newline="\n")
    total = sum(path.stat().st_size for path in out.iterdir())
    print(f"{len(cases)} cases, {total:,} bytes in {out.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
