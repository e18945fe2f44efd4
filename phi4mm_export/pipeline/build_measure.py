"""What a build measures of its package: the gates of the recipe, against the float form of the same checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phi4mm_export.checkpoint.head import HeadChoice
from phi4mm_export.checks.evaluation import Evaluation, plain
from phi4mm_export.errors import QualityError
from phi4mm_export.pipeline.build_stages import Stage, Stages, stage_key
from phi4mm_export.pipeline.evaluate import evaluate
from phi4mm_export.pipeline.evaluate_against import float_recipe
from phi4mm_export.pipeline.export import ExportSettings, export
from phi4mm_export.runtime.package import open_package
from phi4mm_export.spec.build_recipe import AGAINST_MODEL, AGAINST_NONE, EvaluateChoices
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.model import Role

EVALUATE = "evaluate"


@dataclass(frozen=True)
class Measured:
    """Figures of this build. gates: per quantized graph what its quality gate saw; evaluation: `None` where the package
    was not compared with its float form."""

    gates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    evaluation: Mapping[str, Any] | None = None
    reused: bool = False

    @property
    def anything(self) -> bool:
        """Whether any figure came from running graphs."""
        return bool(self.gates) or self.evaluation is not None


def measure(
    choices: EvaluateChoices,
    package: Stage,
    stages: Stages,
    *,
    model: Path,
    adapter_paths: Mapping[Role, Path],
    head: HeadChoice | None,
    on_stage: Callable[[str], None],
) -> Measured:
    """Compare the package with its float form, if the recipe asks for that.

    model: the checkpoint's folder. Raises QualityError naming every missed gate with figure and threshold.
    """
    gates = package.facts.get("gates", {})
    if choices.against == AGAINST_NONE:
        return Measured(gates)
    facts = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(choices).items()}
    key = stage_key(EVALUATE, facts, after=package.key)
    done = stages.finished(EVALUATE, key) if not choices.given and choices.against == AGAINST_MODEL else None
    if done is not None:
        return Measured(gates, done.facts, reused=True)
    scratch = stages.place(f"{EVALUATE}.work")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    against: Path | str = choices.against
    if choices.against == AGAINST_MODEL:
        recipe, _ = float_recipe(open_package(package.folder), Provider.CPU)
        on_stage("exporting the model in float for the comparison")
        settings = ExportSettings(head=head)
        against = export(model, scratch / "float", recipe=recipe, adapter_paths=adapter_paths, settings=settings).path
    result = evaluate(
        package.folder,
        against,
        images=choices.images,
        audio=choices.audio,
        prompts=choices.prompts,
        text=choices.text,
        num_samples=choices.num_samples,
        seed=choices.seed,
        max_new_tokens=choices.max_new_tokens,
        max_text_tokens=choices.max_text_tokens,
        min_cosine=choices.min_cosine,
        max_rel_l2=choices.max_rel_l2,
        max_kl=choices.max_kl,
        work_dir=scratch,
        on_stage=on_stage,
    )
    shutil.rmtree(scratch, ignore_errors=True)
    _refuse_missed(result)
    figures = evaluation_figures(result)
    stages.finish(EVALUATE, key, facts=figures)
    return Measured(gates, figures)


def evaluation_figures(result: Evaluation) -> dict[str, Any]:
    """What the card says of an evaluation, as plain values of few digits."""
    return {
        "inputs": result.inputs,
        "components": [plain(each) for each in result.components],
        "modes": [
            {
                "mode": row.mode,
                "requests": row.requests,
                "kl_mean": plain(row.end_to_end.kl_mean),
                "top1": plain(row.end_to_end.top1),
                "identical": row.identical,
            }
            for row in result.modes
        ],
        "gates": [plain(gate) for gate in result.gates],
    }


def _refuse_missed(result: Evaluation) -> None:
    try:
        result.raise_for_gates()
    except QualityError as err:
        raise QualityError(
            err.what.replace("--min-cosine", "min_cosine").replace("--max-", "max_"),
            where="evaluate",
            fix="choose a finer precision, or other thresholds with --set evaluate.min_cosine=...",
        ) from err
