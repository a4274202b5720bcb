"""Peak against time: what other budgets would cost.

Enters: a graph after lowering, its solver, the plan that was chosen. Leaves: `CurvePoint`s, by the
simulator's peaks. Guarantees: they follow from one problem, so they can be compared with each
other, and the chosen plan is one of them.
"""

from __future__ import annotations

from autoremat_solver import Solution, Solver, simulate
from autoremat_solver.plan_document import without_recompute

from autoremat.choose import Choice, Subject
from autoremat.reporting import CurvePoint, PointKind


def curve_of(
    subject: Subject, solver: Solver, choice: Choice, points: int, time_limit_s: float
) -> tuple[CurvePoint, ...]:
    """The plans of a few budgets beside the chosen one and the step without recompute.

    Args:
        subject: the graph.
        solver: of its problem; what it knows already is used.
        choice: the plan that the graph got.
        points: budgets, the smallest and the largest peak included; at least 2.
        time_limit_s: for all of them.
    """
    problem = subject.lowered.problem
    baseline = without_recompute(problem)
    chosen = simulate(problem, choice.solution.plan)
    found = [_planned(solution) for solution in solver.pareto(points, time_limit_s=time_limit_s)]
    return (
        *(point for point in found if point.peak_nbytes != chosen.peak_nbytes),
        CurvePoint(baseline.peak_nbytes, baseline.time_us, "save all", PointKind.STRATEGY),
        CurvePoint(chosen.peak_nbytes, chosen.time_us, "this plan", PointKind.CHOSEN),
    )


def _planned(solution: Solution) -> CurvePoint:
    timeline = solution.timeline
    return CurvePoint(timeline.peak_nbytes, timeline.time_us, solution.method, PointKind.PLAN)
