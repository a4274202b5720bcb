"""Peak against time: what other budgets would cost.

Enters: a graph after lowering, its solver, the plan that was chosen. Leaves: `CurvePoint`s, by the
simulator's peaks. Guarantees: they follow from one problem, so they can be compared with each
other, and the chosen plan is one of them.
"""

from __future__ import annotations

import time

from autoremat_solver import Plan, Problem, Solution, Solver, Timeline, simulate
from autoremat_solver.policies import save_all_but

from autoremat import _torch
from autoremat.capture import copy_module
from autoremat.choose import Choice, Subject, as_chosen
from autoremat.lower import without_spare_states
from autoremat.policy import parse_policy
from autoremat.reporting import CurvePoint, PointKind
from autoremat.steering import policy_plan
from autoremat.torch_plan import handed_over

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


def curve_of(
    subject: Subject, choice: Choice, points: int, time_limit_s: float
) -> tuple[CurvePoint, ...]:
    """The plans of a few budgets, the classic strategies, torch's settings, and the chosen plan.

    Args:
        subject: the graph.
        choice: the plan that the graph got.
        points: budgets, the smallest and the largest peak included; at least 2.
        time_limit_s: for all of them; settings of torch that it does not reach are left out.
    """
    deadline = time.monotonic() + time_limit_s
    problem = subject.lowered.problem
    chosen = _timeline(as_chosen(subject, choice).lowered.problem, choice.solution.plan)
    solver = Solver(problem, time_limit_s=_PLANS_SHARE * time_limit_s)
    found = [_planned(problem, solution) for solution in solver.pareto(points)]
    return (
        *(point for point in found if point.peak_nbytes != chosen.peak_nbytes),
        *_strategies(subject),
        *_torch_settings(subject, deadline),
        CurvePoint(chosen.peak_nbytes, chosen.time_us, "this plan", PointKind.CHOSEN),
    )


def _strategies(subject: Subject) -> list[CurvePoint]:
    """Those that say something about this graph: without layers, "every layer" saves all."""
    found: dict[tuple[int, float], CurvePoint] = {}
    for name in _STRATEGIES:
        plan, _ = policy_plan(subject, parse_policy(name))
        timeline = _timeline(subject.lowered.problem, plan)
        point = (timeline.peak_nbytes, timeline.time_us)
        found.setdefault(point, CurvePoint(*point, name, PointKind.STRATEGY))
    return list(found.values())


def _torch_settings(subject: Subject, deadline: float) -> list[CurvePoint]:
    """Torch's partitioner with and without its memory budget, each as a plan of this problem."""
    found: list[CurvePoint] = []
    for budget in _TORCH_BUDGETS:
        if time.monotonic() >= deadline:
            break
        try:
            plan = _torch_plan(subject, budget)
        except Exception:  # a comparison that torch cannot make is no reason to fail
            break
        timeline = _timeline(subject.lowered.problem, plan)
        label = "torch.compile" if budget == 1.0 else f"torch, budget {budget:g}"
        found.append(CurvePoint(timeline.peak_nbytes, timeline.time_us, label, PointKind.TORCH))
    return found


def _torch_plan(subject: Subject, budget: float) -> Plan:
    """What torch saves at a setting, and once more what its backward lacks."""
    joint, lowered = subject.joint, subject.lowered
    _, backward = _torch.min_cut(
        copy_module(joint.module), num_fwd_outputs=joint.num_fwd_outputs, budget=budget
    )
    kept = handed_over(joint, lowered.storages, backward)
    return save_all_but(lowered.problem, {v.name for v in lowered.problem.values} - kept)


def _planned(problem: Problem, solution: Solution) -> CurvePoint:
    timeline = _timeline(problem, solution.plan)
    return CurvePoint(timeline.peak_nbytes, timeline.time_us, solution.method, PointKind.PLAN)


def _timeline(problem: Problem, plan: Plan) -> Timeline:
    """What the report's own timeline says of a plan."""
    return simulate(without_spare_states(problem, plan), plan)
