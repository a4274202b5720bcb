"""Ten thousand operations: a plan with a small gap in ten seconds of processor time."""

from __future__ import annotations

import time

import pytest
from autoremat_solver import Solver, Status

from tests.solver.test_solver_networks import transformer

LAYERS = 235  # a little over 10,000 operations
MOST_S = 10.0  # of processor time, on one core
MOST_GAP = 0.01


@pytest.mark.slow
@pytest.mark.parametrize("percent", [75, 50, 35, 25])
def test_ten_thousand_operations_take_ten_seconds(percent: int) -> None:
    """So much of the way from the floor to the fastest plan's peak leaves a gap of 1 % at most."""
    problem = transformer(LAYERS)
    assert len(problem.ops) > 10_000
    fastest = Solver(problem, time_limit_s=1000).fastest()
    floor_nbytes = fastest.floor_nbytes
    budget = floor_nbytes + (fastest.timeline.peak_nbytes - floor_nbytes) * percent // 100
    began = time.process_time()
    found = Solver(problem, time_limit_s=1000).solve(budget)
    assert time.process_time() - began <= MOST_S
    assert found.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert found.gap <= MOST_GAP
