"""The page of an evaluation: whole, safe, small, and the same every time."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from support.evaluations import evaluation

from phi4mm_export.checks.evaluation import Evaluation
from phi4mm_export.checks.report_html import MAX_NBYTES, brief, inner_name, report_html, shared_prefix, size

VOID = {"meta", "img", "br", "wbr", "link", "hr", "input"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that every element is closed in order."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(page.decode("utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def full() -> Evaluation:
    return evaluation()


@pytest.fixture(scope="module")
def page(full: Evaluation) -> bytes:
    return report_html(full)


def numbers(value: Any) -> set[float]:
    """Every number in plain JSON data."""
    if isinstance(value, bool):
        return set()
    if isinstance(value, int | float):
        return {float(value)}
    if isinstance(value, dict):
        value = list(value.values())
    return set().union(*map(numbers, value)) if isinstance(value, list) else set()


def test_the_same_evaluation_gives_the_same_bytes(page: bytes) -> None:
    assert report_html(evaluation()) == page
    assert page.endswith(b"\n")


def test_the_page_is_well_formed(page: bytes) -> None:
    tags = [tag for tag, _ in Page(page).tags]
    assert tags[:2] == ["html", "head"]
    assert tags.count("h1") == 1


def test_every_chart_is_well_formed_xml(page: bytes) -> None:
    charts = re.findall(r"<svg.*?</svg>", page.decode(), re.DOTALL)
    assert len(charts) > 5
    for chart in charts:
        ElementTree.fromstring(chart)


def test_the_page_needs_no_script_and_no_network(page: bytes) -> None:
    parsed = Page(page)
    assert not {"script", "link", "iframe", "object", "embed"} & {tag for tag, _ in parsed.tags}
    for _, attributes in parsed.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "data", "srcset"):
            assert str(attributes.get(name) or "data:image/png").startswith("data:image/png")
    assert b"url(" not in page
    assert b"@import" not in page


def test_names_and_answers_cannot_inject_markup(page: bytes) -> None:
    assert b"<script>" not in page
    assert b"int4 <b>" not in page
    assert "int4 <b>" in "".join(Page(page).text)


def test_every_number_of_the_json_is_on_the_page(full: Evaluation, page: bytes) -> None:
    parsed = Page(page)
    shown = " ".join(parsed.text + [str(attributes.get("title", "")) for _, attributes in parsed.tags])
    found = {float(text) for text in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", shown)}
    wanted = numbers(json.loads(json.dumps(full.as_json())))
    assert len(wanted) > 60
    assert wanted - found == set()


def test_light_dark_phone_and_print_have_their_styles(page: bytes) -> None:
    for rule in (b"prefers-color-scheme:dark", b"max-width:40rem", b"@media print"):
        assert rule in page
    assert b'name="viewport"' in page


def test_a_very_large_evaluation_stays_small_and_counts_what_it_leaves_out() -> None:
    page = report_html(evaluation(requests=900, layers=600))
    assert len(page) <= MAX_NBYTES
    assert "more are in evaluation.json" in page.decode()


def test_an_evaluation_without_requests_has_a_page_too() -> None:
    assert b"<h1>" in report_html(evaluation(requests=1, layers=0))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (7, "7"),
        (12_345_678, "12345678"),
        (0.28484, "0.285"),
        (1.0, "1.00"),
        (123.4, "123"),
        (1234.5, "1,230"),
        (0.0000123, "1.23e-5"),
        (2.44e10, "2.44e10"),
    ],
)
def test_figures_are_shown_with_three_digits(value: float | None, text: str) -> None:
    assert brief(value) == text


def test_sizes_take_the_unit_that_fits() -> None:
    assert [size(n) for n in (999, 1000, 42_221_947, 3_000_000_000)] == ["999 B", "1 kB", "42.2 MB", "3 GB"]


def test_folders_that_all_layers_share_are_named_once() -> None:
    names = ["a.tower", "a.tower/block/fc1", "a.tower/block/fc2"]
    assert shared_prefix(names) == "a.tower/"
    assert [inner_name(name, "a.tower/") for name in names] == ["tower", "block/fc1", "block/fc2"]
    assert shared_prefix(["model/layers.0/fc", "lm_head"]) == ""
