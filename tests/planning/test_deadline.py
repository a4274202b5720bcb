"""The time limit is one for all searches and readings of a graph's plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import autoremat
from autoremat.inductor import real_peaks
from autoremat.memory.meter import resident_nbytes
from autoremat.planning import deadline
from autoremat.problem.subject import Peaks
from tests.planning.test_lean_plans import deep
from tests.tiny import many_rows

pytestmark = pytest.mark.inductor


class Clock:
    """Time that passes only where somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def count_readings(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[Peaks]:
    """What is read from now on, each reading of so many seconds."""
    clock, seen = Clock(), []
    original: Callable[..., Peaks] = real_peaks.generated_peaks

    def reading(*given: object) -> Peaks:
        clock.now_s += seconds
        seen.append(original(*given))
        return seen[-1]

    monkeypatch.setattr(deadline, "time", clock)
    monkeypatch.setattr(real_peaks, "generated_peaks", reading)
    return seen


def too_little(layers: int) -> int:
    """What is resident: below it nothing would be searched for."""
    return resident_nbytes(deep(layers), many_rows())


def plan(budget: int, layers: int) -> autoremat.Report:
    return autoremat.plan(deep(layers), many_rows(), budget=budget, time_limit=2.0, verbose=False)


@pytest.mark.thorough
def test_after_the_deadline_one_lean_plan_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal needs it; the budget that it names is accepted, however slow readings are."""
    readings = count_readings(monkeypatch, seconds=100.0)
    with pytest.raises(autoremat.InfeasibleBudget) as refused:
        plan(too_little(2), layers=2)
    assert len(readings) == 1
    smallest = refused.value.smallest_peak_nbytes
    assert plan(smallest, layers=2).predicted_peak_nbytes <= smallest


@pytest.mark.thorough
def test_before_the_deadline_a_ladder_of_lean_plans_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The smallest modelled peak need not have the smallest real one."""
    readings = count_readings(monkeypatch, seconds=0.0)
    with pytest.raises(autoremat.InfeasibleBudget) as refused:
        plan(too_little(3), layers=3)
    assert len(readings) > 1
    assert refused.value.smallest_peak_nbytes == min(peaks.needed_nbytes for peaks in readings)
