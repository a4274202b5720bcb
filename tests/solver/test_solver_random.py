"""Random steps with every kind of operation and value: EITHER, must_save, run-once, outputs."""

from __future__ import annotations

import pytest
from autoremat_solver import ProblemError, Solver, Status, check

from tests.solver.random_problems import MIDDLE, random_step

SLOW = [pytest.param(block, marks=pytest.mark.slow) for block in range(3, 20)]


@pytest.mark.parametrize("block", [0, 1, 2, *SLOW])
def test_random_steps_get_valid_plans_within_their_bounds(block: int) -> None:
    """Every plan passes `check` at its own peak; bound <= time and floor <= peak throughout."""
    for seed in range(block * 12, block * 12 + 12):
        problem = random_step(seed, MIDDLE)
        try:
            solver = Solver(problem, time_limit_s=5)
        except ProblemError:
            continue
        low, high = solver.smallest_peak(), solver.fastest()
        peaks = low.timeline.peak_nbytes, high.timeline.peak_nbytes
        assert low.floor_nbytes <= min(peaks)
        for share in (0.0, 0.3, 0.7):
            budget = int(peaks[0] + share * (peaks[1] - peaks[0]))
            found = solver.solve(budget)
            assert check(problem, found.plan, budget) == [], seed
            raw = solver._search.bounds.time_us(budget)
            assert raw <= found.timeline.time_us + 1e-6, seed
            fastest = solver.fastest().timeline.time_us
            assert fastest <= found.timeline.time_us + 1e-6, seed


def test_a_new_solver_accepts_the_smallest_peak_that_another_one_named() -> None:
    """On random steps: what makes its plan faster may also make it lower."""
    asked = 0
    for seed in range(24):
        problem = random_step(seed, MIDDLE)
        try:
            named = Solver(problem).smallest_peak().timeline.peak_nbytes
        except ProblemError:
            continue
        assert Solver(problem).solve(named).status is not Status.INFEASIBLE, seed
        asked += 1
    assert asked > 15
