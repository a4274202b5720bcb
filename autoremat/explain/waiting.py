"""What leaves the device by a plan, what that would save, and why a peak stays in spite of it.

Enters: a stated graph and its `Choice`. Leaves: the report's `Waiting`, or a sentence.
Guarantees: times and bytes are those of `simulate`.
"""

from __future__ import annotations

from dataclasses import replace

from autoremat_solver import OffloadSolver, simulate
from autoremat_solver.simulate import instance_spans

from autoremat.host.memory import HostMemory
from autoremat.planning.choice import Choice, as_chosen
from autoremat.planning.offloaded import WORTH_COPIES, movable
from autoremat.problem.lower import without_spare_states
from autoremat.problem.subject import Subject
from autoremat.reporting.waiting import Waiting, in_flight_nbytes, trips_of
from autoremat.units import format_nbytes

_EFFORT = 0.25  # of the usual search, for what is only told


def waiting_of(subject: Subject, choice: Choice) -> Waiting | None:
    """What of a graph waits elsewhere; None if nothing may."""
    host, alone, problem = subject.host, choice.alone, subject.lowered.problem
    solution = choice.solution
    if host is None or problem.link is None or (alone is None and not solution.plan.offloaded):
        return None
    return Waiting(
        where=host.about(problem.link),
        host_nbytes=host.free_nbytes,
        host_peak_nbytes=solution.timeline.host_peak_nbytes,
        in_flight_nbytes=in_flight_nbytes(problem, solution.plan),
        stall_us=solution.timeline.stall_us,
        alone_time_us=None if alone is None else alone.time_us,
        alone_peak_nbytes=0 if alone is None else alone.peak_nbytes,
        alone_fits=alone is not None and alone.fits,
        trips=tuple(trips_of(problem, solution.plan)),
        failed="" if alone is None else alone.failed,
    )


def what_waiting_saves(
    subject: Subject, choice: Choice, host: HostMemory, time_limit_s: float
) -> str | None:
    """What a plan with copies takes at the peak of one without; None where that saves little.

    Args:
        subject: a graph whose values may not leave.
        choice: its plan.
        host: where they could wait; its speed is known.
        time_limit_s: for the search.
    """
    plan, link = choice.solution.plan, host.speed
    if link is None or not plan.recomputed:
        return None
    subject = as_chosen(subject, choice)
    problem = replace(without_spare_states(subject.lowered.problem, plan), link=link)
    alone = simulate(problem, plan)
    solver = OffloadSolver(
        problem,
        host.free_nbytes,
        time_limit_s=time_limit_s,
        effort=_EFFORT,
        movable=movable(subject),
    )
    found, other = solver.solve(alone.peak_nbytes), solver.alone(alone.peak_nbytes)
    is_within = other.timeline.peak_nbytes <= alone.peak_nbytes
    alone_us = min(alone.time_us, other.timeline.time_us) if is_within else alone.time_us
    saved = 1 - found.timeline.time_us / alone_us
    if not found.plan.offloaded or saved < WORTH_COPIES:
        return None
    nbytes = sum(problem.value_by_name[name].nbytes for name in found.plan.offloaded)
    return (
        f"nothing; with offload= {format_nbytes(nbytes)} that wait {host.about(link)} would save "
        f"{100 * saved:.0f} % of the predicted time at this peak"
    )


def why_it_stays(subject: Subject, choice: Choice) -> str:
    """Why values that may leave do not lower a peak; "" where none may."""
    problem, solution, host = subject.lowered.problem, choice.solution, subject.host
    if host is None:
        return ""
    peak = solution.timeline.peak_step
    step = solution.plan.steps[peak]
    spans = instance_spans(problem, solution.plan)
    live = {name for name, born, last in spans if born <= peak <= last}
    op = problem.op_by_name.get(step.target)
    own = live & {*op.inputs, *op.outputs} if op and step.is_run else live & {step.target}
    may_leave = movable(subject) - set(problem.outputs)
    parts = {
        f"that `{step.target}` reads and makes": own,
        "that the step returns": (live - own) & set(problem.outputs),
        "that are no tensors of their own": live - own - set(problem.outputs) - may_leave,
    }
    named = [
        f"{format_nbytes(nbytes)} {what}"
        for what, names in parts.items()
        if (nbytes := sum(problem.value_by_name[name].nbytes for name in names))
    ]
    workspace_nbytes = op.workspace_nbytes if op and step.is_run else 0
    named += [f"{format_nbytes(workspace_nbytes)} that it works in"] if workspace_nbytes else []
    left_nbytes = sum(problem.value_by_name[n].nbytes for n in (live - own) & may_leave)
    sentence = (
        f"That is with offload: at the peak {', '.join(named) or 'nothing'} cannot leave, beside "
        "what is resident"
    )
    if not left_nbytes:
        return f"{sentence}, and nothing else is there."
    host_nbytes = solution.timeline.host_peak_nbytes
    return (
        f"{sentence}; {format_nbytes(left_nbytes)} could, and the host holds "
        f"{format_nbytes(host_nbytes)} of {format_nbytes(host.free_nbytes)}."
    )
