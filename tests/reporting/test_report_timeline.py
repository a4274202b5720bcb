"""The report's timeline adds up, and says what a saved value is worth."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from autoremat_solver import Op, Phase, Plan, Problem, Value, simulate

from autoremat.reporting import Report, ReportError, SpanKind
from autoremat.reporting.alternatives import Alternatives
from autoremat.reporting.timeline import MemoryTimeline, timeline_of
from tests.reporting.report_samples import layered_report, layered_step, waiting_report


def chain(*, first_may_repeat: bool = True) -> Problem:
    """Forward a -> b -> c; a backward that reads c, then a."""
    values = tuple(Value(name, n) for name, n in (("a", 10), ("b", 20), ("c", 40), ("g", 5)))
    ops = (
        Op("fa", (), ("a",), 1.0, recomputable=first_may_repeat),
        Op("fb", ("a",), ("b",), 2.0, workspace_nbytes=100),
        Op("fc", ("b",), ("c",), 4.0),
        Op("bc", ("c",), ("g",), 8.0, 0, Phase.BACKWARD, recomputable=False),
        Op("ba", ("a", "g"), (), 8.0, 0, Phase.BACKWARD, recomputable=False),
    )
    return Problem(values, ops, (), resident_nbytes=1000)


SAVE_ALL = Plan.of(("fa", "fb", "fc", "bc", "ba"))
AGAIN = Plan.of(("fa", "fb", "fc", "bc", "fa", "ba"))


def test_a_timeline_has_the_live_bytes_that_the_simulator_states() -> None:
    """One definition of peak: the report quotes it."""
    problem, plan = layered_step(3, 4)
    timeline = timeline_of(problem, plan)
    assert timeline.live_nbytes == simulate(problem, plan).live_nbytes
    assert timeline.peak_nbytes == simulate(problem, plan).peak_nbytes
    assert timeline.peak_step == simulate(problem, plan).peak_step
    assert len(timeline.baseline_live_nbytes) == len(problem.ops)


def test_spans_are_told_apart_by_what_they_are_to_the_step() -> None:
    """Value a is saved in the one plan and recomputed in the other; b never leaves the forward."""
    kinds = {span.value: span.kind for span in timeline_of(chain(), SAVE_ALL).spans}
    assert kinds == {
        "a": SpanKind.SAVED,
        "b": SpanKind.ACTIVATION,
        "c": SpanKind.SAVED,
        "g": SpanKind.GRADIENT,
    }
    again = [span.kind for span in timeline_of(chain(), AGAIN).spans if span.value == "a"]
    assert again == [SpanKind.ACTIVATION, SpanKind.RECOMPUTED]


def test_an_output_of_the_forward_lives_to_the_end() -> None:
    """What the training loop holds is neither saved nor an activation."""
    timeline = timeline_of(replace(chain(), outputs=("c",)), SAVE_ALL)
    (output,) = [span for span in timeline.spans if span.kind is SpanKind.OUTPUT]
    assert (output.value, output.born, output.last) == ("c", 2, 4)


def test_steps_know_their_phase_and_whether_they_repeat() -> None:
    """The second run of fa belongs to the backward and is a recompute."""
    steps = timeline_of(chain(), AGAIN).steps
    assert [step.is_backward for step in steps] == [False, False, False, True, True, True]
    assert [step.is_recompute for step in steps] == [False, False, False, False, True, False]
    assert steps[1].workspace_nbytes == 100


def test_what_computing_asks_and_waits_for_is_part_of_the_time() -> None:
    """7 us to ask for each copy; 100 us for it: to leave, during steps of 100, and to come back."""
    (graph,) = waiting_report().graphs
    assert graph.timeline is not None
    copies = {step.name: step for step in graph.timeline.steps if step.op not in ("op0", "")}
    assert list(copies) == ["offload x0.0", "release x0.0", "reload x0.0"]
    assert [step.time_us for step in copies.values()] == [7.0, 0.0, 7.0]
    assert {step.module for step in copies.values()} == {"model.layers.0.block0"}
    assert not any(step.is_recompute for step in copies.values())
    assert all(step.is_estimated for step in copies.values())  # by bytes, and how fast copies are
    stalls = {step.name: step.stall_us for step in graph.timeline.steps if step.stall_us}
    assert stalls == {"b0.0": pytest.approx(93.0)}  # less than 100: asking for the copy takes 7
    whole = sum(step.stall_us + step.time_us for step in graph.timeline.steps)
    assert whole == pytest.approx(graph.predicted_time_us)


def test_a_value_that_comes_back_is_none_that_was_made_again() -> None:
    """Its instance of the forward is freed there; the second has a kind of its own."""
    (graph,) = waiting_report().graphs
    assert graph.timeline is not None
    kinds = [span.kind for span in graph.timeline.spans if span.value == "x0.0"]
    assert kinds == [SpanKind.ACTIVATION, SpanKind.FETCHED]


def test_a_report_with_copies_is_read_as_it_was_written() -> None:
    """Stalls, trips and kinds included."""
    report = waiting_report()
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"live_nbytes": (0,) * 5}, "contradicts itself at step 0 .'fa'.: 0 bytes.*up to 1010"),
        ({"live_nbytes": (1010,)}, "numbers for 1 of 5 steps"),
        ({"resident_nbytes": 999}, "contradicts itself at step 0"),
        ({"spans": ()}, "contradicts itself at step 0"),
        ({"baseline_step_us": (1.0,)}, "numbers for 1 of 5 steps"),
        ({"steps": ()}, "numbers for 5 of 0 steps"),
    ],
)
def test_a_timeline_that_does_not_add_up_is_refused(
    change: dict[str, object], message: str
) -> None:
    """Resident bytes, spans and workspace make the live bytes at every step, or it is an error."""
    timeline = timeline_of(chain(), SAVE_ALL)
    with pytest.raises(ReportError, match=message):
        replace(timeline, **change)


def test_a_span_outside_the_step_is_refused() -> None:
    """An instance cannot live on after the last step."""
    timeline = timeline_of(chain(), SAVE_ALL)
    wrong = replace(timeline.spans[0], last=5)
    with pytest.raises(ReportError, match="'a' lives from step 0 to step 5 of 5"):
        replace(timeline, spans=(wrong, *timeline.spans[1:]))


def test_a_stored_timeline_is_checked_when_it_is_read() -> None:
    """A byte changed in the file does not pass."""
    data = json.loads(layered_report().to_json())
    data["graphs"][0]["timeline"]["live_nbytes"][3] += 1
    with pytest.raises(ReportError, match="contradicts itself at step 3"):
        Report.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("column", "entries", "message"),
    [
        ("is_backward", [2], "holds something other than 0 and 1"),
        ("name", [10**6], "is no number of a text"),
        ("time_us", [], "differ in length"),
        ("time_us", None, "is a NoneType; expected a list"),
    ],
)
def test_columns_that_are_damaged_are_refused(column: str, entries: object, message: str) -> None:
    """The message names the column."""
    data = json.loads(layered_report(1, 1).to_json())
    steps = data["graphs"][0]["timeline"]["steps"]
    steps[column] = entries * len(steps["name"]) if isinstance(entries, list) else entries
    with pytest.raises(ReportError, match=message):
        Report.from_json(json.dumps(data))


def test_an_unknown_kind_of_span_is_refused() -> None:
    """Kinds are a closed list."""
    text = layered_report(1, 1).to_json().replace('"gradient"', '"gradients"')
    with pytest.raises(ReportError, match="column 'kind' of Span holds something unknown"):
        Report.from_json(text)


def test_a_report_survives_its_json_with_its_timeline() -> None:
    """Columns in, columns out."""
    report = layered_report()
    assert Report.from_json(report.to_json()) == report
    assert isinstance(report.graphs[0].timeline, MemoryTimeline)


def test_a_rerun_costs_the_value_and_its_freed_inputs() -> None:
    """For c, its input b is gone by then, and a is still there: fc and fb would run again."""
    rerun = Alternatives(chain(), SAVE_ALL).of("c")
    assert rerun is not None
    assert sorted(rerun.ops) == ["fb", "fc"]
    assert rerun.time_us == 6.0


def test_a_rerun_goes_back_as_far_as_nothing_is_live() -> None:
    """In the other plan a is freed as well: all three would run again."""
    rerun = Alternatives(chain(), AGAIN).of("c")
    assert rerun is not None
    assert sorted(rerun.ops) == ["fa", "fb", "fc"]
    assert rerun.time_us == 7.0


def test_a_rerun_is_blocked_by_an_operation_that_runs_once() -> None:
    """The culprit is named, wherever it stands in the chain."""
    rerun = Alternatives(chain(first_may_repeat=False), SAVE_ALL).of("a")
    assert rerun is not None
    assert rerun.blocked_by == "fa"


def test_a_value_that_the_problem_does_not_have_has_no_rerun() -> None:
    """Such as one that a compiler computes inside its readers."""
    assert Alternatives(chain(), SAVE_ALL).of("inlined") is None
