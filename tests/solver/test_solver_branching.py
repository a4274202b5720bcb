"""What branching adds to the linear bound: whole numbers, and never more than is true."""

from __future__ import annotations

import math

import pytest
from autoremat_solver import Solver, simulate
from autoremat_solver.bounds import certified
from autoremat_solver.bounds.branching import Tree
from autoremat_solver.bounds.certified import Bounds
from autoremat_solver.model.indexed import index
from autoremat_solver.problem import ProblemError
from autoremat_solver.program._highs import Relaxation
from autoremat_solver.program.formulation import LinearProgram

from tests.solver.random_problems import Shape, random_step

WORK = 10**9


def odd_ring(length: int = 3) -> Relaxation:
    """Of two neighbours in a ring one is 1: half of all by linear programming, and rounded up."""
    rows = [({i: 1.0, (i + 1) % length: 1.0}, 1.0, math.inf) for i in range(length)]
    return Relaxation(LinearProgram([1.0] * length, [1.0] * length, rows), work=WORK)


@pytest.mark.parametrize("length", [3, 5, 9])
def test_whole_columns_bound_more_than_halves(length: int) -> None:
    """The least that covers an odd ring is found, where the relaxation says half a column less."""
    relaxation = odd_ring(length)
    root = relaxation.run()
    assert root.bound == pytest.approx(length / 2)
    assert Tree(relaxation, root, math.inf).grow() == pytest.approx((length + 1) / 2)


def test_a_tree_ends_where_the_bound_is_enough_or_the_work_is_spent() -> None:
    """Neither is more than what was proven by then."""
    relaxation = odd_ring(9)
    root = relaxation.run()
    assert 4.6 <= Tree(relaxation, root, 4.6).grow() <= 5.0 + 1e-9
    relaxation.work = 0
    assert Tree(relaxation, root, math.inf).grow() == root.bound


def test_fixed_columns_hold_in_one_run_only() -> None:
    """Two neighbours at 0 leave no point, which is proven; the next run has all points again."""
    relaxation = odd_ring()
    root = relaxation.run()
    assert relaxation.run({0: 0.0, 1: 0.0}, root.basis).bound == math.inf
    assert relaxation.run({0: 0.0}, root.basis).bound == pytest.approx(2.0)
    assert relaxation.run().bound == pytest.approx(1.5)


def test_branching_raises_bounds_of_steps_and_none_above_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the peak of a lean plan, on random steps; what small ones take is held elsewhere."""
    raised = 0
    for seed in range(20):
        problem = random_step(seed, Shape(24, 14, 50, 20))
        try:
            plan = simulate(problem, Solver(problem, time_limit_s=0.0).lean_plan())
        except ProblemError:
            continue
        whole = Bounds(index(problem)).time_us(plan.peak_nbytes)
        with monkeypatch.context() as without:
            without.setattr(certified, "TREE_GAP", math.inf)
            linear = Bounds(index(problem)).time_us(plan.peak_nbytes, target_us=10 * plan.time_us)
        assert linear - 1e-5 <= whole <= plan.time_us + 1e-5
        raised += whole > linear + 1e-3
    assert raised > 2
