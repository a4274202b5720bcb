"""Peak against time: what other budgets would cost.

Enters: a graph after lowering, its solver, the plan that was chosen. Leaves: `CurvePoint`s, by the
simulator's peaks. Guarantees: they follow from one problem, so they can be compared with each
other, and the chosen plan is one of them.
"""

from __future__ import annotations

from autoremat_solver import Solution, Solver, simulate

from autoremat.choose import Choice, Subject
from autoremat.policy import parse_policy
from autoremat.reporting import CurvePoint, PointKind
from autoremat.steering import policy_plan

_STRATEGIES = (
    "save-all",
    "every-layer",
    "every-2",
    "sqrt",
    "selective-attention",
    "recompute-all",
)


def curve_of(
    subject: Subject, choice: Choice, points: int, time_limit_s: float
) -> tuple[CurvePoint, ...]:
    """The plans of a few budgets, the classic strategies, and the chosen plan.

    Args:
        subject: the graph.
        choice: the plan that the graph got.
        points: budgets, the smallest and the largest peak included; at least 2.
        time_limit_s: for all of them.
    """
    problem = subject.lowered.problem
    chosen = simulate(problem, choice.solution.plan)
    found = [_planned(s) for s in Solver(problem, time_limit_s=time_limit_s).pareto(points)]
    return (
        *(point for point in found if point.peak_nbytes != chosen.peak_nbytes),
        *_strategies(subject),
        CurvePoint(chosen.peak_nbytes, chosen.time_us, "this plan", PointKind.CHOSEN),
    )


def _strategies(subject: Subject) -> list[CurvePoint]:
    """Those that say something about this graph: without layers, "every layer" saves all."""
    found: dict[tuple[int, float], CurvePoint] = {}
    for name in _STRATEGIES:
        plan, _ = policy_plan(subject, parse_policy(name))
        timeline = simulate(subject.lowered.problem, plan)
        point = (timeline.peak_nbytes, timeline.time_us)
        found.setdefault(point, CurvePoint(*point, name, PointKind.STRATEGY))
    return list(found.values())


def _planned(solution: Solution) -> CurvePoint:
    timeline = solution.timeline
    return CurvePoint(timeline.peak_nbytes, timeline.time_us, solution.method, PointKind.PLAN)
