"""A checkpoint of the real model's size without its weights: the files' heads, then holes."""

from __future__ import annotations

import json
from pathlib import Path

from phi4mm_export.checkpoint.synth import plan_checkpoint, safetensors_header
from phi4mm_export.checkpoint.synth_configs import side_files
from phi4mm_export.checkpoint.synth_settings import Size, WeightStyle, settings_of
from phi4mm_export.checkpoint.synth_tokenizer import tokenizer_files
from phi4mm_export.spec.model import Layout


def write_full_size(folder: Path, *, layout: Layout = Layout.ORIGINAL, weights: bool = True) -> Path:
    """All small files, and with `weights` shards of 11 GB that take no room; without, config.json alone remains."""
    plan = plan_checkpoint(settings_of(Size.FULL), layout=layout, seed=0, weights=WeightStyle.PLAIN)
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for file in plan.files if weights else ():
        ordered = sorted(file.tensors, key=lambda tensor: (-tensor.dtype.nbytes, tensor.name))
        head = safetensors_header(ordered)
        path = folder / file.path
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as out:
            out.write(head)
            out.truncate(len(head) + sum(tensor.nbytes for tensor in ordered))
        if "/" not in file.path:
            weight_map |= {tensor.name: file.path for tensor in ordered}
    if weights:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, text in (*side_files(plan.settings, layout), *tokenizer_files(plan.settings.vocab_size)):
        (folder / name).write_text(text, encoding="utf-8")
    return folder
