"""Copies of a checkpoint that lack some tensors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401  # lets safetensors hand out bfloat16 arrays
from safetensors import safe_open
from safetensors.numpy import save_file


def without_tensors(source: Path, target: Path, pattern: str) -> Path:
    """A copy of the folder `source` without the tensors whose name matches `pattern` anywhere; the index follows."""
    shutil.copytree(source, target)
    kept_in: dict[str, str] = {}
    for shard in sorted(target.glob("*.safetensors")):
        with safe_open(shard, "np") as file:
            kept = {name: file.get_tensor(name) for name in file.keys() if not re.search(pattern, name)}  # noqa: SIM118
        save_file(kept, shard)
        kept_in |= dict.fromkeys(kept, shard.name)
    index = target / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": kept_in}))
    return target
