"""A budget that a refusal named is accepted, by another search in another process too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from autoremat_solver import Solution, Solver, Status, effort
from torch import nn

import autoremat
from autoremat.inductor import reading
from autoremat.memory.meter import resident_nbytes
from autoremat.planning import read
from autoremat.planning.choice import Choice
from autoremat.problem.subject import Peaks
from tests.solver.plain_chains import PlainChain
from tests.tiny import many_rows


class MeanSquare(nn.Module):
    """The loss, inside the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def deep(depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32)) for _ in range(depth)]
    return nn.Sequential(*layers, MeanSquare())


def step(budget: int, depth: int) -> nn.Module:
    model = autoremat.optimize(deep(depth), budget, compiler="eager", verbose=False)
    model(torch.ones(256, 32)).backward()
    return model


def smallest_of_refusal(run: Callable[[int], object], budget: int) -> int:
    with pytest.raises(autoremat.InfeasibleBudget) as refused:
        run(budget)
    return refused.value.smallest_peak_nbytes


@pytest.mark.parametrize("below_nbytes", [0, 4096], ids=["without a search", "after a search"])
@pytest.mark.parametrize("depth", [5, pytest.param(10, marks=pytest.mark.thorough)])
def test_the_named_budget_is_accepted(depth: int, below_nbytes: int) -> None:
    """Whether nothing was searched for, as even what is resident is too much, or all of it."""
    resident = resident_nbytes(deep(depth), torch.ones(256, 32))
    smallest = smallest_of_refusal(lambda budget: step(budget, depth), resident + below_nbytes)
    assert autoremat.report(step(smallest, depth)).predicted_peak_nbytes <= smallest


def test_a_plan_that_needs_no_search_tells_what_the_time_limit_left_out() -> None:
    """Whoever accepts it where the solver found none that fits."""
    ask = {"compiler": "eager", "verbose": False, "time_limit": 1e-6}
    smallest = smallest_of_refusal(
        lambda budget: autoremat.plan(deep(5), torch.ones(256, 32), budget=budget, **ask), 1
    )
    accepted = autoremat.plan(deep(5), torch.ones(256, 32), budget=smallest, **ask)
    assert accepted.status is Status.TIME_LIMIT
    assert {"prices", "smallest"} <= set(accepted.left_out)


class Clock:
    """Time that passes only where somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def count_readings(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[Peaks]:
    """What is read from now on, each reading of so many seconds."""
    clock, seen = Clock(), []
    original: Callable[..., reading.Reading] = reading.read_code

    def slow(*given: object) -> reading.Reading:
        clock.now_s += seconds
        found = original(*given)
        seen.append(found.peaks)
        return found

    monkeypatch.setattr(effort, "time", clock)
    monkeypatch.setattr(reading, "read_code", slow)
    return seen


def plan(budget: int) -> autoremat.Report:
    return autoremat.plan(deep(2), many_rows(), budget=budget, time_limit=5.0, verbose=False)


@pytest.mark.thorough
@pytest.mark.inductor
def test_however_slow_readings_are_the_named_budget_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing more is read after the time limit; what has to be read is."""
    resident = resident_nbytes(deep(2), many_rows())
    readings = count_readings(monkeypatch, seconds=100.0)
    smallest = smallest_of_refusal(plan, resident + 4096)
    assert len(readings) <= 6  # torch's own partition, the first two plans, three lean ones
    assert plan(smallest).predicted_peak_nbytes <= smallest


@pytest.mark.thorough
@pytest.mark.inductor
def test_before_the_time_limit_a_ladder_of_lean_plans_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The smallest modelled peak need not have the smallest real one."""
    resident = resident_nbytes(deep(2), many_rows())
    readings = count_readings(monkeypatch, seconds=0.0)
    smallest = smallest_of_refusal(plan, resident + 4096)
    assert len(readings) > 3
    assert smallest == min(peaks.needed_nbytes for peaks in readings)
    assert plan(smallest).predicted_peak_nbytes <= smallest


@dataclass
class Reading:
    """What is asked of a choice: the larger its number, the more it takes."""

    solution: Solution
    needed_nbytes: int
    fits: bool
    code_us: float | None = None


class Readings:
    """A reader that finds all to fit but so many, and takes its time for one of them."""

    subject = None

    def __init__(self, too_large: int, clock: Clock, last: int | None = None) -> None:
        self.seen: list[Reading] = []
        self.too_large, self._clock, self._last = too_large, clock, last

    def ways(self, solution: Solution) -> list[Reading]:
        known = [found for found in self.seen if found.solution.plan == solution.plan]
        if known:
            return known
        number = len(self.seen) + 1
        self.seen.append(Reading(solution, -number, number > self.too_large))
        self._clock.now_s += 100.0 if number == self._last else 0.0
        return self.seen[-1:]


def leanest(readings: Any) -> Choice:
    solver = Solver(PlainChain(6).problem())
    fastest = solver.fastest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "leanest_at_once", lambda *_: readings.ways(fastest)[0])
        patch.setattr(read, "layer_by_layer", lambda _: None)
        ladder = read._ladder(readings, solver, fastest)
    return read.best_of(ladder, -1 - readings.too_large)


@pytest.mark.parametrize("last", [2, None], ids=["late", "in time"])
def test_of_the_lean_plans_the_fastest_that_fits_is_taken(
    monkeypatch: pytest.MonkeyPatch, last: int | None
) -> None:
    """Of all that were read, the first one not, even if the time limit is over by then."""
    monkeypatch.setattr(effort, "time", clock := Clock())
    readings = Readings(1, clock, last)
    taken = leanest(readings)
    assert len(readings.seen) == (last or len(readings.seen)) > 1
    times = [found.solution.timeline.time_us for found in readings.seen[1:]]
    assert (taken.fits, taken.solution.timeline.time_us) == (True, min(times))


def test_however_late_it_is_a_plan_that_fits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a refusal named on an idle machine has to be accepted on a busy one."""
    monkeypatch.setattr(effort, "time", clock := Clock())
    taken = leanest(readings := Readings(3, clock, last=2))
    assert taken.fits
    assert len(readings.seen) == 4


def test_a_refusal_tells_of_all_that_was_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that was read to be smallest is known without a search; the others are not."""
    monkeypatch.setattr(effort, "time", clock := Clock())
    refused = leanest(readings := Readings(100, clock))
    assert refused.needed_nbytes == -len(readings.seen)
    assert "smallest" not in readings.seen[-1].solution.tried
    assert "smallest" in refused.solution.tried


class TooLargeAtFirst:
    """A reader that finds the first plan to take a little more than was modelled; it takes long."""

    subject = None

    def __init__(self, clock: Clock, budget_nbytes: int) -> None:
        self.seen: list[Reading] = []
        self._clock, self._budget_nbytes = clock, budget_nbytes

    def ways_alike(self, solution: Solution) -> bool:
        return False

    def read(self, solution: Solution, *, both: bool = True) -> Reading:
        self._clock.now_s += 100.0
        modelled_nbytes = solution.timeline.peak_nbytes
        needed_nbytes = modelled_nbytes + 1
        is_within = needed_nbytes <= self._budget_nbytes
        self.seen.append(Reading(solution, needed_nbytes, is_within))
        return self.seen[-1]


def test_late_or_not_a_plan_that_misses_by_little_has_a_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leanest plans take far less than the budget, and as many readings."""
    monkeypatch.setattr(effort, "time", clock := Clock())
    solver = Solver(PlainChain(30).problem(), time_limit_s=5.0)
    fastest = solver.fastest()
    wanted = solver.solve(int(0.6 * fastest.timeline.peak_nbytes))
    budget_nbytes = wanted.timeline.peak_nbytes  # to the byte, as modelled
    reader: Any = TooLargeAtFirst(clock, budget_nbytes)
    found = read._fitting(reader, solver, fastest, budget_nbytes, effort.CutOff(5.0))
    assert [reading.fits for reading in reader.seen] == [False, True]
    assert found is reader.seen[-1]
    assert found.needed_nbytes > 0.75 * budget_nbytes


@pytest.mark.parametrize("is_slow", [True, False])
def test_late_or_not_a_plan_made_by_hand_is_not_the_only_one(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """Its code may show that the model refuses what fits: then one more is searched for."""
    monkeypatch.setattr(effort, "time", clock := Clock())
    problem = PlainChain(30).problem()
    halves = tuple(replace(value, nbytes=value.nbytes // 2) for value in problem.values)
    solver, learned = (
        Solver(p, time_limit_s=5.0) for p in (problem, replace(problem, values=halves))
    )
    budget_nbytes = int(0.8 * solver.smallest_peak().timeline.peak_nbytes)
    fastest = solver.fastest()
    by_hand = Reading(fastest, budget_nbytes, True, code_us=1e9 if is_slow else 1e-9)

    class Fits(TooLargeAtFirst):
        def read(self, solution: Solution, *, both: bool = True) -> Reading:
            clock.now_s += 100.0
            self.seen.append(Reading(solution, budget_nbytes, True, code_us=1.0))
            return self.seen[-1]

    def by_layer(*_: Any) -> tuple[Reading, Solver]:
        clock.now_s += 100.0
        return by_hand, learned

    monkeypatch.setattr(read, "_by_layer", by_layer)
    reader: Any = Fits(clock, budget_nbytes)
    found = read._fitting(reader, solver, fastest, budget_nbytes, effort.CutOff(5.0))
    assert len(reader.seen) == 1
    assert found is (reader.seen[0] if is_slow else by_hand)
