"""The answer: the steps of a training step in their order, and what running them takes.

Enters: nothing but names and numbers. Leaves: frozen `Plan`, `Timeline` and `Solution`.
What a plan saves and sends away follows from its steps; it is never stored beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class StepKind(StrEnum):
    """What one step of a plan does with its target."""

    FIRST_RUN = "first run"
    """Runs an operation that did not run before."""
    RECOMPUTE = "recompute"
    """Runs an operation again: later reads see what it makes now."""
    OFFLOAD = "offload"
    """Begins to copy the latest instance of a value to the host; computing goes on."""
    RELEASE = "release"
    """Waits until that copy has arrived there: from here on the instance is not needed for it."""
    RELOAD = "reload"
    """Begins to copy a value back, into a new instance; the first read of that waits for it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan.

    Attributes:
        kind: what is done.
        target: to what: the name of an operation that runs, or of a value that is copied.
    """

    kind: StepKind
    target: str

    @property
    def is_run(self) -> bool:
        """Whether an operation runs; else a value is copied to the host or back."""
        return self.kind in (StepKind.FIRST_RUN, StepKind.RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one training step in the order in which they run.

    A read sees the latest instance of a value, made by the latest run of its producer before
    it. The exception are the problem's `outputs`: a read of those sees the first instance.
    An instance is freed after its last read; the first instance of an output lives to the end.

    An instance may wait on the host. Its RELEASE and its OFFLOAD count as reads of it, its RELOAD
    makes the next instance of the value. Which bytes are live therefore follows from the order of
    the steps alone, however fast the link is: a slow link costs time.
    """

    steps: tuple[Step, ...]

    @classmethod
    def of(cls, schedule: Iterable[str]) -> Plan:
        """The plan that runs operations in this order: each repeat is a recompute."""
        seen: set[str] = set()
        steps = []
        for name in schedule:
            steps.append(Step(StepKind.RECOMPUTE if name in seen else StepKind.FIRST_RUN, name))
            seen.add(name)
        return cls(tuple(steps))

    @property
    def schedule(self) -> tuple[str, ...]:
        """The operations that run; of a plan that `check` accepts, `of` makes the plan of it.

        Of a plan that offloads it is what is left without that.
        """
        return tuple(step.target for step in self.steps if step.is_run)

    def place_of(self, op: str) -> int:
        """Index of the step that runs an operation first.

        Raises:
            ValueError: if none does.
        """
        return self.steps.index(Step(StepKind.FIRST_RUN, op))

    @property
    def recomputed(self) -> frozenset[str]:
        """The operations that run again."""
        return frozenset(s.target for s in self.steps if s.kind is StepKind.RECOMPUTE)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The values that are copied to the host, in order, each as often as it is."""
        return tuple(s.target for s in self.steps if s.kind is StepKind.OFFLOAD)


@dataclass(frozen=True, slots=True)
class Timeline:
    """What running a plan takes.

    Attributes:
        live_nbytes: per step, live bytes while it runs, resident bytes included.
        time_us: from begin to end.
        stall_us: of these, what computing waits for copies.
        host_nbytes: per step, bytes held on the host; empty for a plan that offloads nothing.
    """

    live_nbytes: tuple[int, ...]
    time_us: float
    stall_us: float = 0.0
    host_nbytes: tuple[int, ...] = ()

    @property
    def host_peak_nbytes(self) -> int:
        """The most bytes that the host holds at any step."""
        return max(self.host_nbytes, default=0)

    @property
    def peak_nbytes(self) -> int:
        """The highest live bytes of any step; 0 for a plan without steps."""
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
        tried: the stages of the search that ran for it.
        left_out: those that did not, as the time limit was over before.
    """

    plan: Plan
    timeline: Timeline
    status: Status
    bound_us: float
    floor_nbytes: int
    method: str
    seconds: float
    tried: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """How much slower than the bound the plan is at most, as a fraction of the bound."""
        if self.bound_us <= 0:
            return 0.0 if self.timeline.time_us <= 0 else float("inf")
        # A bound may be above the time by noise (`certificate`), and by no more.
        return max(0.0, self.timeline.time_us / self.bound_us - 1.0)
