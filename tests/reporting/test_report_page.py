"""The report's HTML page: one file, harmless whatever the names, and alive in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoremat.reporting import (
    CurvePoint,
    Fact,
    Fallback,
    PeakFormula,
    Piece,
    PointKind,
    Report,
    SizeSymbol,
    Term,
    ValueAction,
    ValueReport,
)
from autoremat.reporting.page import MARK, html
from tests.reporting.report_samples import layered_report, waiting_report

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MOST_NBYTES = 5_000_000
MOST_SECONDS = 2.0

Open = Callable[..., Any]


def with_curve(report: Report) -> Report:
    """The report with one point of each kind."""
    peak, time_us = report.baseline_peak_nbytes, report.baseline_time_us
    points = tuple(
        CurvePoint(peak // n, time_us * (1 + n / 20), f"{kind.value} {n}", kind)
        for n, kind in enumerate(PointKind, 1)
    )
    return replace(report, curve=points)


def with_values(report: Report, values: tuple[ValueReport, ...]) -> Report:
    """The report with other values in its table."""
    return replace(report, graphs=(replace(report.graphs[0], values=values),))


def hostile_report() -> Report:
    """Names that would be markup in every place that a model can reach."""
    report = layered_report(2, 3, block=HOSTILE)
    graph = replace(
        report.graphs[0],
        name=HOSTILE,
        peak_step=HOSTILE,
        peak_source=HOSTILE,
        method=HOSTILE,
        estimated_ops=(HOSTILE,),
        constraints=(HOSTILE,),
    )
    return replace(
        with_curve(report),
        graphs=(graph, replace(graph, name="graph 1")),
        device=HOSTILE,
        fallbacks=(Fallback("AR101", HOSTILE, HOSTILE),),
        user_constraints=(HOSTILE,),
        facts=(Fact(HOSTILE, HOSTILE),),
    )


def payload(page: str) -> str:
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.S)
    assert found is not None
    return found[1]


def test_the_page_tells_the_verdict_without_a_script() -> None:
    """Budget, peaks, time and gap are text in the file."""
    report = layered_report()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html(report)))
    assert "Within the budget" in text
    assert "Peak memory 24.0 MB" in text
    assert "≤ 1.0 %" in text
    assert "no step was measured yet" in text


def test_the_page_writes_microseconds_with_their_sign() -> None:
    """In the tiles as in the chart and the table."""
    assert re.search(r"[0-9] µs</dd>", html(layered_report(1, 2)))
    assert not re.search(r"[0-9] us</dd>", html(layered_report(1, 2)))


def test_the_page_says_when_the_budget_is_exceeded() -> None:
    """By the measured peak as well; the verdict does not hide it."""
    report = layered_report()
    over = report.with_measured(report.budget_nbytes + 2_000_000)
    assert "Over the budget by 2.0 MB" in html(over)


@pytest.mark.parametrize(("factor", "is_drawn"), [(1.5, True), (50, False)])
def test_a_budget_far_above_the_peaks_leaves_the_picture(factor: float, is_drawn: bool) -> None:
    """The bars keep their scale; the number stays in the tiles."""
    report = layered_report()
    budget_nbytes = int(factor * report.baseline_peak_nbytes)
    page = html(replace(report, budget_nbytes=budget_nbytes))
    assert ('class="budget-mark"' in page) == is_drawn
    widest = "100.000%" if not is_drawn else f"{100 / factor:.3f}%"
    assert f'class="bar ghost" style="width: {widest}"' in page


def test_the_page_of_a_step_without_a_plan_says_why() -> None:
    """Codes, sentences and remedies of the fallbacks are all there is."""
    fallback = Fallback("AR104", "Nothing in it needs a gradient.", "Call requires_grad_().")
    page = html(replace(layered_report(), graphs=(), fallbacks=(fallback,)))
    for text in ("Nothing is planned", "AR104", fallback.sentence, fallback.remedy):
        assert text in page


def test_the_page_tells_a_simulated_peak_from_a_generated_one() -> None:
    """Inductor's code may peak elsewhere: both numbers are named."""
    report = layered_report()
    graph = replace(report.graphs[0], predicted_peak_nbytes=10_000_000)
    page = html(replace(report, graphs=(graph,), compiler="inductor"))
    assert "read from the code that it generates is 10.0 MB" in " ".join(page.split())
    assert "read from the code" not in html(report)


def test_the_peak_at_other_sizes_is_written_and_drawn() -> None:
    """One picture for each size that varies by itself; a plan for a part is drawn as far as it."""
    symbols = (
        SizeSymbol("batch", "x.size(0)", 8, 2, 8),
        SizeSymbol("y_0", "y.size(0)", 8, 2, 8, follows="batch"),
    )
    terms = (Term("1000000", "batch"), Term("500000", "y_0"), Term("1/2", "batch**2"))
    formula = PeakFormula(symbols, (Piece(terms, "mm", "forward"),))
    smaller = replace(formula, symbols=tuple(replace(s, planned=4, highest=4) for s in symbols))
    report = layered_report()
    graph = replace(report.graphs[0], peak_formula=formula, smaller_formulas=(smaller,))
    page = html(replace(report, graphs=(graph,)))
    assert "peak = 1.5 MB * batch, as simulated" in page
    assert page.count('<figure class="sizes">') == 1
    assert page.count("<polyline") == 2
    assert "dotted: the plan for up to 4." in page


def test_the_page_fetches_nothing() -> None:
    """No address but that of SVG's namespace, and a policy that forbids every request."""
    page = html(with_curve(layered_report()))
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert not re.search(r"<(link|img|iframe)|\ssrc=|@import|url\(", page)


def test_names_are_never_markup() -> None:
    """A module called <script> is text everywhere, and the payload cannot end its element."""
    page = html(hostile_report())
    assert "<img" not in page
    assert "alert(1)>" not in page
    assert "<" not in payload(page)
    assert Report.from_json(payload(page)) == hostile_report()


def test_the_payload_is_the_report_itself() -> None:
    """What the page draws can be taken out of it again."""
    report = layered_report()
    assert json.loads(payload(html(report))) == json.loads(report.to_json())
    assert MARK in html(report)[:1000]


@pytest.fixture(scope="module")
def large() -> Report:
    """A step of 10,000 operations; with its recomputes it has 14,500 steps."""
    return layered_report(500, 10)


def test_a_step_of_ten_thousand_operations_stays_small(large: Report) -> None:
    """The file is below 5 MB."""
    assert large.graphs[0].timeline is not None
    assert len(large.graphs[0].timeline.baseline_live_nbytes) == 10_000
    assert len(html(large).encode()) < MOST_NBYTES


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """An installed Chromium or Chrome, steered by playwright; without one the test is skipped."""
    reason = "playwright is not installed: pip install playwright"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)} is on the path")
    with playwright.sync_playwright() as engine:
        # As root, which containers often run as, Chromium starts only without its sandbox.
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = engine.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a page in a new tab; at the end, no tab may have complained or requested anything."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_page(page: str, **settings: Any) -> Any:
        file = tmp_path / f"report-{len(contexts)}.html"
        file.write_text(page, encoding="utf-8")
        contexts.append(browser.new_context(**settings))
        tab = contexts[-1].new_page()
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("request", lambda request: complaints.extend(_requests_beyond(file, request.url)))
        tab.goto(file.as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def _requests_beyond(file: Path, url: str) -> list[str]:
    return [] if url == file.as_uri() else [f"requested {url}"]


def cells(tab: Any, column: str) -> list[str]:
    """The texts of a column's visible rows, top to bottom."""
    rows = tab.locator(".grid-row")
    return [rows.nth(i).locator(f".{column}").inner_text() for i in range(rows.count())]


def test_the_table_sorts_searches_and_folds(opened: Open) -> None:
    """By a click on a heading, by typing, and by the box beside the search."""
    tab = opened(html(layered_report(4, 5)))
    assert tab.locator("#count").inner_text() == "20 values in 5 rows, 20.0 MB"
    heading = tab.get_by_role("columnheader", name="Costs")
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert cells(tab, "costs")[:2] == ["416.0 µs", "412.0 µs"]
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert cells(tab, "costs")[-1] == "416.0 µs"
    tab.get_by_label("Fold layers").uncheck()
    assert tab.locator("#count").inner_text() == "20 values, 20.0 MB"
    tab.get_by_label("Search the values").fill("layers.2.")
    assert tab.locator("#count").inner_text() == "5 values, 5.0 MB"
    assert all("model.layers.2." in text for text in cells(tab, "module"))
    tab.get_by_label("Search the values").fill("no such thing")
    assert tab.locator("#count").inner_text() == "No value matches."
    tab.get_by_label("Search the values").fill("")
    tab.get_by_role("button", name=re.compile(r"^Saved ?\d")).click()
    assert tab.locator("#count").inner_text() == "4 values, 4.0 MB"


def test_the_table_begins_with_what_the_plan_does(opened: Open) -> None:
    """Saved and recomputed values first; what the backward does not read is one click away."""
    report = layered_report(4, 5)
    values = report.graphs[0].values
    unread = tuple(
        replace(v, name=f"{v.name}.unread", action=ValueAction.FREE, recomputes=0) for v in values
    )
    tab = opened(html(with_values(report, (*unread, *values))))
    assert tab.locator("#count").inner_text() == "20 values in 5 rows, 20.0 MB"
    assert "not needed" not in cells(tab, "action")
    tab.get_by_role("button", name=re.compile(r"^All")).click()
    assert tab.locator("#count").inner_text() == "40 values in 10 rows, 40.0 MB"
    only = opened(html(with_values(report, unread)))
    assert only.locator("#count").inner_text().startswith("20 values")


def test_a_folded_row_opens_to_its_layers(opened: Open) -> None:
    """By a click, and by the Enter key on the row that the arrow keys chose."""
    tab = opened(html(layered_report(4, 5)))
    assert tab.locator(".grid-row.inside").count() == 0
    tab.locator(".grid-row").first.click()
    assert tab.locator(".grid-row.inside").count() == 4
    grid = tab.get_by_role("table", name="Values of the forward")
    grid.focus()
    tab.keyboard.press("Enter")
    assert tab.locator(".grid-row.inside").count() == 0
    tab.keyboard.press("ArrowDown")
    assert grid.get_attribute("aria-activedescendant") == "value-row-1"


FIRST = {"x": 66, "y": 100}  # a point of the chart within its first step


def test_the_timeline_follows_pointer_and_keys(opened: Open) -> None:
    """It starts at the peak; hovering and the arrow keys move the cursor and the inspector."""
    report = layered_report(4, 5)
    timeline = report.graphs[0].timeline
    assert timeline is not None
    tab = opened(html(report))
    step, chart = tab.locator("#inspector .step"), tab.locator("#chart")
    peak = f"Step {timeline.peak_step + 1} of {len(timeline.steps)}"
    assert step.inner_text() == peak
    assert tab.locator("#inspector .live b").inner_text() == "12.1 MB"
    assert "x0.0" in tab.locator("#inspector .largest").inner_text()
    chart.hover(position=FIRST)
    assert step.inner_text() == f"Step 1 of {len(timeline.steps)}"
    assert "op0" in tab.locator("#inspector .op").inner_text()
    chart.focus()
    tab.keyboard.press("ArrowRight")
    assert step.inner_text() == f"Step 2 of {len(timeline.steps)}"
    assert chart.get_attribute("aria-valuenow") == "2"
    tab.keyboard.press("End")
    assert step.inner_text() == f"Step {len(timeline.steps)} of {len(timeline.steps)}"
    tab.keyboard.press("p")
    assert step.inner_text() == peak
    tab.get_by_role("button", name="Operations").click()
    chart.hover(position=FIRST)
    assert step.inner_text() == f"Step 1 of {len(timeline.steps)}"


def test_the_page_of_a_step_with_copies_shows_them(opened: Open) -> None:
    """What leaves is "away", what comes back "fetched", and where computing waits, it says so."""
    report = waiting_report()
    tab = opened(html(report))
    assert tab.locator("#values-title").inner_text() == (
        "What is saved, what waits elsewhere, what is recomputed"
    )
    assert sorted(cells(tab, "action")) == ["away", "saved"]
    assert tab.get_by_role("button", name=re.compile(r"^Away")).inner_text() == "Away1"
    legend = tab.locator("#legend").inner_text()
    assert "Fetched back" in legend
    assert "Waiting for a copy" in legend
    inspector = tab.locator("#inspector")
    tab.locator("#chart").focus()
    tab.keyboard.press("End")
    assert "waits 93.0 µs for a copy" in inspector.inner_text()
    assert "1.0 MB back" in inspector.inner_text()
    tab.keyboard.press("Home")
    assert "On the way\n\u2013" in inspector.inner_text()
    tab.get_by_role("button", name="Operations").click()
    assert "1 wait elsewhere" in tab.locator(".tiles").inner_text()


def test_the_page_of_a_step_without_copies_does_not_speak_of_them(opened: Open) -> None:
    """Neither title, legend, table nor inspector has what is for them alone."""
    tab = opened(html(layered_report(4, 5)))
    text = tab.locator("body").inner_text()
    for words in ("elsewhere", "Fetched", "Away", "Waiting for", "On the way"):
        assert words not in text


def test_the_tree_of_modules_adds_up(opened: Open) -> None:
    """A module's bytes hold those of its children and its own; a chain of modules is one row."""
    report = layered_report(1, 3)
    first, *rest = report.graphs[0].values
    places = ("net.block", "net.block.only", "net.block.only")
    values = tuple(
        replace(value, action=ValueAction.SAVE, recomputes=0, module=module)
        for value, module in zip((first, *rest), places, strict=True)
    )
    tab = opened(html(with_values(report, values)))
    rows = tab.locator("#tree .tree-row", has_text="MB")
    tree = {
        rows.nth(i).locator(".path").inner_text(): rows.nth(i).locator("b").first.inner_text()
        for i in range(rows.count())
    }
    assert tree == {"net.block": "3.0 MB", "only": "2.0 MB"}


def test_every_kind_of_point_is_on_the_curve(opened: Open) -> None:
    """Our plans, the chosen one, classic strategies and torch's settings, each with a shape."""
    tab = opened(html(with_curve(layered_report())))
    for kind in PointKind:
        assert tab.locator(f"#curve .point.{kind.value}").count() >= 1
    assert tab.locator("#curve .budget-line").count() == 1


def test_a_live_value_leads_to_its_row(opened: Open) -> None:
    """A click on one of the largest live values shows it alone in the table."""
    tab = opened(html(layered_report(4, 5)))
    tab.locator("#inspector .largest button", has_text="x0.0").click()
    assert tab.get_by_label("Search the values").input_value() == "x0.0"
    assert cells(tab, "action") == ["saved"]


def test_the_theme_follows_the_system_until_it_is_switched(opened: Open) -> None:
    """Dark where the system is dark; one button changes it."""
    background = "getComputedStyle(document.body).backgroundColor"
    tab = opened(html(layered_report()), color_scheme="dark")
    dark = tab.evaluate(background)
    tab.get_by_role("button", name="Switch between light and dark").click()
    assert tab.evaluate(background) != dark


@pytest.mark.parametrize("width", [360, 1600])
def test_the_page_fits_phones_and_wide_screens(opened: Open, width: int) -> None:
    """Nothing sticks out to the side, with the curve and hostile names as well."""
    viewport = {"width": width, "height": 800}
    tab = opened(html(with_curve(hostile_report())), viewport=viewport)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("#curve svg").first.is_visible()
    assert tab.evaluate("document.querySelectorAll('img, script[src]').length") == 0


def test_a_step_of_ten_thousand_operations_opens_fast(
    browser: Any, tmp_path: Path, large: Report
) -> None:
    """Within two seconds of the processor's time, and the table draws only what is seen."""
    tab = browser.new_context().new_page()
    session = tab.context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = processor_seconds(session)
    (tmp_path / "large.html").write_text(html(large), encoding="utf-8")
    tab.goto((tmp_path / "large.html").as_uri())
    assert processor_seconds(session) - before < MOST_SECONDS
    tab.get_by_label("Fold layers").uncheck()
    assert tab.locator(".grid-row").count() < 60
    assert tab.locator("#count").inner_text() == "5,000 values, 5.0 GB"


def processor_seconds(session: Any) -> float:
    """What the page's main thread has taken; a busy machine does not change it."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(float(m["value"]) for m in metrics if m["name"] == "TaskDuration")
