"""Measure how much of the float model a package keeps: graph by graph, token by token, answer by answer.

Example: phi4mm evaluate ./package --against ./checkpoint --images pages/ --report ./report
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phi4mm_export.cli import render
from phi4mm_export.cli.options import JsonFlag, Quiet

if TYPE_CHECKING:
    from phi4mm_export.checks.evaluation import Blame, Evaluation
    from phi4mm_export.checks.fidelity import TokenFigures

SOURCE = "PATH|GLOB|LIST|ZIP"
Sources = list[str] | None


def command(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE", help="Package folder to judge.", show_default=False)],
    against: Annotated[
        str,
        typer.Option(
            "--against", help="A float package, or the checkpoint (folder or hub id).", metavar="PACKAGE|CHECKPOINT"
        ),
    ],
    images: Annotated[
        Sources, typer.Option("--images", metavar=SOURCE, help="Pictures, one request each; repeatable.")
    ] = None,
    audio: Annotated[Sources, typer.Option("--audio", metavar=SOURCE, help="Sounds, one each; repeatable.")] = None,
    prompts: Annotated[
        Sources, typer.Option("--prompts", metavar=SOURCE, help="Prompts (.txt, .jsonl) with their media.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="Plain text whose likelihood is measured; repeatable."),
    ] = None,
    fields: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON: expected field values by request.")] = None,
    references: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON: transcripts by request, for WER and CER.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for evaluation.json, index.html.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", "--force", help="Replace an existing report.")] = False,
    blame: Annotated[
        bool, typer.Option("--blame", help="Say which graph and layer loses the answer (loads both models).")
    ] = False,
    min_cosine: Annotated[float | None, typer.Option(help="Gate: least cosine of any sample.")] = None,
    max_rel_l2: Annotated[float | None, typer.Option("--max-rel-l2", help="Gate: largest relative L2 of any.")] = None,
    max_kl: Annotated[float | None, typer.Option("--max-kl", help="Gate: largest mean KL of any mode, nats.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens of an answer.")] = 32,
    max_text_tokens: Annotated[int, typer.Option("--max-text-tokens", min=2, help="Most tokens of a text.")] = 256,
    num_samples: Annotated[int | None, typer.Option("--num-samples", min=1, help="Most files of each source.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which files --num-samples takes; draws the built-in requests.")] = 0,
    ep: Annotated[str, typer.Option("--ep", metavar="cpu|cuda", help="Provider that runs both packages.")] = "cpu",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads of each session.")] = None,
    work_dir: Annotated[
        Path | None, typer.Option("--work-dir", metavar="DIR", help="Where the temporary folder goes.")
    ] = None,
    json: JsonFlag = False,
    quiet: Quiet = False,
) -> None:
    from phi4mm_export.pipeline.evaluate import evaluate
    from phi4mm_export.spec.phi4mm_config import parse_provider

    result = evaluate(
        package,
        against,
        images=images or (),
        audio=audio or (),
        prompts=prompts or (),
        text=text or (),
        fields=fields,
        references=references,
        report=report,
        overwrite=overwrite,
        blame=blame,
        min_cosine=min_cosine,
        max_rel_l2=max_rel_l2,
        max_kl=max_kl,
        max_new_tokens=max_new_tokens,
        max_text_tokens=max_text_tokens,
        num_samples=num_samples,
        seed=seed,
        provider=parse_provider(ep),
        threads=threads,
        work_dir=work_dir,
        on_stage=None if quiet or json else render.note,
    )
    if json:
        render.document(result.as_json())
    else:
        for line in evaluation_lines(result):
            render.text(line)
        if report is not None and not quiet:
            render.note(f"the report is in {report / 'index.html'}")
    result.raise_for_gates()


def evaluation_lines(result: Evaluation) -> list[str]:
    """The tables of an evaluation as text."""
    lines = [f"{result.package} against {result.against} ({result.against_kind}); inputs {result.inputs}"]
    lines += [f"note: {line}" for line in (*result.notes, *result.preprocessing)]
    sizes = {each.component: each for each in result.sizes}
    rows = [
        ["graph", "weights", "bytes", "of float", "rel. L2 mean", "worst", "cosine worst", "max abs", "worst sample"]
    ]
    for c in result.components:
        each = sizes.get(c.component)
        stored = (
            ["", "", ""]
            if each is None
            else [each.format, f"{each.nbytes:,}", f"{each.nbytes / each.nbytes_float:.0%}"]
        )
        figures = [_short(v) for v in (c.relative_l2_mean, c.relative_l2_worst, c.cosine_worst, c.max_abs)]
        rows.append([c.component, *stored, *figures, c.fault or c.worst_request])
    lines += ["", *_table(rows)]
    rows = [["mode", "requests", "decoder KL", "top-1", "end to end KL", "largest", "top-1", "agreement", "identical"]]
    for row in result.modes:
        alone, joined = row.decoder, row.end_to_end
        figures = [_short(alone.kl_mean), _share(alone.top1), _short(joined.kl_mean), _short(joined.kl_max)]
        tail = [_share(joined.top1), _share(row.agreement), f"{row.identical} of {row.requests}"]
        rows.append([row.mode, str(row.requests), *figures, *tail])
    lines += ["", *_table(rows)]
    if result.texts:
        rows = [["text", "tokens", "perplexity", "float", "NLL", "float", "KL", "top-1"]]
        rows += [[each.name, str(each.tokens), *_text_figures(each.figures)] for each in result.texts]
        lines += ["", *_table(rows)]
    for verdict in result.blame:
        lines.append(_blame_line(verdict))
    for gate in result.gates:
        outcome = "passed" if gate.passed else "missed"
        lines.append(f"gate {gate.name} {gate.threshold:g}: {outcome}, {_short(gate.figure)} ({gate.where})")
    return lines


def _blame_line(verdict: Blame) -> str:
    place = f"{verdict.component}, {verdict.layer}" if verdict.layer else verdict.component or "nothing"
    remark = f" ({verdict.remark})" if verdict.remark else ""
    return f"{verdict.request} ({verdict.mode}) loses its answer in: {place}{remark}"


def _text_figures(figures: TokenFigures) -> list[str]:
    numbers = (figures.perplexity, figures.perplexity_float, figures.nll, figures.nll_float, figures.kl_mean)
    return [*(_short(number) for number in numbers), _share(figures.top1)]


def _table(rows: list[list[str]]) -> list[str]:
    """Columns aligned: the first to the left, numbers to the right, a last one of names to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(_cell(row[i], widths[i], i) for i in range(len(row))).rstrip() for row in rows]


def _cell(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column == 0 else text.rjust(width)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
