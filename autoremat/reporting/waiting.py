"""Values that wait elsewhere: one graph's part of the report, and how it is told.

Enters: a problem and a plan with copies. Leaves: frozen values, and sentences. Imports no torch.
Guarantees: times and bytes are those of `autoremat_solver.simulate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoremat_solver import Plan, Problem, StepKind
from autoremat_solver.simulate import copy_times

from autoremat.reporting.fields import check_fields
from autoremat.units import format_nbytes, format_us

_SHOWN = 3  # values of the summary
TOGETHER = "Wait together"  # name of a fact


@dataclass(frozen=True, slots=True)
class Trip:
    """One value's way to the host and back; times are those of the plan, from the step's begin.

    Attributes:
        value: its name.
        nbytes: its size.
        sent_us: when the copy to the host begins.
        gone_us: when that has arrived, and the value takes no memory of the device any more.
        returns_us: when the copy back begins.
        back_us: when that has arrived.
        read_by: the operation that reads it then.
    """

    value: str
    nbytes: int
    sent_us: float
    gone_us: float
    returns_us: float
    back_us: float
    read_by: str

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)

    def __str__(self) -> str:
        """Which value, and from when to when it is away."""
        away = f"away from {format_us(self.gone_us)} to {format_us(self.returns_us)}"
        return f"{self.value} ({format_nbytes(self.nbytes)}) {away}, for `{self.read_by}`"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Of a graph whose values may leave the device, what does.

    Attributes:
        where: they wait, and how fast copies are, in words.
        host_nbytes: what may wait at once.
        host_peak_nbytes: the most that does.
        in_flight_nbytes: the most that is on its way at once: it takes memory of the device too.
        stall_us: of the predicted time, what computing waits for copies.
        alone_time_us: duration of the plan found for the same budget without any copy; None where
            none was looked for, as with a stored plan.
        alone_peak_nbytes: the peak of that plan, above the budget where none fits.
        alone_fits: whether it is within.
        trips: of the values that leave, in their order.
        failed: why no plan with copies was compared, though it was tried; "" if one was.
    """

    where: str
    host_nbytes: int
    host_peak_nbytes: int
    in_flight_nbytes: int
    stall_us: float
    alone_time_us: float | None
    alone_peak_nbytes: int
    alone_fits: bool
    trips: tuple[Trip, ...] = ()
    failed: str = ""

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)

    @property
    def nbytes(self) -> int:
        """Bytes that are copied each way."""
        return sum(trip.nbytes for trip in self.trips)

    def text(self, baseline_time_us: float) -> str:
        """What leaves, when it is back, what that takes, and recompute alone beside it.

        Args:
            baseline_time_us: what the graph takes without a plan.
        """
        alone = self._alone(baseline_time_us)
        if not self.trips:
            if self.failed:
                alone = f"plans with copies could not be compared ({self.failed})"
            return f"nothing, though values may wait {self.where}{alone and f': {alone}'}"
        values = "; ".join(map(str, self.trips[:_SHOWN]))
        more = "; ..." if len(self.trips) > _SHOWN else ""
        room = f"{format_nbytes(self.host_peak_nbytes)} of {format_nbytes(self.host_nbytes)}"
        return (
            f"{format_nbytes(self.nbytes)} each way {self.where}; {format_us(self.stall_us)} of "
            f"waiting, at most {format_nbytes(self.in_flight_nbytes)} on the way at once and "
            f"{room} waiting{alone and f'; {alone}'}; {_counted(len(self.trips))}: {values}{more}"
        )

    def _alone(self, baseline_time_us: float) -> str:
        if self.alone_time_us is None:
            return ""
        if not self.alone_fits:
            return f"recompute alone needs {format_nbytes(self.alone_peak_nbytes)}"
        if baseline_time_us <= 0:
            return "recompute alone fits as well"
        extra = round(100 * (self.alone_time_us / baseline_time_us - 1), 1) + 0.0
        return f"recompute alone is {extra:+.1f} % time"


def _counted(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"


def trips_of(problem: Problem, plan: Plan) -> Iterator[Trip]:
    """Each value's way, in the order in which they leave."""
    times = {
        step: (round(begins_us, 3), round(ends_us, 3))
        for step, begins_us, ends_us in copy_times(problem, plan)
    }
    for step in times:
        if plan.steps[step].kind is StepKind.OFFLOAD:
            value = plan.steps[step].target
            back = next(s for s in times if s > step and _is(plan, s, StepKind.RELOAD, value))
            yield Trip(
                value,
                problem.value_by_name[value].nbytes,
                *times[step],
                *times[back],
                read_by=plan.steps[_read_after(problem, plan, back)].target,
            )


def _is(plan: Plan, step: int, kind: StepKind, value: str) -> bool:
    return plan.steps[step].kind is kind and plan.steps[step].target == value


def _read_after(problem: Problem, plan: Plan, step: int) -> int:
    """The first operation behind a step that reads the value which that brings back."""
    value = plan.steps[step].target
    return next(
        number
        for number in range(step + 1, len(plan.steps))
        if plan.steps[number].is_run
        and value in problem.op_by_name[plan.steps[number].target].inputs
    )


def in_flight_nbytes(problem: Problem, plan: Plan) -> int:
    """The most that has begun to leave or to come back, and that nobody has waited for."""
    sizes, most, under_way = problem.value_by_name, 0, dict[tuple[StepKind, str], int]()
    for step in plan.steps:
        if step.kind in (StepKind.OFFLOAD, StepKind.RELOAD):
            under_way[step.kind, step.target] = sizes[step.target].nbytes
        elif step.kind is StepKind.RELEASE:
            del under_way[StepKind.OFFLOAD, step.target]
        for read in problem.op_by_name[step.target].inputs if step.is_run else (step.target,):
            if step.kind is not StepKind.RELOAD:
                under_way.pop((StepKind.RELOAD, read), None)
        most = max(most, sum(under_way.values()))
    return most
