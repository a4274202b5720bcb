"""The smallest peak: reachable when asked for, and not bought with an absurd time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from autoremat_solver import Plan, Problem, Solver, Status, check, simulate
from autoremat_solver.effort import Effort
from autoremat_solver.model.indexed import index
from autoremat_solver.search.rearrange import lowered

from docs.layered_graphs import layered_graph
from tests.solver.test_solver_networks import transformer, unet


@pytest.mark.thorough
@pytest.mark.parametrize("problem", [transformer(8), unet(4)], ids=["transformer", "unet"])
def test_a_claimed_smallest_peak_is_met_and_is_not_slow(
    problem: Problem,
) -> None:
    """Its plan takes less than twice the fastest one's time, and a new solver meets the peak."""
    low = Solver(problem, time_limit_s=4).smallest_peak()
    peak = low.timeline.peak_nbytes
    assert check(problem, low.plan, peak) == []
    assert low.timeline.time_us < 2 * Solver(problem).fastest().timeline.time_us
    assert Solver(problem, time_limit_s=4).solve(peak).timeline.peak_nbytes <= peak


def test_lowering_passes_valid_plans_of_ever_smaller_peaks() -> None:
    """From save-all down: each may serve as the start for a budget in between."""
    problem = transformer(6)
    indexed = index(problem)
    start = list(range(len(problem.ops)))
    highest = simulate(problem, Plan.of(op.name for op in problem.ops)).peak_nbytes
    passed = list(lowered(indexed, start, highest // 2, Effort(10**7)))
    peaks = [highest]
    for steps in passed:
        plan = indexed.plan(steps)
        assert check(problem, plan) == []
        peaks.append(simulate(problem, plan).peak_nbytes)
    assert all(after < before for before, after in pairwise(peaks))
    assert peaks[-1] < highest


@pytest.mark.parametrize("resident_nbytes", [200_000, pytest.param(0, marks=pytest.mark.thorough)])
def test_a_refusal_of_free_orders_names_what_annealing_comes_to(resident_nbytes: int) -> None:
    """It is lower than what the given order is lowered to, and a new solver meets it."""
    problem = replace(layered_graph(100, 0), resident_nbytes=resident_nbytes)
    effort = 0.3
    refused = Solver(problem).solve(10_000, effort=effort)
    lowered_only = Solver(problem, without=["anneal smallest"]).solve(10_000, effort=effort)
    named = refused.timeline.peak_nbytes
    assert refused.status is Status.INFEASIBLE
    assert "anneal smallest" in refused.tried
    assert named < lowered_only.timeline.peak_nbytes
    assert Solver(problem).solve(named, effort=effort).timeline.peak_nbytes <= named
    assert Solver(problem).smallest_peak(effort=effort).timeline.peak_nbytes == named
