"""Multi-level recompute on deep networks."""

from __future__ import annotations

import pytest
from autoremat_solver import Problem, Solver, Status, check

from tests.test_solver_networks import MIB, chain, mlp, transformer, unet


def test_the_64_layer_chain_of_the_design_fits_45_mib() -> None:
    """x0 -> ... -> x63, 4 MiB each, 16 MiB of gradients: two levels reach 45 MiB."""
    problem = chain(64, 4 * MIB, gradient_nbytes=MIB // 4)
    found = Solver(problem).solve(45 * MIB)
    assert found.timeline.peak_nbytes <= 45 * MIB
    assert check(problem, found.plan, 45 * MIB) == []
    assert found.timeline.time_us < 1.6 * Solver(problem).fastest().timeline.time_us


def test_a_plain_chain_reaches_the_square_root_regime_with_one_extra_forward() -> None:
    """100 values in room for 22: at most one extra run of each."""
    problem = chain(100, MIB)
    found = Solver(problem).solve(22 * MIB)
    runs = [found.plan.schedule.count(f"op_x{i}") for i in range(100)]
    assert found.timeline.peak_nbytes <= 22 * MIB
    assert sum(runs) <= 200


def test_a_plain_chain_reaches_the_logarithmic_regime() -> None:
    """128 values in room for 11: binomial checkpointing needs at most four runs of each."""
    problem = chain(128, MIB)
    found = Solver(problem).solve(11 * MIB)
    assert found.timeline.peak_nbytes <= 11 * MIB
    runs = sum(found.plan.schedule.count(f"op_x{i}") for i in range(128))
    assert runs <= 4 * 128


@pytest.mark.parametrize(
    ("problem", "most_gap"),
    [(mlp(16), 0.05), (transformer(6), 0.05), (unet(4), 0.10)],
    ids=["mlp", "transformer", "unet"],
)
def test_the_gap_is_small_at_mid_budgets(problem: Problem, most_gap: float) -> None:
    """Half-way between the smallest peak and the fastest plan's, the proven gap is small."""
    solver = Solver(problem)
    low = solver.smallest_peak().timeline.peak_nbytes
    high = solver.fastest().timeline.peak_nbytes
    found = solver.solve((low + high) // 2)
    assert found.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert found.gap <= most_gap


def test_the_smallest_peak_is_a_budget_that_a_new_solver_meets() -> None:
    """solve(smallest_peak) succeeds; one byte below the floor is infeasible with that plan."""
    problem = unet(3)
    low = Solver(problem).smallest_peak()
    peak = low.timeline.peak_nbytes
    assert Solver(problem).solve(peak).timeline.peak_nbytes <= peak
    below = Solver(problem).solve(low.floor_nbytes - 1)
    assert below.status is Status.INFEASIBLE
    assert below.timeline.peak_nbytes > low.floor_nbytes - 1
