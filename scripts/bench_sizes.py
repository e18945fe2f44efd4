"""The size of every recipe's package at the real model's size, from `phi4mm plan`, beside the published builds.

    python scripts/bench_sizes.py [CHECKPOINT] [--json FILE] [--markdown]

Without CHECKPOINT a config.json of the real model's sizes is planned; no weight is read and nothing is written. The
published build has 6.78 GiB of weights (int4 decoder with the vision adapter as a branch, float16 elsewhere), its
sibling 1.99 GiB less. `of` columns are ours over theirs: of recipes for CUDA, which are stored as theirs, and for the
CPU. Data files only: graphs, tokenizer and configs add 6 MB. About a minute.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

from measuring import Record, add_report_options

from phi4mm_export.checkpoint.synth_configs import side_files
from phi4mm_export.checkpoint.synth_settings import Size, settings_of
from phi4mm_export.pipeline.plan import PlanSettings
from phi4mm_export.pipeline.plan_fit import fit
from phi4mm_export.pipeline.plan_memory import Workload
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.model import Layout
from phi4mm_export.spec.recipe import LoraForm

GIB = 1 << 30
PUBLISHED_GIB, SIBLING_GIB = 6.78, 6.78 - 1.99
BUDGET = 1 << 50
"""More than any recipe takes: all are listed."""


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description="sizes of every recipe's package")
    parser.add_argument("checkpoint", type=Path, nargs="?")
    add_report_options(parser)
    args = parser.parse_args()
    record = Record({}, json_file=args.json, markdown=args.markdown)
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = args.checkpoint or Path(temporary)
        if args.checkpoint is None:
            for name, text in side_files(settings_of(Size.FULL), Layout.ORIGINAL):
                (checkpoint / name).write_text(text, encoding="utf-8")
        how = PlanSettings(workload=Workload(prompt_tokens=1, crops=1, seconds=1.0), max_length=1)
        for provider in Provider:
            found = [
                one
                for form in (LoraForm.GATED, LoraForm.MERGED, LoraForm.BRANCH)
                for one in fit(checkpoint, BUDGET, provider=provider, given={"lora": form}, settings=how)
            ]
            for one in sorted(found, key=lambda one: (one.data_nbytes, one.label)):
                sizes = {
                    "bytes": one.data_nbytes,
                    "GiB": one.data_nbytes / GIB,
                    "of 6.78 GiB": one.data_nbytes / GIB / PUBLISHED_GIB,
                    "of 4.79 GiB": one.data_nbytes / GIB / SIBLING_GIB,
                }
                record.row({"provider": provider.value, "recipe": one.label}, partial(dict, sizes))


if __name__ == "__main__":
    main()
