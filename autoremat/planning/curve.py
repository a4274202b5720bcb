"""Peak against time: what other budgets would cost.

Enters: a graph after lowering, its solver, the plan that was chosen. Leaves: `CurvePoint`s, by the
simulator's peaks, and what is not among them. Guarantees: they follow from one problem, so they
can be compared with each other; the chosen plan is one of them; no other plan of ours is slower
than what its peak would hold as well, whoever found that; where the chosen one has copies, those
without are compared with each other. There are plans with copies where values may wait elsewhere.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autoremat_solver import OffloadSolver, Plan, Solution, Solver, simulate

from autoremat.ask.policy import parse_policy
from autoremat.planning.asked import policy_plan
from autoremat.planning.choice import Choice, as_chosen
from autoremat.planning.offloaded import is_worthless, movable
from autoremat.planning.peers import as_torch
from autoremat.problem.lower import without_spare_states
from autoremat.problem.subject import Subject
from autoremat.progress import Progress, during
from autoremat.reporting import CurvePoint, PointKind

_STRATEGIES = (
    "save-all",
    "every-layer",
    "every-2",
    "sqrt",
    "selective-attention",
    "recompute-all",
)
_TORCH_BUDGETS = (1.0, 0.5, 0.25, 0.75)  # the most telling first: time may not reach the others
_PLANS_SHARE = 0.6  # of the time, for our own plans; torch's settings get what is left
_AWAY_SHARE = 0.3  # where plans whose values may wait elsewhere get what is left


class Curve(NamedTuple):
    """Peaks and times of plans.

    Attributes:
        points: in no particular order.
        left_out: what was asked for and is not among them, and why, one sentence each.
    """

    points: tuple[CurvePoint, ...] = ()
    left_out: tuple[str, ...] = ()


def curve_of(subject: Subject, choice: Choice, points: int, time_limit_s: float) -> Curve:
    """The plans of a few budgets, the classic strategies, torch's settings, and the chosen plan.

    Args:
        subject: the graph.
        choice: the plan that the graph got.
        points: budgets, the smallest and the largest peak included; at least 2, or 0 for no curve.
        time_limit_s: for all of them; what it does not reach is left out.
    """
    if not points:
        return Curve()
    deadline = time.monotonic() + time_limit_s
    chosen = as_chosen(subject, choice)
    point = _point(chosen, choice.solution.plan, "this plan", PointKind.CHOSEN)
    with during("curve") as progress:
        share = _PLANS_SHARE if subject.host is None else _AWAY_SHARE
        solutions, left_out = _solved(subject, points, share * time_limit_s, progress)
        found = [_point(subject, s.plan, s.method, PointKind.PLAN) for s in solutions]
        others = _strategies(subject)
        torchs, unreached = _torch_settings(subject, deadline)
        budgets = sorted(s.timeline.peak_nbytes for s in solutions)
        away, late = _that_may_wait(subject, budgets, deadline)
    others += torchs
    found += [p for p in away if p.kind is PointKind.PLAN]
    chosen_waits = bool(choice.solution.plan.offloaded)
    known = unbeaten((*found, *others) if chosen_waits else (point, *found, *others))
    ours = [p for p in known if p.kind is PointKind.PLAN]
    ours += [p for p in unbeaten((point, *known, *away)) if p.kind is PointKind.OFFLOAD]
    return Curve((*ours, *others, point), (*left_out, *late, *unreached))


def unbeaten(points: Iterable[CurvePoint]) -> list[CurvePoint]:
    """Those that no other one equals or beats in peak and time, the smallest peak first."""
    kept: list[CurvePoint] = []
    for point in sorted(points, key=lambda p: (p.peak_nbytes, p.time_us)):
        if not kept or point.time_us < kept[-1].time_us:
            kept.append(point)
    return kept


def _solved(
    subject: Subject, points: int, time_limit_s: float, progress: Progress
) -> tuple[list[Solution], list[str]]:
    """Our own plans, and a word on the budgets that the time limit did not reach."""
    solved = 0

    def count(done: int, total: int) -> None:
        nonlocal solved
        solved = done
        progress.advance(done, total, "budgets")

    solutions = Solver(subject.lowered.problem, time_limit_s=time_limit_s).pareto(
        points, progress=count
    )
    left_out = [f"{solved} of {points} budgets were solved in the time limit"]
    return list(solutions), left_out if solved < points else []


def _that_may_wait(
    subject: Subject, budgets_nbytes: Sequence[int], deadline: float
) -> tuple[list[CurvePoint], list[str]]:
    """The same budgets, and the smallest peak, where values may also wait elsewhere.

    Where none does, it is a plan like any other of ours.
    """
    host, problem = subject.host, subject.lowered.problem
    if host is None or problem.link is None:
        return [], []
    found = list[CurvePoint]()
    solver = OffloadSolver(problem, host.free_nbytes, time_limit_s=0.0, movable=movable(subject))
    asked: list[Callable[[], Solution]] = [
        functools.partial(_worthwhile, solver, nbytes) for nbytes in budgets_nbytes
    ]
    for solve in (*asked, solver.smallest_peak):
        solver.time_limit_s = deadline - time.monotonic()
        if solver.time_limit_s <= 0:
            left_out = f"{len(found)} of {len(asked) + 1} budgets with copies were solved in time"
            return found, [left_out]
        solution = solve()
        waits = bool(solution.plan.offloaded)
        label = "values may wait" if waits else solution.method
        kind = PointKind.OFFLOAD if waits else PointKind.PLAN
        found.append(_point(subject, solution.plan, label, kind))
    return found, []


def _worthwhile(solver: OffloadSolver, budget_nbytes: int) -> Solution:
    """What a budget gets: copies only where they are worth it."""
    solution, alone = solver.solve(budget_nbytes), solver.alone(budget_nbytes)
    return alone if is_worthless(solution, alone, budget_nbytes) else solution


def _strategies(subject: Subject) -> list[CurvePoint]:
    """Those that say something about this graph: without layers, "every layer" saves all."""
    found: dict[tuple[int, float], CurvePoint] = {}
    for name in _STRATEGIES:
        plan, _ = policy_plan(subject, parse_policy(name))
        point = _point(subject, plan, name, PointKind.STRATEGY)
        found.setdefault((point.peak_nbytes, point.time_us), point)
    return list(found.values())


def _torch_settings(subject: Subject, deadline: float) -> tuple[list[CurvePoint], list[str]]:
    """Torch's partitioner with and without its memory budget, each as a plan of this problem."""
    found: list[CurvePoint] = []
    why: dict[str, list[str]] = {}
    for budget in _TORCH_BUDGETS:
        label = "torch.compile" if budget == 1.0 else f"torch, budget {budget:g}"
        if time.monotonic() >= deadline:
            why.setdefault("the time limit was over", []).append(label)
            continue
        try:
            plan = as_torch(subject, budget)
        except Exception as error:  # a comparison that torch cannot make is no reason to fail
            why.setdefault(f"{type(error).__name__}: {error}", []).append(label)
            continue
        found.append(_point(subject, plan, label, PointKind.TORCH))
    return found, [f"without {'; '.join(labels)} ({reason})" for reason, labels in why.items()]


def _point(subject: Subject, plan: Plan, label: str, kind: PointKind) -> CurvePoint:
    """What the report's own timeline says of a plan."""
    problem = subject.lowered.problem
    timeline = simulate(without_spare_states(problem, plan), plan)
    return CurvePoint(timeline.peak_nbytes, timeline.time_us, label, kind)
