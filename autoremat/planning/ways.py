"""The plans that a graph could have beside others, in numbers.

Enters: a graph, and what is held beside it. Leaves: `Way`s from what keeps least for the backward
to what recomputes nothing. Guarantees: both ends are there, and what lies between is the solver's;
ranks of a job that ask the same get the same ways, however much each search was cut short.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from autoremat_solver import OffloadSolver, Plan, Problem, Solver, simulate
from autoremat_solver.effort import CutOff
from autoremat_solver.policies import recompute_all
from autoremat_solver.simulate import instance_spans

from autoremat.ask.options import Setting
from autoremat.planning.figures import given_away_nbytes, given_away_of, shared_out
from autoremat.planning.found_before import answer
from autoremat.planning.identity import fingerprint
from autoremat.planning.nesting import Beside, placed
from autoremat.planning.offloaded import movable
from autoremat.planning.sharing import Way
from autoremat.planning.simulated import simulated_peaks
from autoremat.problem.lower import as_written
from autoremat.problem.shell import LOSS_BOUNDARY
from autoremat.problem.subject import Subject

_LIMITS = 9  # to what is kept, at most
_EFFORT = 0.3  # of each solve: what is chosen in the end is searched for with all of it
_LEFT_OUT = ("quicken smallest",)  # what is refused beside the others is not what will run
_BOUND = 0.05  # of the usual effort for bounds: they only say whether it is worth while to go on
_GOOD_ENOUGH = 0.005  # a gap that says no more of how to divide a budget than none


@dataclass(frozen=True)
class _Found:
    """Ways that were found, as numbers."""

    ways: list[tuple[int, int, int, float, int, int]]


def ways_of(
    subject: Subject,
    found: Beside,
    kept_nbytes: int,
    budget_nbytes: int,
    setting: Setting,
    *,
    searches: int = _LIMITS,
) -> tuple[Way, ...]:
    """Ways to run a graph, the leanest first.

    Args:
        subject: the graph alone.
        found: what will be held beside it, about.
        kept_nbytes: what it will keep from forward to backward, about.
        budget_nbytes: of the whole step.
        setting: how it is planned.
        searches: how many there are at most, each with a limit of its own to what is kept; few
            are near `kept_nbytes`.
    """
    problem = subject.lowered.problem
    host_nbytes = subject.host and subject.host.free_nbytes
    limits = found, kept_nbytes, budget_nbytes, searches, host_nbytes
    asked = (fingerprint(subject.joint), problem, *limits, setting.time_limit_s)

    def searched() -> _Found:
        ways = _searched(subject, found, kept_nbytes, budget_nbytes, setting, searches)
        return _Found([astuple(way) for way in ways])

    known = answer(repr(asked), _Found, searched, subject.device)
    return tuple(Way(*numbers) for numbers in known.ways)


def _searched(
    subject: Subject,
    found: Beside,
    kept_nbytes: int,
    budget_nbytes: int,
    setting: Setting,
    searches: int,
) -> tuple[Way, ...]:
    cut_off = CutOff(setting.time_limit_s)
    problem = subject.lowered.problem
    leanest, richest = (way_of(subject, p(problem)) for p in (recompute_all, as_written))
    ways = [leanest, richest]
    solved: list[tuple[int, int]] = []  # limits, and what the fastest plan within each keeps
    least_nbytes = least_crossing(subject, leanest)
    limits = _limits(least_nbytes, richest.crossing_nbytes, kept_nbytes)[:searches]
    highest = max(limits)  # what is found within it answers all others that it does not exceed
    for limit_nbytes in [highest, *(limit for limit in limits if limit != highest)]:
        if cut_off.is_over:
            break
        if not any(least <= limit_nbytes <= limit for limit, least in solved):
            new = _fastest(subject, found, limit_nbytes, budget_nbytes, cut_off)
            ways += new
            solved.append((limit_nbytes, new[-1].crossing_nbytes))
    return tuple(sorted(set(ways), key=astuple))


def least_crossing(subject: Subject, leanest: Way) -> int:
    """About what a graph has to keep on the device, where what may leave does.

    Args:
        subject: the graph.
        leanest: what keeps the least of it without copies.
    """
    if subject.host is None:
        return leanest.crossing_nbytes
    problem = subject.lowered.problem
    plan, may_leave, sizes = recompute_all(problem), movable(subject), problem.value_by_name
    boundary = plan.place_of(LOSS_BOUNDARY)
    spans = instance_spans(problem, plan)
    leaving = {name for name, born, last in spans if born < boundary < last and name in may_leave}
    leaving_nbytes = sum(sizes[name].nbytes for name in leaving)
    least_nbytes = leanest.crossing_nbytes - min(leaving_nbytes, subject.host.free_nbytes)
    return max(leanest.passed_nbytes, least_nbytes)


def _limits(least_nbytes: int, most_nbytes: int, kept_nbytes: int) -> list[int]:
    """What a graph may keep at most, in even steps: first what it will keep about, then others.

    They are solved in this order but for the highest, which comes before them: a short time limit
    may leave it alone.
    """
    steps = [n * (most_nbytes - least_nbytes) // (_LIMITS - 1) for n in range(_LIMITS - 1)]
    spread = [least_nbytes + step for step in steps]
    return sorted({kept_nbytes, *spread}, key=lambda limit: abs(limit - kept_nbytes))


def way_of(subject: Subject, plan: Plan) -> Way:
    """A plan of a graph, as the simulator sees it."""
    problem = subject.lowered.problem
    peak_nbytes = simulated_peaks(subject.lowered, plan).nbytes
    forward_nbytes, backward_nbytes = shared_out(problem, plan, peak_nbytes, Beside())
    time_us = simulate(problem, plan).time_us
    kept_nbytes = crossing_nbytes(problem, plan)
    passed_nbytes = kept_nbytes - crossing_nbytes(given_away_of(subject, problem), plan)
    gone_nbytes = given_away_nbytes(subject, problem, plan)
    return Way(kept_nbytes, forward_nbytes, backward_nbytes, time_us, passed_nbytes, gone_nbytes)


def crossing_nbytes(problem: Problem, plan: Plan) -> int:
    """Bytes that live between the forward and the backward of a plan."""
    boundary = problem.op_by_name[LOSS_BOUNDARY]
    own = boundary.workspace_nbytes + sum(problem.value_by_name[n].nbytes for n in boundary.outputs)
    live_nbytes = simulate(problem, plan).live_nbytes[plan.place_of(LOSS_BOUNDARY)]
    return live_nbytes - own - problem.resident_nbytes


def room_beside(subject: Subject, found: Beside, kept_nbytes: int, budget_nbytes: int) -> int:
    """What a graph that keeps so much leaves of the budget to those after it."""
    taken_nbytes = subject.lowered.shell.resident_nbytes + found.held_nbytes + kept_nbytes
    return max(0, budget_nbytes - taken_nbytes)


def _plan(subject: Subject, budget_nbytes: int, time_limit_s: float) -> Plan:
    """The fastest plan found of a graph that is placed beside others."""
    problem = subject.lowered.problem
    if subject.host is not None:
        host_nbytes, may_leave = subject.host.free_nbytes, movable(subject)
        sends = OffloadSolver(
            problem, host_nbytes, time_limit_s=time_limit_s, effort=_EFFORT, movable=may_leave
        )
        return sends.solve(budget_nbytes).plan
    solver = Solver(
        problem,
        time_limit_s=time_limit_s,
        effort=_EFFORT,
        bound_effort=_BOUND,
        without=_LEFT_OUT,
        good_enough=_GOOD_ENOUGH,
    )
    return solver.plan(budget_nbytes)


def _fastest(
    subject: Subject, found: Beside, kept_nbytes: int, budget_nbytes: int, cut_off: CutOff
) -> list[Way]:
    """The fastest plan that keeps at most so much.

    If none can beside the others, the smallest one, and the fastest beside nothing: the last runs
    of a step find less beside them than the first in their backward.
    """
    ways: list[Way] = []
    beside = [found, found.throughout] if found.passing_nbytes else [found]
    for held in (*beside, Beside()):
        room_nbytes = room_beside(subject, held, kept_nbytes, budget_nbytes)
        lowered = placed(subject.lowered, held, room_nbytes)
        plan = _plan(replace(subject, lowered=lowered), budget_nbytes, cut_off.left_s)
        ways.append(way_of(subject, plan))
        peak_nbytes = subject.lowered.shell.resident_nbytes + ways[-1].peak_beside(found)
        if max(simulate(lowered.problem, plan).peak_nbytes, peak_nbytes) <= budget_nbytes:
            break
    return ways
