"""What a notebook shows of a report: a part of its page, without script, style sheet or network."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from autoremat.reporting import Fallback, Report
from tests.reporting.report_samples import UNIT_NBYTES, layered_report
from tests.reporting.test_report_page import HOSTILE, hostile_report


class Elements(HTMLParser):
    """Which elements there are, that all of them are closed, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


REPORTS = {
    "planned": layered_report,
    "hostile": hostile_report,
    "nothing planned": lambda: replace(layered_report(), graphs=()),
    "measured above the budget": lambda: layered_report().with_measured(100 * UNIT_NBYTES),
}


@pytest.mark.parametrize("make", REPORTS.values(), ids=REPORTS)
def test_it_is_a_harmless_part_of_a_page(make) -> None:  # type: ignore[no-untyped-def]
    """Whatever names a report holds: a few elements of text and boxes, each of them closed."""
    found = Elements(make()._repr_html_())
    assert found.names <= {"div", "b", "span", "details", "summary", "pre"}
    assert found.attributes <= {"style", "title"}
    assert found.open == []


def test_it_says_the_verdict_first_and_the_rest_on_demand() -> None:
    """Peak before and after, the budget, and the summary that a terminal shows."""
    report = layered_report()
    html = report._repr_html_()
    text = Elements(html).text
    assert text.split("\n")[1].strip().startswith("Within the budget: peak memory ")
    assert report.summary() in text
    assert len(html) < 12_000


def test_names_are_shown_as_they_are() -> None:
    """Markup in a name is its letters."""
    assert HOSTILE in Elements(hostile_report()._repr_html_()).text


def test_a_fallback_comes_with_its_remedy() -> None:
    """As in the warning, and what to do."""
    fallback = Fallback("AR101", "`graph 1` is not understood.", "Do something.")
    report: Report = replace(layered_report(), fallbacks=(fallback,))
    assert re.search(r"AR101: `graph 1` is not understood\. Do something\.", report._repr_html_())
