"""Summaries, gates and JSON of an evaluation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.evaluations import evaluation

from phi4mm_export.checks.evaluation import Evaluation, Sample, judge, plain, summarize
from phi4mm_export.checks.fidelity import Fidelity, TokenFigures
from phi4mm_export.errors import ExitCode, QualityError

FAULTY = Fidelity(None, None, None, 0, None, None, "shape [1, 2], expected [3, 2]")


def sample(request: str, relative_l2: float, cosine: float) -> Sample:
    return Sample("vision", request, "vision", Fidelity(relative_l2, cosine, 1.0, 5, 2, 2 * relative_l2))


def test_a_summary_names_the_worst_sample_and_its_worst_position() -> None:
    found = summarize("vision", [sample("a", 0.1, 0.99), sample("b", 0.3, 0.95), sample("c", 0.2, 0.97)])
    assert (found.samples, found.relative_l2_worst, found.cosine_worst) == (3, 0.3, 0.95)
    assert found.relative_l2_mean == pytest.approx(0.2)
    assert (found.worst_request, found.worst_position, found.worst_position_l2) == ("b", 2, 0.6)


def test_a_fault_is_named_beside_the_figures_of_the_other_samples() -> None:
    found = summarize("vision", [sample("a", 0.1, 0.99), Sample("vision", "b", "vision", FAULTY)])
    assert (found.relative_l2_worst, found.fault) == (0.1, "b: shape [1, 2], expected [3, 2]")
    alone = summarize("vision", [Sample("vision", "b", "vision", FAULTY)])
    assert (alone.relative_l2_mean, alone.samples) == (None, 1)


def judged(result: Evaluation, **gates: float | None) -> Evaluation:
    asked = {"min_cosine": None, "max_rel_l2": None, "max_kl": None} | gates
    return replace(result, gates=judge(result, **asked))  # type: ignore[arg-type]


def test_gates_look_at_the_worst_component_and_mode() -> None:
    result = evaluation()
    l2 = max(c.relative_l2_worst or 0 for c in result.components)
    cosine = min(c.cosine_worst or 0 for c in result.components)
    kl = result.modes[0].end_to_end.kl_mean or 0
    passed = judged(result, min_cosine=cosine, max_rel_l2=l2, max_kl=kl)
    assert (passed.ok, passed.exit_code) == (True, ExitCode.OK)
    passed.raise_for_gates()
    missed = judged(result, min_cosine=cosine + 1e-6, max_rel_l2=l2 - 1e-6, max_kl=kl - 1e-6)
    assert [gate.passed for gate in missed.gates] == [False] * 3
    assert missed.exit_code == ExitCode.QUALITY
    assert [gate.figure for gate in missed.gates] == [cosine, l2, kl]


def test_a_missed_gate_says_figure_threshold_and_place() -> None:
    result = judged(evaluation(), max_kl=0.001)
    with pytest.raises(QualityError, match=r"--max-kl: expected at most 0.001, found 0\.\d+ \(vision\)"):
        result.raise_for_gates()


def test_what_was_not_asked_for_is_no_gate() -> None:
    assert judged(evaluation()).gates == ()


def test_what_could_not_be_measured_does_not_pass() -> None:
    result = evaluation()
    broken = replace(result, components=(summarize("vision", [Sample("vision", "b", "vision", FAULTY)]),))
    gate = judged(broken, max_rel_l2=100.0).gates[0]
    assert (gate.passed, gate.figure) == (False, None)
    assert "shape [1, 2]" in gate.where
    unmeasured = replace(
        result, modes=(replace(result.modes[0], end_to_end=TokenFigures(0, None, None, None, fault="NaN")),)
    )
    assert not judged(unmeasured, max_kl=100.0).ok


def test_json_has_fixed_keys_six_digits_and_no_pictures() -> None:
    document = evaluation().as_json()
    assert list(document) == [
        "schema_version",
        "ok",
        "tool_version",
        "package",
        "against",
        "against_kind",
        "settings",
        "inputs",
        "notes",
        "preprocessing",
        "sizes",
        "components",
        "modes",
        "texts",
        "answers",
        "samples",
        "layers",
        "blame",
        "gates",
    ]
    assert list(document["texts"][0]["figures"])[-3:] == ["perplexity", "perplexity_float", "fault"]
    json.dumps(document, allow_nan=False)
    assert plain(1 / 3) == 0.333333
    assert plain(float("nan")) is None
