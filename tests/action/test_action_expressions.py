"""The expressions that the rehearsal follows, as GitHub defines them."""

from __future__ import annotations

import pytest
from support.scripts import script

EXPRESSIONS = script("action_expressions")
NAMES = {"inputs": {"mode": "build", "cache": "true", "odd-name": "x"}, "steps": {"build": {"outcome": "failure"}}}
CALLS = {"always": lambda: True, "failure": lambda: False}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("inputs.mode == 'build'", True),
        ("inputs.mode != 'build'", False),
        ("inputs.mode == 'build' && inputs.cache == 'false'", False),
        ("inputs.mode == 'verify' || inputs.cache == 'true'", True),
        ("inputs.mode == 'verify' && inputs.cache == 'true' || always()", True),
        ("always() && (steps.build.outcome == 'failure' || failure())", True),
        ("!failure()", True),
        ("'it''s'", "it's"),
        ("inputs.odd-name", "x"),
        ("steps.nothing.outputs.key", ""),
        ("inputs.mode || 'else'", "build"),
        ("inputs.nothing || 'else'", "else"),
    ],
)
def test_values(text: str, value: object) -> None:
    assert EXPRESSIONS.evaluated(text, NAMES, CALLS) == value


@pytest.mark.parametrize(
    "text",
    ["", "inputs.mode ==", "(always()", "contains(inputs.mode, 'b')", "secrets.token", "1 + 1", "always() always()"],
)
def test_what_cannot_be_followed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|cannot follow|unknown|closed"):
        EXPRESSIONS.evaluated(text, NAMES, CALLS)


def test_a_value_put_into_a_text_is_not_read_again() -> None:
    names = {"inputs": {"model": "${{ inputs.mode }}", "mode": "build"}}
    assert EXPRESSIONS.substituted("a ${{ inputs.model }} b", names) == "a ${{ inputs.mode }} b"
