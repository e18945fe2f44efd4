"""`phi4mm evaluate`: a package against its float model, component by component and answer by answer.

One side is in memory at a time; what the other side needs lies in a temporary folder. Only --blame loads both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path

from phi4mm_export import __version__
from phi4mm_export.checks.evaluation import Evaluation, Mode, judge, summaries
from phi4mm_export.checks.text_probes import Fields, read_fields, read_references, refuse_unknown
from phi4mm_export.errors import UsageError
from phi4mm_export.package.given_folders import WORK_DIR, made_folder
from phi4mm_export.package.publish import check_apart, check_target
from phi4mm_export.pipeline.evaluate_against import float_package
from phi4mm_export.pipeline.evaluate_inputs import Asked, Sources, ask_all
from phi4mm_export.pipeline.evaluate_report import REPORT_MARKERS, write_report
from phi4mm_export.pipeline.evaluate_stages import Limits, Stages
from phi4mm_export.runtime.package import RunPackage, open_package
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.on_disk import exists, home_expanded, real_path

OnStage = Callable[[str], None]
"""Called with one line before each stage."""


@dataclass(frozen=True)
class Gates:
    """Thresholds; None asks for none. They speak of the worst sample (cosine, relative L2) and the worst mode (mean
    KL divergence end to end, nats)."""

    min_cosine: float | None = None
    max_rel_l2: float | None = None
    max_kl: float | None = None


def evaluate(
    package: Path | str,
    against: Path | str,
    *,
    images: Sequence[Path | str] = (),
    audio: Sequence[Path | str] = (),
    prompts: Sequence[Path | str] = (),
    text: Sequence[Path | str] = (),
    fields: Path | str | None = None,
    references: Path | str | None = None,
    report: Path | str | None = None,
    overwrite: bool = False,
    blame: bool = False,
    min_cosine: float | None = None,
    max_rel_l2: float | None = None,
    max_kl: float | None = None,
    max_new_tokens: int = 32,
    max_text_tokens: int = 256,
    num_samples: int | None = None,
    seed: int = 0,
    provider: Provider | str = Provider.CPU,
    threads: int | None = None,
    work_dir: Path | str | None = None,
    on_stage: OnStage | None = None,
) -> Evaluation:
    """Measure how much of the float model a package keeps.

    `against`: a float package, or the checkpoint (folder or hub id), which is then exported in float into a temporary
    folder. images, audio, prompts: folders, globs, lists, archives or files; with nothing given a seeded synthetic set.
    fields, references: JSON files of expected values and transcripts by file name. The result holds the gates; it
    raises for missed ones only when asked to (`raise_for_gates`), so that the report is always there.

    Raises UsageError for media and options that cannot be used, PackageError for graphs that do not run.
    """
    _check_numbers(Gates(min_cosine, max_rel_l2, max_kl), max_new_tokens, max_text_tokens)
    target = None if report is None else home_expanded(report).absolute()
    if target is not None:
        check_target(target, overwrite=overwrite, markers=REPORT_MARKERS)
        check_apart(target, reads=(package, against))
    parent = None if work_dir is None else made_folder(Path(work_dir), WORK_DIR)
    opened, chosen = open_package(package), Provider(provider)
    sources = Sources(_texts(images), _texts(audio), _texts(prompts), tuple(map(Path, text)), num_samples, seed)
    tell = on_stage or (lambda _: None)
    tell("reading the requests")
    asked = ask_all(opened, sources)
    expected, spoken = _expectations(fields, references, asked)
    limits = Limits(max_new_tokens, max_text_tokens)
    with tempfile.TemporaryDirectory(prefix="phi4mm-", dir=parent) as name:
        floats, kind, notes = float_package(against, opened, Path(name), provider=chosen, on_stage=tell)
        stages = Stages(opened, floats, asked, Path(name), limits, provider=chosen, threads=threads, tell=tell)
        measured = stages.run(expected, spoken, blame=blame)
    evaluation = Evaluation(
        tool_version=__version__,
        package=real_path(opened.path).name,
        against=real_path(Path(against)).name if exists(Path(against)) else str(against),
        against_kind=kind,
        settings={
            "provider": chosen.value,
            "max_new_tokens": max_new_tokens,
            "max_text_tokens": max_text_tokens,
            "num_samples": num_samples,
            "seed": seed,
        },
        inputs=_inputs(asked, sources),
        notes=(*opened.notes, *notes, *_adapter_notes(opened, asked)),
        components=summaries(measured.samples),
        **{field.name: getattr(measured, field.name) for field in dataclass_fields(measured)},
    )
    gates = judge(evaluation, min_cosine=min_cosine, max_rel_l2=max_rel_l2, max_kl=max_kl)
    evaluation = replace(evaluation, gates=gates)
    if target is not None:
        write_report(evaluation, target, overwrite=overwrite)
    return evaluation


def _expectations(
    fields: Path | str | None, references: Path | str | None, asked: Asked
) -> tuple[Fields, Mapping[str, str]]:
    """Expected fields and transcripts by request; a name that no request has is refused."""
    expected = {} if fields is None else read_fields(Path(fields))
    spoken = {} if references is None else read_references(Path(references))
    names = [ask.name for ask in asked.asks]
    for named, source in ((expected, fields), (spoken, references)):
        refuse_unknown(list(named), names, Path(source or ""))
    return expected, spoken


def _check_numbers(gates: Gates, max_new_tokens: int, max_text_tokens: int) -> None:
    if max_new_tokens < 1:
        raise UsageError(f"expected at least 1 new token, found {max_new_tokens}", where="--max-new-tokens")
    if max_text_tokens < 2:
        raise UsageError(f"expected at least 2 tokens of text, found {max_text_tokens}", where="--max-text-tokens")
    if gates.min_cosine is not None and not -1 <= gates.min_cosine <= 1:
        raise UsageError(f"expected a cosine from -1 to 1, found {gates.min_cosine:g}", where="--min-cosine")
    for name, value in (("--max-rel-l2", gates.max_rel_l2), ("--max-kl", gates.max_kl)):
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"expected a number of at least 0, found {value:g}", where=name)


def _texts(given: Sequence[Path | str]) -> tuple[str, ...]:
    return tuple(str(each) for each in given)


def _inputs(asked: Asked, sources: Sources) -> str:
    counts = {mode: sum(ask.mode is mode for ask in asked.asks) for mode in Mode}
    listed = ", ".join(f"{count} {mode}" for mode, count in counts.items() if count)
    origin = f"built in (synthetic, seed {sources.seed})" if sources.builtin else "given"
    total = len(asked.asks)
    texts = len(asked.texts)
    requests = f"{total} request{'' if total == 1 else 's'}" + (f" ({listed})" if listed else "")
    return f"{origin}: {requests}, {texts} text{'' if texts == 1 else 's'}"


def _adapter_notes(package: RunPackage, asked: Asked) -> tuple[str, ...]:
    if not package.adapters or all(ask.mode is Mode.NONE for ask in asked.asks):
        return ()
    return ("the package's adapter files are active in these figures; ONNX Runtime GenAI 0.9 to 0.18 ignores them",)
