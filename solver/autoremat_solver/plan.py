"""The answer: an execution order with repeats, and what running it takes.

Enters: nothing but names and numbers. Leaves: frozen `Plan`, `Timeline` and `Solution`.
What a plan saves and recomputes follows from its schedule; it is never stored beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Plan:
    """The operations of one step in the order in which they run; a repeat is a recompute.

    A read sees the latest instance of a value, made by the latest run of its producer before
    it. The exception are the problem's `outputs`: a read of those sees the first instance.
    An instance is freed after its last read; the first instance of an output lives to the end.
    """

    schedule: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes while each step of a schedule runs, resident bytes included, and total time."""

    live_nbytes: tuple[int, ...]
    time_us: float

    @property
    def peak_nbytes(self) -> int:
        """The highest live bytes of any step; 0 for an empty schedule."""
        return max(self.live_nbytes, default=0)

    @property
    def peak_step(self) -> int:
        """Index of the first step that reaches the peak."""
        return self.live_nbytes.index(self.peak_nbytes)


class Status(StrEnum):
    """How far the solver got; each value is the sentence that a user reads."""

    OPTIMAL = "optimal: no plan of the model is faster"
    FEASIBLE = "feasible: within the budget, with a proven gap"
    TIME_LIMIT = "time limit: the best plan found so far, within the budget"
    UNPROVEN = "unproven: within the budget; what was proven of it turned out wrong and is dropped"
    INFEASIBLE = "infeasible: no plan found fits the budget; this is the one with the smallest peak"


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan with its certificate.

    Attributes:
        plan: the best plan found; with status INFEASIBLE the one of the smallest peak.
        timeline: what `simulate` says of it.
        status: see `Status`.
        bound_us: proven: no plan within the budget (of the class that `bounds` states) is faster;
            0 with status UNPROVEN.
        floor_nbytes: proven: no plan (of that class) has a smaller peak.
        method: which strategy found the plan.
        seconds: wall-clock time of the solve.
    """

    plan: Plan
    timeline: Timeline
    status: Status
    bound_us: float
    floor_nbytes: int
    method: str
    seconds: float

    @property
    def gap(self) -> float:
        """How much slower than the bound the plan is at most, as a fraction of the bound."""
        if self.bound_us <= 0:
            return 0.0 if self.timeline.time_us <= 0 else float("inf")
        # A bound may be above the time by noise (`certificate`), and by no more.
        return max(0.0, self.timeline.time_us / self.bound_us - 1.0)
