"""What the solver found as plain data for JSON, and what is live at a plan's peak.

Enters: a problem, its name, and a `Solution`. Leaves: dicts of strings, numbers and lists only,
with sizes in bytes and times in the problem's own unit; an infinite gap is None, so that the
result is JSON of any dialect. It adds no figure that `simulate` and the solution do not state.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from autoremat_solver.plan import Plan, Solution, Timeline
from autoremat_solver.problem import Problem
from autoremat_solver.simulate import occupied_spans, simulate

PLAN_SCHEMA = "autoremat.solver_plan/1"
CURVE_SCHEMA = "autoremat.solver_curve/1"


def without_recompute(problem: Problem) -> Timeline:
    """Every operation run once, in the problem's order: the baseline of all comparisons.

    It is the step as it was written. A problem with must_recompute values has no plan like it.
    """
    return simulate(problem, Plan.of(op.name for op in problem.ops))


@dataclass(frozen=True, slots=True)
class PeakStep:
    """What is live at the first step that reaches a plan's peak.

    Attributes:
        op: the operation that runs there.
        live_nbytes: all live bytes, which is the peak.
        resident_nbytes: of these, what is live all the time.
        workspace_nbytes: of these, what only the operation itself needs.
        largest: names and bytes of the largest live values, largest first.
    """

    op: str
    live_nbytes: int
    resident_nbytes: int
    workspace_nbytes: int
    largest: tuple[tuple[str, int], ...]


def peak_step(problem: Problem, plan: Plan, count: int = 5) -> PeakStep:
    """Where a plan peaks and its `count` largest live values there.

    Raises:
        ValueError: if the plan has no steps.
    """
    timeline = simulate(problem, plan)
    step = timeline.peak_step
    op = problem.op_by_name[plan.steps[step].target]
    live = [name for name, born, last in occupied_spans(problem, plan) if born <= step <= last]
    sizes = [(name, problem.value_by_name[name].nbytes) for name in live]
    return PeakStep(
        op=op.name,
        live_nbytes=timeline.peak_nbytes,
        resident_nbytes=problem.resident_nbytes,
        workspace_nbytes=op.workspace_nbytes,
        largest=tuple(sorted(sizes, key=lambda size: (-size[1], size[0]))[:count]),
    )


def digest(problem: Problem) -> str:
    """A SHA-256 of all that the problem states: equal problems have equal digests."""
    text = json.dumps(problem.as_data(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def plan_document(
    problem: Problem, name: str, budget_nbytes: int, solution: Solution, time_unit: str | None
) -> dict[str, Any]:
    """A plan with its figures and what it is a plan for.

    Args:
        problem: what was solved.
        name: what people call it.
        budget_nbytes: what was asked for.
        solution: the answer.
        time_unit: of the problem's times; None if unknown.
    """
    return {
        "schema": PLAN_SCHEMA,
        **_heading(problem, name, time_unit),
        "budget": budget_nbytes,
        "floor": solution.floor_nbytes,
        **_figures(solution),
    }


def curve_document(
    problem: Problem,
    name: str,
    solutions: list[Solution],
    seconds: float,
    time_unit: str | None,
    solved: tuple[int, int],
) -> dict[str, Any]:
    """The plans of `Solver.pareto` with their figures.

    Args:
        problem: as of `plan_document`, like `name`, `seconds` and `time_unit`.
        name: of the problem.
        solutions: the plans.
        seconds: what they took.
        time_unit: of the problem's times.
        solved: how many budgets the time limit reached, and of how many.
    """
    return {
        "schema": CURVE_SCHEMA,
        **_heading(problem, name, time_unit),
        "floor": max(solution.floor_nbytes for solution in solutions),
        "seconds": seconds,
        "budgets_solved": solved[0],
        "budgets_asked": solved[1],
        "points": [_figures(solution) for solution in solutions],
    }


def _heading(problem: Problem, name: str, time_unit: str | None) -> dict[str, Any]:
    baseline = without_recompute(problem)
    return {
        "problem": name,
        "problem_digest": digest(problem),
        "time_unit": time_unit,
        "baseline_peak": baseline.peak_nbytes,
        "baseline_time": baseline.time_us,
    }


def _figures(solution: Solution) -> dict[str, Any]:
    return {
        "status": solution.status.name.lower(),
        "peak": solution.timeline.peak_nbytes,
        "time": solution.timeline.time_us,
        "bound": solution.bound_us,
        "gap": solution.gap if math.isfinite(solution.gap) else None,
        "method": solution.method,
        "seconds": solution.seconds,
        "tried": list(solution.tried),
        "left_out": list(solution.left_out),
        "schedule": list(solution.plan.schedule),
    }
