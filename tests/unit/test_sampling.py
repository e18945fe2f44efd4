"""Samples of outputs: small, and blind to no single row, column or position they claim to cover."""

from __future__ import annotations

import numpy as np
import pytest

from phi4mm_export.checks.sampling import (
    feature_rows,
    feature_samples,
    kv_positions,
    logit_columns,
    logit_samples,
    margins,
    sample_all,
    words,
)

VOCAB = 200064


def test_seeded_words_are_the_same_everywhere() -> None:
    assert words("columns", 2).tolist() == words("columns", 5)[:2].tolist()
    assert words("a", 4).tolist() != words("b", 4).tolist()


@pytest.mark.parametrize("row", [0, 311, 512, 999])
def test_a_change_in_any_feature_row_shows(row: int) -> None:
    features = np.random.default_rng(0).standard_normal((1000, 16))
    changed = features.copy()
    changed[row] += 0.1
    before, after = feature_samples(features), feature_samples(changed)
    assert not np.allclose(before["norm"], after["norm"])
    assert not np.allclose(before["sums"], after["sums"])


def test_two_swapped_columns_show_in_the_signed_sums_or_the_rows() -> None:
    features = np.random.default_rng(1).standard_normal((40, 16))
    swapped = features[:, [1, 0, *range(2, 16)]]
    assert not np.allclose(feature_samples(features)["rows"], feature_samples(swapped)["rows"])


def test_few_rows_are_kept_whole_and_many_are_sampled_with_both_ends() -> None:
    assert feature_rows(10).tolist() == list(range(10))
    rows = feature_rows(2000)
    assert {0, 1999} <= set(rows.tolist())
    assert len(rows) < 40


def test_logit_samples_equal_what_numpy_computes_from_whole_rows() -> None:
    logits = np.random.default_rng(2).standard_normal((2, VOCAB)) * 3
    samples = logit_samples(logits, VOCAB)
    assert samples["top_ids"][:, 0].tolist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(samples["lse"], np.log(np.exp(logits).sum(1)), rtol=1e-6)
    np.testing.assert_allclose(samples["columns"], logits[:, logit_columns(VOCAB)], rtol=1e-6)
    assert {200010, 200011, VOCAB - 1} <= set(logit_columns(VOCAB).tolist())


def test_the_margin_is_the_lead_over_the_second_in_units_of_the_rms() -> None:
    logits = np.zeros((1, VOCAB))
    logits[0, 5], logits[0, 9] = 4.0, 3.0
    samples = logit_samples(logits, VOCAB)
    assert margins(samples, "")[0] == pytest.approx(1.0 / np.sqrt(25 / VOCAB), rel=1e-6)


def test_cached_positions_include_both_ends_and_fit_short_prompts() -> None:
    assert kv_positions(1).tolist() == [0]
    assert kv_positions(100).tolist() == [0, 1, 33, 50, 98, 99]


def test_each_output_is_sampled_by_the_kind_that_ends_its_name() -> None:
    outputs = {
        "mode2_features": np.ones((3, 4)),
        "prefill_logits": np.ones((1, VOCAB)),
        "prefill_kv": np.ones((2, 1, 1, 5, 4)),
        "embeds": np.ones((1, 2, 4)),
        "tokens": np.array([1, 2]),
    }
    names = set(sample_all(outputs, VOCAB))
    assert {"mode2_rows", "mode2_norm", "mode2_sums", "prefill_columns", "prefill_top", "prefill_kv"} <= names
    assert {"embeds", "tokens"} <= names
