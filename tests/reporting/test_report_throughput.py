"""How samples per second are told: in words, on the page, as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autoremat.commands.outputs import report_document
from autoremat.reporting import AtBudget, Report, ReportError, Throughput
from autoremat.reporting.page import html
from autoremat.reporting.throughput import bounded, step_nbytes
from tests.reporting.report_samples import layered_report

MB, GB = 1_000_000, 1_000_000_000
FOUND = Throughput(
    samples=32,
    tokens=32 * 512,
    here=AtBudget(10 * GB, 9_900 * MB, 1_000_000.0),
    less=AtBudget(9 * GB, 8_950 * MB, 1_100_000.0),
    more=AtBudget(11 * GB, 10_900 * MB, 950_000.0),
    unlimited=AtBudget(None, 11_200 * MB, 940_000.0),
)


def reported(found: Throughput = FOUND) -> Report:
    return replace(layered_report(2, 3), throughput=found)


def test_all_of_it_in_a_line() -> None:
    """What the plan reaches, what a GB more would buy, what one less would cost."""
    assert FOUND.text() == (
        "32.00 samples per second, 16384 tokens (batch 32, 1.0 s predicted for the operations of "
        "forward and backward); 1.0 GB less would cost 2.909 samples per second (-9.1 %); 1.0 GB "
        "more would buy 1.684 samples per second (+5.3 %); from 11.2 GB on the step is as fast as "
        "without a limit: it recomputes only where memory is short"
    )
    assert FOUND.text() in reported().summary()


def test_a_gb_is_a_step_of_large_budgets_and_a_tenth_of_small_ones() -> None:
    assert step_nbytes(80 * GB) == step_nbytes(5 * GB) == GB
    assert step_nbytes(4 * GB) == 400 * MB
    assert step_nbytes(250 * MB) == 25 * MB
    assert step_nbytes(3) == 1


def test_a_budget_above_the_need() -> None:
    """A smaller one, which the plan fits as well, costs nothing; a larger one changes nothing."""
    fast = AtBudget(80 * GB, 11_200 * MB, 940_000.0)
    less, more = (replace(fast, budget_nbytes=n * GB) for n in (79, 81))
    found = replace(FOUND, here=fast, less=less, more=more, unlimited=replace(fast))
    assert found.text().endswith(
        "; 1.0 GB less would cost nothing; 1.0 GB more would buy nothing; from 11.2 GB on the step "
        "is as fast as without a limit: a budget above that leaves it as it is"
    )


def test_a_budget_that_is_too_small_is_no_rate() -> None:
    """It names what the leanest plan needs."""
    found = replace(FOUND, less=AtBudget(9 * GB, 9_500 * MB, 2_000_000.0))
    text = "1.0 GB less would be too little: no plan fits 9.0 GB, the leanest that was found needs "
    assert f"{text}9.5 GB;" in found.text()
    assert "too little for any plan" in html(reported(found))


def test_more_memory_is_never_slower() -> None:
    """A plan that fits less fits more: where a search for more ends at a slower one, it stays."""
    slower = replace(FOUND.more, time_us=1_000_001.0)
    found = bounded(replace(FOUND, more=slower))
    assert found.more == AtBudget(11 * GB, FOUND.here.needed_nbytes, FOUND.here.time_us)
    assert "1.0 GB more would buy nothing" in found.text()
    assert bounded(FOUND) == FOUND


def test_the_leanest_plan_is_no_larger_than_the_one_that_runs() -> None:
    """A search below what any plan needs may end above it."""
    found = bounded(replace(FOUND, less=AtBudget(9 * GB, 10_100 * MB, 2_000_000.0)))
    assert not found.less.fits
    assert found.less.needed_nbytes == FOUND.here.needed_nbytes


def test_what_is_enough_is_the_smallest_budget_of_the_fastest() -> None:
    assert FOUND.enough_nbytes == 11_200 * MB
    at_more = replace(FOUND.more, time_us=FOUND.unlimited.time_us)
    assert replace(FOUND, more=at_more).enough_nbytes == at_more.needed_nbytes


def test_a_step_without_inputs_counts_steps() -> None:
    found = replace(FOUND, samples=0, tokens=0)
    assert found.text().startswith("1.000 steps per second (1.0 s predicted")
    assert "Tokens/s" not in html(reported(found))


def test_kernels_and_runs_are_told() -> None:
    found = replace(FOUND, runs=12, is_of_kernels=True)
    assert "for the kernels as generated of forward and backward in 12 runs of graphs" in (
        found.text()
    )


def test_the_page_has_a_row_for_each_budget() -> None:
    page = html(reported())
    for text in ("1.0 GB less", "this budget", "1.0 GB more", "no limit", "Tokens/s", "+5.3 %"):
        assert text in page
    assert "From 11.2 GB on the step is as fast as without a limit" in page
    assert '<section id="throughput"' not in html(layered_report(2, 3))


def test_json_has_it_too() -> None:
    report = reported()
    assert Report.from_json(report.to_json()) == report
    document = json.loads(json.dumps(report_document(report, {})))["throughput"]
    assert document["enough_nbytes"] == 11_200 * MB
    assert document["more"]["per_second"] == pytest.approx(32 / 0.95)
    assert document["less"]["fits"]
    assert report_document(layered_report(2, 3), {})["throughput"] is None


def test_figures_that_are_none_are_refused() -> None:
    with pytest.raises(ReportError, match="needed_nbytes is -1"):
        replace(FOUND.here, needed_nbytes=-1)
