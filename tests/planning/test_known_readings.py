"""Generated code is read once for each way to split a graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from autoremat_solver.policies import recompute_all
from torch import Tensor, nn

import autoremat
from autoremat.ask.options import Setting
from autoremat.inductor import reading
from autoremat.inductor.reading import Reading
from autoremat.planning.choice import written_out
from autoremat.planning.known_readings import read_once
from autoremat.problem.lower import as_written
from autoremat.problem.subject import Subject
from autoremat.session import afterwards
from autoremat.session.session import Session
from autoremat.units import format_nbytes
from tests.joint_graphs import leaf, subject_of
from tests.tiny import Blocks, Residual, many_rows

EAGER = Setting(compiler="eager")


def chain(x: Tensor) -> Tensor:
    """Six operations whose results the backward needs."""
    for _ in range(3):
        x = torch.tanh(x.exp())
    return x.sum()


@pytest.fixture(name="read")
def _read() -> Iterator[mock.Mock]:
    """Stands for reading: another peak for each."""
    found = (Reading(number, number, None) for number in range(1, 100))
    with mock.patch.object(reading, "read_code", side_effect=lambda *_: next(found)) as read:
        yield read


def split(subject: Subject, *, saves: bool) -> Any:
    """The graph with all saved, or all made again."""
    problem = subject.lowered.problem
    return written_out(subject, as_written(problem) if saves else recompute_all(problem))


def test_the_same_split_is_read_once_whoever_writes_it_out(read):
    """Another search has modules of its own, of the same operations."""
    subject, again = (subject_of(chain, leaf(1000), EAGER) for _ in range(2))
    first = read_once(subject, *split(subject, saves=False))
    assert read_once(again, *split(again, saves=False)) == first
    assert read.call_count == 1


def test_another_split_or_another_size_is_read_apart(read):
    """Each takes something else."""
    subject, larger = subject_of(chain, leaf(1001), EAGER), subject_of(chain, leaf(1002), EAGER)
    found = [
        read_once(subject, *split(subject, saves=False)),
        read_once(subject, *split(subject, saves=True)),
        read_once(larger, *split(larger, saves=True)),
    ]
    assert len(set(found)) == 3
    assert read.call_count == 3


@pytest.mark.inductor
@pytest.mark.thorough
def test_for_a_log_line_no_code_is_read_for_a_report_it_is(monkeypatch):
    """The peak without a plan: no step needs it, and reading lasts as long as half a compile."""
    seen: list[Reading] = []
    counts: list[int] = []
    read, report = reading.read_code, Session.report

    def noted(*given: Any) -> Reading:
        seen.append(read(*given))
        return seen[-1]

    def told(session: Session) -> autoremat.Report:
        counts.append(len(seen))
        found = report(session)
        counts.append(len(seen))
        return found

    monkeypatch.setattr(reading, "read_code", noted)
    monkeypatch.setattr(Session, "report", told)
    torch._dynamo.reset()
    found = autoremat.plan(Blocks(), many_rows(), budget="min", verbose=False)
    assert counts == [counts[0], counts[0] + 1]
    assert found.baseline_peak_nbytes == seen[-1].peak_nbytes > found.predicted_peak_nbytes


@pytest.mark.thorough
@pytest.mark.inductor
def test_after_a_step_was_planned_anew_its_report_may_read_code():
    """Nothing is being compiled any more."""

    def two_calls(model: nn.Module) -> None:
        (model(many_rows()) + model(many_rows())).backward()

    model = Residual()
    whole = autoremat.plan(model, many_rows(), budget="1GB", compiler="eager", verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        autoremat.optimize(model, whole.predicted_peak_nbytes, verbose=False)
        for _ in range(3):
            two_calls(model)
    found = autoremat.report(model)
    assert found.baseline_peak_nbytes >= found.predicted_peak_nbytes > 0


def test_a_report_whose_peak_without_a_plan_cannot_be_read_is_a_report(monkeypatch):
    """It says the planned peak alone."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    torch._dynamo.reset()
    model = Blocks()
    autoremat.optimize(model, "1GB", compiler="eager", verbose=False)
    monkeypatch.setattr(afterwards, "afterwards", fail)
    model(many_rows()).backward()
    found = autoremat.report(model)
    assert not found.knows_baseline_peak
    assert "below no plan" not in found.to_html()
    assert found.summary().startswith(f"Peak {format_nbytes(found.predicted_peak_nbytes)} (")
