"""What is live at each step of a plan: the report's memory timeline.

Enters: a problem, a plan of it, and what is known of each operation beside its numbers. Leaves: a
`MemoryTimeline` of steps and spans. Guarantees: at every step, resident bytes, the spans that are
live and the step's workspace add up to the live bytes that `autoremat_solver.simulate` states;
a timeline for which they do not is refused, made or read. What the steps take and wait adds up to
the time that it states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from autoremat_solver import Phase, Plan, Problem, StepKind, simulate
from autoremat_solver.simulate import backward_start, occupied_spans, step_times

from autoremat.reporting.fields import ReportError, check_fields

_DIGITS = 3  # of microseconds: a nanosecond is more than any clock here tells


class SpanKind(StrEnum):
    """What an instance of a value is to the step."""

    OUTPUT = "output"
    """Returned to the training loop: lives to the end of the step."""
    SAVED = "saved"
    """Made by the forward, read by the backward."""
    ACTIVATION = "activation"
    """Made by the forward and freed in it."""
    RECOMPUTED = "recomputed"
    """A value of the forward, made in the backward."""
    FETCHED = "fetched"
    """Back from where it waited."""
    GRADIENT = "gradient"
    """Made by the backward's own operations."""


@dataclass(frozen=True, slots=True)
class Step:
    """One run of one operation, or what computing does for a copy.

    Attributes:
        name: of the operation, unique but for its repeats.
        op: operator, such as "mm"; of a copy what is done for it: "offload", "release", "reload".
        module: path of the module that it belongs to, or "".
        source: the user's line, "model.py:88", or "".
        is_backward: whether it runs after the backward has begun.
        is_recompute: whether it has run before in this step.
        is_estimated: whether its time is priced by bytes, and FLOPs or the link, not measured.
        time_us: duration.
        workspace_nbytes: bytes live only while it runs.
        stall_us: how long computing waits for a copy before it.
    """

    name: str
    op: str
    module: str
    source: str
    is_backward: bool
    is_recompute: bool
    is_estimated: bool
    time_us: float
    workspace_nbytes: int
    stall_us: float = 0.0

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Span:
    """One instance of a value.

    Attributes:
        value: its name.
        kind: what it is to the step.
        nbytes: size.
        born: index of the step that makes it.
        last: index of the last step at which it is live.
    """

    value: str
    kind: SpanKind
    nbytes: int
    born: int
    last: int

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """All that is live in one graph of the step, step by step.

    Attributes:
        resident_nbytes: live all the time, what other graphs of the step keep alive included.
        steps: in the order in which they run.
        spans: every instance that takes memory, in no particular order.
        live_nbytes: per step, as simulated.
        baseline_live_nbytes: the same for the step without recompute.
        baseline_step_us: duration of each step without recompute.
    """

    resident_nbytes: int
    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    live_nbytes: tuple[int, ...]
    baseline_live_nbytes: tuple[int, ...] = ()
    baseline_step_us: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuses a timeline that does not add up."""
        check_fields(self)
        for steps, expected in (
            (len(self.live_nbytes), len(self.steps)),
            (len(self.baseline_step_us), len(self.baseline_live_nbytes)),
        ):
            if steps != expected:
                raise ReportError(f"A timeline has numbers for {steps} of {expected} steps.")
        for step, (live, found) in enumerate(zip(self.live_nbytes, self._added_up(), strict=True)):
            if live != found:
                raise ReportError(
                    f"The timeline contradicts itself at step {step} "
                    f"({self.steps[step].name!r:.80}): {live} bytes are live, but resident bytes, "
                    f"spans and workspace add up to {found}."
                )

    @property
    def peak_nbytes(self) -> int:
        """The highest live bytes of any step."""
        return max(self.live_nbytes, default=self.resident_nbytes)

    @property
    def peak_step(self) -> int:
        """Index of the first step that reaches the peak; 0 if there is none."""
        return self.live_nbytes.index(self.peak_nbytes) if self.live_nbytes else 0

    @property
    def backward_start(self) -> int:
        """Index of the first backward step; the number of steps if there is none."""
        found = (index for index, step in enumerate(self.steps) if step.is_backward)
        return next(found, len(self.steps))

    def _added_up(self) -> list[int]:
        change = [0] * (len(self.steps) + 1)
        for span in self.spans:
            if not span.born <= span.last < len(self.steps):
                raise ReportError(
                    f"The timeline contradicts itself: {span.value!r:.80} lives from step "
                    f"{span.born} to step {span.last} of {len(self.steps)}."
                )
            change[span.born] += span.nbytes
            change[span.last + 1] -= span.nbytes
        live = accumulate(change[:-1], initial=self.resident_nbytes)
        next(live)
        return [n + step.workspace_nbytes for n, step in zip(live, self.steps, strict=True)]


@dataclass(frozen=True, slots=True)
class Place:
    """What is known of an operation beside its numbers; see `Step`."""

    op: str = ""
    module: str = ""
    source: str = ""
    is_estimated: bool = False


def timeline_of(
    problem: Problem,
    plan: Plan,
    place_of: Callable[[str], Place] = lambda name: Place(name),
    baseline: tuple[Problem, Plan] | None = None,
) -> MemoryTimeline:
    """The memory timeline of a plan.

    Args:
        problem: the step.
        plan: one of its plans.
        place_of: where an operation of the problem comes from.
        baseline: the step without a plan, where that is not each operation of the problem once.
    """
    other, once = baseline or (problem, Plan.of(op.name for op in problem.ops))
    return MemoryTimeline(
        resident_nbytes=problem.resident_nbytes,
        steps=_steps(problem, plan, place_of),
        spans=_spans(problem, plan),
        live_nbytes=simulate(problem, plan).live_nbytes,
        baseline_live_nbytes=simulate(other, once).live_nbytes,
        baseline_step_us=tuple(
            round(other.op_by_name[step.target].time_us, _DIGITS) for step in once.steps
        ),
    )


def _steps(problem: Problem, plan: Plan, place_of: Callable[[str], Place]) -> tuple[Step, ...]:
    start = backward_start(problem, plan)
    steps = []
    for index, (step, times) in enumerate(zip(plan.steps, step_times(problem, plan), strict=True)):
        stall_us, time_us = (round(us, _DIGITS) for us in times)
        maker = problem.op_by_name[step.target] if step.is_run else problem.producer_of[step.target]
        place = place_of(maker.name)
        steps.append(
            Step(
                name=maker.name if step.is_run else f"{step.kind} {step.target}",
                op=place.op if step.is_run else str(step.kind),
                module=place.module,
                source=place.source,
                is_backward=index >= start,
                is_recompute=step.kind is StepKind.RECOMPUTE,
                is_estimated=not step.is_run or place.is_estimated,
                time_us=time_us,
                workspace_nbytes=maker.workspace_nbytes if step.is_run else 0,
                stall_us=stall_us,
            )
        )
    return tuple(steps)


def _spans(problem: Problem, plan: Plan) -> tuple[Span, ...]:
    start = backward_start(problem, plan)
    outputs = frozenset(problem.outputs)
    spans = []
    for name, born, last in occupied_spans(problem, plan):
        nbytes = problem.value_by_name[name].nbytes
        if nbytes:
            is_own = problem.producer_of[name].phase is Phase.BACKWARD
            kind = _kind(is_own, name in outputs, born, last, start)
            if plan.steps[born].kind is StepKind.RELOAD:
                kind = SpanKind.FETCHED
            spans.append(Span(name, kind, nbytes, born, last))
    return tuple(spans)


def _kind(is_of_backward: bool, is_output: bool, born: int, last: int, start: int) -> SpanKind:
    if is_of_backward:
        return SpanKind.GRADIENT
    if born >= start:
        return SpanKind.RECOMPUTED
    if is_output:
        return SpanKind.OUTPUT
    return SpanKind.SAVED if last >= start else SpanKind.ACTIVATION
