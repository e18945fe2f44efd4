"""What a build measures of its package: the gates of the recipe, against the float form of the same checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phi4mm_export.checkpoint.head import HeadChoice
from phi4mm_export.checks.evaluation import Evaluation, plain
from phi4mm_export.errors import QualityError, SystemLimitError
from phi4mm_export.package.room import check_room
from phi4mm_export.pipeline.build_stages import Stage, Stages, stage_key
from phi4mm_export.pipeline.evaluate import evaluate
from phi4mm_export.pipeline.evaluate_against import float_recipe
from phi4mm_export.pipeline.export import ExportSettings, export
from phi4mm_export.pipeline.plan import plan
from phi4mm_export.runtime.package import open_package
from phi4mm_export.spec.build_recipe import AGAINST_MODEL, AGAINST_NONE, AdapterChoice, BuildRecipe, EvaluateChoices
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.recipe import Precision, Recipe
from phi4mm_export.spec.sizes import format_bytes

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


def check_comparison(recipe: BuildRecipe, model: Path, adapter_paths: Mapping[Role, Path], folder: Path) -> None:
    """Whether disk and memory hold the float package that the result will be compared with: asked before hours of work.

    Raises SystemLimitError with both numbers. Of memory only the decoder's weights count, which is the least it takes.
    """
    choices = recipe.export
    role = None if choices.adapter is AdapterChoice.NONE else Role(choices.adapter or AdapterChoice.VISION)
    planned = plan(
        model,
        recipe=Recipe.resolve(precision=Precision.FP32, lora=choices.lora, adapter=role),
        adapter_paths=adapter_paths,
    )
    check_room(folder, planned.nbytes, what="the float package of the comparison")
    held = max(part.anonymous for part in planned.weights)
    have = available_memory()
    if have is not None and held > have:
        raise SystemLimitError(
            f"the comparison holds {format_bytes(held)} of float weights in memory, {format_bytes(have)} are available",
            where="evaluate.against",
            fix="build with --against none, and compare on a larger machine with phi4mm evaluate",
        )


def available_memory() -> int | None:
    """Bytes that a new process can have without swapping, as Linux estimates them; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


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
    """Raise QualityError naming every missed gate by the recipe's key."""
    missed = []
    for gate in result.gates:
        if not gate.passed:
            bound = "at least" if gate.name.startswith("min") else "at most"
            found = "no figure" if gate.figure is None else f"{gate.figure:.6g}"
            missed.append(f"{gate.name}: expected {bound} {gate.threshold:g}, found {found} ({gate.where})")
    if missed:
        raise QualityError(
            "; ".join(missed),
            where="evaluate",
            fix="choose a finer precision, or another threshold with --set evaluate.KEY=VALUE",
        )
