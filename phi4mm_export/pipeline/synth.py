"""`phi4mm synth`: plan a synthetic checkpoint, stream it into a staging folder, publish it by one rename."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from phi4mm_export.checkpoint.synth import plan_checkpoint, write_checkpoint
from phi4mm_export.checkpoint.synth_settings import Size, SynthSettings, WeightStyle, settings_of
from phi4mm_export.errors import CheckpointError, UsageError
from phi4mm_export.package.publish import staged
from phi4mm_export.spec.json_text import read_object
from phi4mm_export.spec.model import Layout
from phi4mm_export.spec.on_disk import is_file

SIDE_BYTES = 16 * 2**20
"""Room kept for headers and the tokenizer beside the tensors."""
MARKER = "config.json"
MODEL_TYPES = ("phi4mm", "phi4_multimodal")
DEFAULT_SEED = 1


@dataclass(frozen=True)
class SynthReport:
    """What was written. `nbytes` counts the files, `tensor_nbytes` the tensors in them."""

    path: Path
    size: Size
    layout: Layout
    seed: int
    weights: WeightStyle
    settings: SynthSettings
    files: tuple[str, ...]
    num_tensors: int
    tensor_nbytes: int
    nbytes: int


def synth(
    out: Path,
    *,
    size: Size = Size.TINY,
    layout: Layout = Layout.ORIGINAL,
    seed: int = DEFAULT_SEED,
    settings: Iterable[str] = (),
    weights: WeightStyle = WeightStyle.PLAIN,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SynthReport:
    """Write a synthetic checkpoint into the new folder `out`; equal arguments give equal bytes on every machine.

    `settings` are key=value texts that change the defaults of `size`. `progress` is called with the bytes of tensors
    written and to be written. Raises UsageError for settings that cannot be, and for an `out` that exists (with
    `overwrite`: that is no checkpoint); SystemLimitError when the disk has no room, or `out` has no parent folder.
    After an error nothing is left.
    """
    chosen = settings_of(size, settings)
    plan = plan_checkpoint(chosen, layout=layout, seed=seed, weights=weights)
    if overwrite:
        _check_replaceable(out)
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, plan.nbytes)

    need = plan.nbytes + SIDE_BYTES
    with staged(out, overwrite=overwrite, markers=(MARKER,), need=need, what="the checkpoint") as folder:
        files = write_checkpoint(plan, folder, count)
        nbytes = sum((folder / name).stat().st_size for name in files)
    return SynthReport(out, size, layout, seed, weights, chosen, files, plan.num_tensors, plan.nbytes, nbytes)


def _check_replaceable(out: Path) -> None:
    """A folder that holds a config.json of some other model is not ours to delete; `staged` refuses the rest."""
    if is_file(out / MARKER) and not _is_checkpoint(out):
        raise UsageError(
            f"expected a Phi-4-multimodal checkpoint to replace, found another model's {MARKER}",
            where=str(out),
            fix="remove it yourself, or choose another name",
        )


def _is_checkpoint(folder: Path) -> bool:
    try:
        config = read_object(folder / MARKER)
    except (CheckpointError, OSError):
        return False
    return config.get("model_type") in MODEL_TYPES
