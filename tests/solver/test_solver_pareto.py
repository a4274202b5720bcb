"""The curve of peak and time."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from autoremat_solver import Problem, Solver, Status, check

from tests.solver.test_solver_networks import mlp, transformer


@pytest.mark.thorough
def test_the_curve_falls_and_every_plan_is_valid() -> None:
    """From the smallest peak to the fastest plan, each plan is faster than those below it."""
    problem = mlp(12)
    solver = Solver(problem, time_limit_s=4)
    curve = solver.pareto(points=6)
    assert 3 <= len(curve) <= 6
    for below, above in pairwise(curve):
        assert below.timeline.peak_nbytes < above.timeline.peak_nbytes
        assert below.timeline.time_us > above.timeline.time_us
    for solution in curve:
        assert check(problem, solution.plan, solution.timeline.peak_nbytes) == []
        assert solution.floor_nbytes <= solution.timeline.peak_nbytes
        assert solution.bound_us <= solution.timeline.time_us
    assert curve[0].timeline.peak_nbytes == solver.smallest_peak().timeline.peak_nbytes
    assert curve[-1].timeline.time_us == solver.fastest().timeline.time_us


def test_the_curve_keeps_to_its_time_limit() -> None:
    """The limit is for the whole curve, and the solver has its own limit back afterwards."""
    solver = Solver(transformer(6), time_limit_s=1.0)
    began = time.process_time()
    curve = solver.pareto(points=40)
    assert time.process_time() - began < 4.0
    assert solver.time_limit_s == 1.0
    assert curve


def test_without_time_the_curve_has_its_two_ends() -> None:
    """A limit of 0 gives what the simple strategies reach."""
    curve = Solver(mlp(12), time_limit_s=0).pareto()
    assert len(curve) == 2
    assert all(solution.left_out and not solution.tried for solution in curve)


def test_the_curve_of_nothing_is_one_empty_plan() -> None:
    """An empty problem has one plan."""
    (only,) = Solver(Problem((), ())).pareto()
    assert only.plan.schedule == ()
    assert only.status is Status.OPTIMAL


def test_a_curve_has_two_ends() -> None:
    """One point is no curve."""
    with pytest.raises(ValueError, match="2 or more"):
        Solver(mlp(3)).pareto(points=1)
