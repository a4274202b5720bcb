"""The report: totals, JSON, and the text that a user reads."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from autoremat_solver.plan import Status
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat.reporting import (
    SCHEMA,
    CurvePoint,
    Fact,
    Fallback,
    GraphReport,
    MemoryTimeline,
    PointKind,
    Report,
    ReportError,
    ResidentParts,
    Span,
    SpanKind,
    Step,
    ValueAction,
    ValueReport,
    one_line,
)

SAVED = ValueReport(
    name="mm",
    nbytes=12_600_000,
    shape=(4, 256, "s0"),
    dtype="float32",
    action=ValueAction.SAVE,
    source="model.py:88",
    module="layers.0.mlp",
    op="mm",
    reason="saving 12.6 MB avoids 3 recomputes of 1.9 ms",
    time_us=1900.0,
)
RECOMPUTED = replace(
    SAVED,
    name="gelu",
    action=ValueAction.RECOMPUTE,
    recomputes=2,
    source="model.py:91",
    op="gelu",
    reason="freeing 12.6 MB costs 0.4 ms",
    time_us=200.0,
)
FREED = ValueReport("loss", 4, (), "float32", ValueAction.FREE)
GRAPH = GraphReport(
    name="graph 0",
    predicted_peak_nbytes=5_000_000_000,
    baseline_peak_nbytes=9_800_000_000,
    predicted_time_us=103_100.0,
    baseline_time_us=100_000.0,
    bound_us=102_280.0,
    status=Status.FEASIBLE,
    method="ilp",
    solve_seconds=2.1,
    values=(SAVED, RECOMPUTED, FREED),
    timeline=MemoryTimeline(
        resident_nbytes=1_200_000_000,
        steps=(
            Step("mm", "mm", "layers.0.mlp", "model.py:88", False, False, False, 1900.0, 0),
            Step("mm_17", "mm", "layers.0.mlp", "model.py:88", True, False, True, 100.0, 400),
        ),
        spans=(
            Span("mm", SpanKind.SAVED, 12_600_000, 0, 1),
            Span("mm_17", SpanKind.GRADIENT, 3_787_399_600, 1, 1),
        ),
        live_nbytes=(1_212_600_000, 5_000_000_000),
        baseline_live_nbytes=(9_800_000_000,),
        baseline_step_us=(2000.0,),
    ),
    peak_step="mm_17",
    peak_source="model.py:88",
    estimated_ops=("topk",),
    constraints=("dropout masks are saved",),
)
REPORT = Report(
    budget_nbytes=5_000_000_000,
    resident=ResidentParts(parameters_nbytes=500_000_000, optimizer_nbytes=700_000_000),
    graphs=(GRAPH,),
    compiler="inductor",
    device="NVIDIA H200",
    torch_version="2.13.0",
    optimizer="AdamW",
)
FALLBACK = Fallback("AR101", "`cond` is not understood.", "Report it.")
SMALLER = replace(
    GRAPH,
    name="graph 1",
    predicted_peak_nbytes=3_000_000_000,
    baseline_peak_nbytes=9_900_000_000,
    status=Status.TIME_LIMIT,
    method="greedy",
    peak_step="add",
)

counts = st.integers(0, 2**60)
times_us = st.floats(0, 1e15, allow_nan=False)
texts = st.text(max_size=12)
values = st.builds(
    ValueReport,
    name=texts,
    nbytes=counts,
    shape=st.lists(counts | texts, max_size=3).map(tuple),
    dtype=texts,
    action=st.sampled_from(ValueAction),
    recomputes=counts,
    source=texts,
    module=texts,
    op=texts,
    reason=texts,
    time_us=times_us,
)


@st.composite
def _timelines(draw: st.DrawFn) -> MemoryTimeline:
    """Any timeline that adds up."""
    resident_nbytes = draw(counts)
    steps = draw(st.lists(steps_without_memory, max_size=4))
    live = [resident_nbytes + step.workspace_nbytes for step in steps]
    spans = []
    for born in range(len(steps)):
        last = draw(st.integers(born, len(steps) - 1))
        span = Span(draw(texts), draw(st.sampled_from(SpanKind)), draw(counts), born, last)
        live = [n + span.nbytes * (born <= step <= last) for step, n in enumerate(live)]
        spans.append(span)
    baseline = draw(st.lists(st.tuples(counts, times_us), max_size=3))
    return MemoryTimeline(
        resident_nbytes,
        tuple(steps),
        tuple(spans),
        tuple(live),
        tuple(nbytes for nbytes, _ in baseline),
        tuple(time_us for _, time_us in baseline),
    )


steps_without_memory = st.builds(
    Step,
    name=texts,
    op=texts,
    module=texts,
    source=texts,
    is_backward=st.booleans(),
    is_recompute=st.booleans(),
    is_estimated=st.booleans(),
    time_us=times_us,
    workspace_nbytes=counts,
)
timelines = _timelines()
graphs = st.builds(
    GraphReport,
    name=texts,
    predicted_peak_nbytes=counts,
    baseline_peak_nbytes=counts,
    predicted_time_us=times_us,
    baseline_time_us=times_us,
    bound_us=times_us,
    status=st.sampled_from(Status),
    method=texts,
    solve_seconds=times_us,
    values=st.lists(values, max_size=3).map(tuple),
    timeline=st.none() | timelines,
    peak_step=texts,
    peak_source=texts,
    estimated_ops=st.lists(texts, max_size=2).map(tuple),
    constraints=st.lists(texts, max_size=2).map(tuple),
)
points = st.builds(
    CurvePoint,
    peak_nbytes=counts,
    time_us=times_us,
    label=texts,
    kind=st.sampled_from(PointKind),
    budget_nbytes=st.none() | counts,
)
reports = st.builds(
    Report,
    budget_nbytes=counts,
    resident=st.builds(ResidentParts, *[counts] * 6),
    graphs=st.lists(graphs, max_size=3).map(tuple),
    measured_peak_nbytes=st.none() | counts,
    compiler=texts,
    device=texts,
    torch_version=texts,
    fallbacks=st.lists(st.builds(Fallback, texts, texts, texts), max_size=2).map(tuple),
    user_constraints=st.lists(texts, max_size=2).map(tuple),
    curve=st.lists(points, max_size=2).map(tuple),
    facts=st.lists(st.builds(Fact, texts, texts), max_size=2).map(tuple),
)


def edited(**changes: object) -> str:
    """The JSON of REPORT with some top-level fields replaced."""
    return json.dumps(json.loads(REPORT.to_json()) | changes)


def test_a_step_of_one_graph_reads_like_its_graph() -> None:
    """In the simple case the totals are the graph's own numbers."""
    for name in (
        "predicted_peak_nbytes",
        "baseline_peak_nbytes",
        "predicted_time_us",
        "baseline_time_us",
        "bound_us",
        "gap",
        "status",
        "method",
        "solve_seconds",
        "values",
        "peak_step",
        "estimated_ops",
        "constraints",
    ):
        assert getattr(REPORT, name) == getattr(GRAPH, name), name


def test_a_step_of_several_graphs_adds_times_and_takes_the_highest_peak() -> None:
    """Peaks do not add up, since each includes what the other graphs hold."""
    report = replace(REPORT, graphs=(GRAPH, SMALLER))
    assert report.predicted_peak_nbytes == 5_000_000_000
    assert report.baseline_peak_nbytes == 9_900_000_000
    assert report.predicted_time_us == 2 * GRAPH.predicted_time_us
    assert report.gap == pytest.approx(GRAPH.gap)
    assert report.peak_step == "mm_17"
    assert report.status is Status.TIME_LIMIT
    assert report.method == "ilp, greedy"
    assert len(report.values) == 6
    assert report.constraints == GRAPH.constraints


def test_a_step_without_a_planned_graph_promises_nothing() -> None:
    """Where nothing is planned, no status and no saving is claimed."""
    report = replace(REPORT, graphs=(), fallbacks=(FALLBACK,))
    assert report.status is None
    assert report.predicted_peak_nbytes == report.resident_nbytes
    assert one_line(report) == "autoremat: nothing is planned: 1 part without a plan"
    assert "AR101" in report.summary()
    assert Report.from_json(report.to_json()) == report


def test_a_measured_peak_makes_a_new_report() -> None:
    """Reports are frozen; measuring adds one number."""
    measured = REPORT.with_measured(4_990_000_000)
    assert measured.measured_peak_nbytes == 4_990_000_000
    assert REPORT.measured_peak_nbytes is None
    assert replace(measured, measured_peak_nbytes=None) == REPORT


@settings(deadline=None)
@given(reports)
def test_json_gives_an_equal_report_back(report: Report) -> None:
    """Every report survives its JSON, which is strict: no NaN, no Infinity."""
    text = report.to_json()
    assert Report.from_json(text) == report
    assert not {"NaN", "Infinity", "-Infinity"} & set(_constants(text))


def test_json_has_the_schema_and_the_totals() -> None:
    """Other tools read the totals without adding up graphs; an unproven gap is null."""
    data = json.loads(replace(REPORT, graphs=(replace(GRAPH, bound_us=0.0),)).to_json())
    assert data["schema"] == SCHEMA == "autoremat.report/5"
    assert data["predicted_peak_nbytes"] == 5_000_000_000
    assert data["status"] == "feasible"
    assert data["gap"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON.*complete"),
        (REPORT.to_json()[:-40], "not JSON.*complete"),
        ("[" * 100_000, "not JSON"),
        ("[]", "expected a JSON object"),
        ('{"schema": "autoremat.problem/1"}', "found 'autoremat.problem/1'"),
        ('{"hello": 1}', "found None"),
        (edited(schema="autoremat.report/6"), "newer autoremat.*Update"),
        (edited(schema="autoremat.report/4"), "older autoremat.*Plan the model again"),
        (edited(texts=[]), "is no number of a text"),
        (edited(texts={}), "texts is a dict"),
        (edited(budget_nbytes=math.nan), "NaN"),
        (edited(budget_nbytes=-1), "Report: budget_nbytes is -1"),
        (edited(budget_nbytes="5GB"), "budget_nbytes is '5GB'"),
        (edited(budget_nbytes=True), "budget_nbytes is True"),
        (edited(device=None), "device is None; expected a text"),
        (edited(surprise=1), "unknown field 'surprise'"),
        (edited(graphs=None), "graphs is a NoneType"),
        (edited(graphs=[1]), "an item of graphs as a JSON object"),
        (edited(graphs=[{}]), "an item of graphs lacks 'name'"),
        (edited(gap=0.5), "contradicts itself: gap is 0.5"),
    ],
)
def test_json_that_is_no_report_is_refused(text: str, message: str) -> None:
    """Truncated, foreign, newer and contradictory texts each get their own message."""
    with pytest.raises(ReportError, match=message):
        Report.from_json(text)


@pytest.mark.parametrize("where", ["budget_nbytes", "graphs"])
def test_json_without_a_field_is_refused(where: str) -> None:
    """A missing field is named."""
    data = json.loads(REPORT.to_json())
    del data[where]
    with pytest.raises(ReportError, match=f"the report lacks '{where}'"):
        Report.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("status", "perfect", "expected one of optimal"),
        ("values", {}, "columns of ValueReport are not name"),
        ("timeline", [], "Expected timeline as a JSON object"),
    ],
)
def test_json_with_a_strange_graph_is_refused(field: str, value: object, message: str) -> None:
    """The message names what was expected instead."""
    data = json.loads(REPORT.to_json())
    data["graphs"][0][field] = value
    with pytest.raises(ReportError, match=message):
        Report.from_json(json.dumps(data))


@pytest.mark.parametrize("time_us", [math.nan, math.inf, -1.0, "1"])
def test_a_report_is_checked_when_it_is_made(time_us: object) -> None:
    """A time that is no finite number never gets as far as the JSON."""
    with pytest.raises(ReportError, match="GraphReport 'graph 0': predicted_time_us is"):
        replace(GRAPH, predicted_time_us=time_us)


def test_one_line_says_what_was_won_and_what_it_costs() -> None:
    """Peak before and after, budget, extra time, values saved of all, gap."""
    assert one_line(REPORT) == (
        "autoremat: peak 9.8 GB -> 5.0 GB (budget 5.0 GB), +3.1 % time predicted, "
        "1 of 3 values saved, gap at most 0.8 %"
    )


def test_one_line_does_not_hide_a_step_over_the_budget() -> None:
    """A measured peak above the budget is in the verdict."""
    line = one_line(REPORT.with_measured(5_000_000_001))
    assert "measured 5.0 GB (OVER the budget 5.000000000 GB by 1 B)" in line


def test_one_line_claims_no_gap_without_a_bound() -> None:
    """A bound of zero proves nothing."""
    assert one_line(replace(REPORT, graphs=(replace(GRAPH, bound_us=0.0),))).endswith(
        "no proven gap"
    )


def test_the_summary_of_a_small_report() -> None:
    """The verdict first, then facts, then the values that matter, with lines and reasons."""
    assert REPORT.with_measured(4_990_000_000).summary() == (
        "Peak 9.8 GB -> 5.0 GB, measured 5.0 GB (budget 5.0 GB), +3.1 % time predicted, "
        "1 of 3 values saved, gap at most 0.8 %\n"
        "\n"
        "Budget       5000000000 bytes, 1.2 GB resident: 500.0 MB parameters, "
        "700.0 MB optimizer state\n"
        "Measured     5.0 GB, 10.0 MB below the prediction\n"
        "Peak at      `mm_17` (model.py:88)\n"
        "Step time    100.0 ms -> 103.1 ms predicted, proven bound of the model 102.3 ms\n"
        "Solver       feasible: within the budget, with a proven gap (ilp, 2.1 s)\n"
        "Runs on      NVIDIA H200, inductor, torch 2.13.0\n"
        "Estimated    1 operation without a sound measurement: topk\n"
        "Constraints  1 constraint: dropout masks are saved\n"
        "\n"
        "Largest saved values\n"
        "  12.6 MB  model.py:88  layers.0.mlp (mm)  saving 12.6 MB avoids 3 recomputes of 1.9 ms\n"
        "\n"
        "Most expensive recomputed values\n"
        "  12.6 MB  400.0 us  model.py:91  layers.0.mlp (gelu)  freeing 12.6 MB costs 0.4 ms"
    )


def test_times_of_kernels_are_told_where_those_of_all_graphs_are_known() -> None:
    """A graph that really takes nothing is known; one of which nobody can say is not."""
    timed = replace(GRAPH, code_time_us=90_500.0, baseline_code_time_us=88_000.0)
    still = replace(GRAPH, code_time_us=0.0, baseline_code_time_us=0.0)
    assert replace(REPORT, graphs=(timed, still)).code_times_us == (88_000.0, 90_500.0)
    text = replace(REPORT, graphs=(timed,)).summary()
    assert "\nKernels      88.0 ms -> 90.5 ms as generated: library calls measured" in text
    for report in (REPORT, replace(REPORT, graphs=(timed, GRAPH)), replace(REPORT, graphs=())):
        assert report.code_times_us is None
        assert "Kernels" not in report.summary()


def test_the_summary_folds_identical_layers() -> None:
    """Values that differ only in the number of their layer share one row."""
    layers = tuple(replace(SAVED, name=f"mm_{i}", module=f"layers.{i}.mlp") for i in range(12))
    text = replace(REPORT, graphs=(replace(GRAPH, values=layers),)).summary()
    assert text.count("model.py:88  layers") == 1
    assert "12 x 12.6 MB  model.py:88  layers.*.mlp (mm)" in text


def test_the_longest_summary_fits_a_screen() -> None:
    """With every fact and both tables full, and no optimizer, it has 26 lines."""
    values = tuple(
        replace(value, name=f"{value.name}_{i}", module="", nbytes=i)
        for value in (SAVED, RECOMPUTED)
        for i in range(40)
    )
    graphs = (replace(GRAPH, values=values), SMALLER)
    report = replace(REPORT, graphs=graphs, fallbacks=(FALLBACK,), optimizer="")
    assert len(report.summary().split("\n")) == 26


@settings(deadline=None)
@given(reports)
def test_the_summary_fits_a_screen(report: Report) -> None:
    """At most 26 lines, whatever the report holds, and no escape codes of our own."""
    lines = report.summary().split("\n")
    assert 4 <= len(lines) <= 26
    assert lines[0][0] in "PN"
    assert len(one_line(report).split("\n")) == 1


@settings(deadline=None, max_examples=40)
@given(reports, st.integers(24, 200))
def test_the_summary_fits_the_terminal(report: Report, width: int) -> None:
    """No line is wider than asked for, and the verdict comes first."""
    lines = report.summary(width).split("\n")
    assert max(map(len, lines)) <= width
    assert lines[0][0] in "PN"


def test_a_narrow_summary_keeps_sizes_and_places() -> None:
    """Sources and reasons go first, then the front of the place."""
    lines = REPORT.summary(40).split("\n")
    assert "  12.6 MB  layers.0.mlp (mm)" in lines
    assert "Budget       5000000000 bytes, 1.2 GB" in lines


def test_reports_are_read_without_torch() -> None:
    """`autoremat.reporting` needs neither torch nor a terminal library."""
    program = (
        "import sys, autoremat.reporting\nprint(sorted({'torch', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout == "[]\n"


def _constants(text: str) -> list[str]:
    found: list[str] = []
    json.loads(text, parse_constant=found.append)
    return found
