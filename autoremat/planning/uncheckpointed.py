"""How fast a planned graph could be without the user's own checkpoints, within the same budget.

Enters: a graph, its plan, and what a step holds beside it. Leaves: times of its operations.
Guarantees: nothing that runs is changed, no code is read, no rank is asked; a plan is searched for
only where the checkpoints may cost something, and once. What generated code takes more than is
simulated counts without the checkpoints as well, so that the time is one that a plan can have.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from autoremat_solver import Plan, Problem, Solver, simulate

from autoremat.planning.choice import Choice, as_chosen
from autoremat.planning.nesting import Beside, placed
from autoremat.planning.ways import crossing_nbytes, room_beside
from autoremat.problem.lower import Lowered, as_written, without_spare_states
from autoremat.problem.subject import Subject

WORTH = 0.02  # of a step: less is not worth a word
_EFFORT = 0.3  # of a search for a plan that runs
_GOOD_ENOUGH = 0.005  # a gap that says as much as none
_LEFT_OUT = ("quicken smallest",)  # of the search: what does not fit is not asked for


class Place(NamedTuple):
    """Where a graph is in its step.

    Attributes:
        found: what is held beside it.
        peak_nbytes: of the step while the graph runs by its plan.
        budget_nbytes: what it may take then.
        room_nbytes: what the step takes between its forward and its backward.
        more_nbytes: how much more may cross from one to the other; None if all that fits may.
    """

    found: Beside
    peak_nbytes: int
    budget_nbytes: int
    room_nbytes: int = 0
    more_nbytes: int | None = None


class Uncheckpointed:
    """A graph whose own checkpoints need not be heeded.

    Attributes:
        now_us: duration of its operations under its plan, which heeds them.
    """

    def __init__(self, subject: Subject, choice: Choice) -> None:
        """Of the graph alone, and its plan."""
        self._free, self._heeded = _freed(subject), as_chosen(subject, choice)
        self._plan = choice.solution.plan
        self._known: dict[Place, float] = {}
        self.now_us = choice.solution.timeline.time_us

    @cached_property
    def once_us(self) -> float:
        """Duration of its operations if each runs once."""
        return simulate(self._free.problem, as_written(self._free.problem)).time_us

    def free_us(self, place: Place, time_limit_s: float) -> float:
        """Duration of its operations under a plan that does not heed them; `now_us` if none fits.

        Args:
            place: where the graph is.
            time_limit_s: for the search.
        """
        if self.now_us <= (1 + WORTH) * self.once_us:
            return self.now_us
        if place not in self._known:
            self._known[place] = self._searched(place, time_limit_s)
        return self._known[place]

    def _searched(self, place: Place, time_limit_s: float) -> float:
        heeded = placed(self._heeded.lowered, place.found).problem
        heeded = without_spare_states(heeded, self._plan)
        unseen_nbytes = max(0, place.peak_nbytes - simulate(heeded, self._plan).peak_nbytes)
        target_nbytes = place.budget_nbytes - unseen_nbytes
        room_nbytes = place.room_nbytes
        if place.more_nbytes is not None:
            kept_nbytes = crossing_nbytes(heeded, self._plan) + place.more_nbytes
            left_nbytes = room_beside(self._heeded, place.found, kept_nbytes, target_nbytes)
            room_nbytes = max(room_nbytes, left_nbytes)
        problem = placed(self._free, place.found, room_nbytes).problem
        plan = as_written(problem)
        if not (_is_free(problem) and _fits(problem, plan, target_nbytes)):
            solver = Solver(
                problem,
                time_limit_s=time_limit_s,
                effort=_EFFORT,
                bound_effort=0.0,
                without=_LEFT_OUT,
                good_enough=_GOOD_ENOUGH,
            )
            plan = solver.plan(target_nbytes)
        if not _fits(problem, plan, target_nbytes):
            return self.now_us
        return min(self.now_us, simulate(problem, plan).time_us)


def _freed(subject: Subject) -> Lowered:
    """The graph, in which what the user's checkpoints would make again may be kept."""
    lowered, checkpointed = subject.lowered, subject.constraints.checkpointed
    values = {
        name: replace(value, must_recompute=value.must_recompute and name not in checkpointed)
        for name, value in lowered.graph.values.items()
    }
    return replace(lowered, graph=replace(lowered.graph, values=values))


def _is_free(problem: Problem) -> bool:
    return not any(value.must_recompute for value in problem.values)


def _fits(problem: Problem, plan: Plan, budget_nbytes: int) -> bool:
    return simulate(without_spare_states(problem, plan), plan).peak_nbytes <= budget_nbytes
