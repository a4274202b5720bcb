"""The lower bounds against an exhaustive search on small problems, with phases and without."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from autoremat_solver import Op, Phase, Problem, Solver, Value, simulate
from autoremat_solver.bounds import certified, intervals
from autoremat_solver.bounds.certified import Bounds
from autoremat_solver.model.indexed import index
from autoremat_solver.model.readable import require_consistent
from autoremat_solver.problem import ProblemError

from tests.solver.exhaustive import cheapest_us
from tests.solver.random_problems import Shape, random_graph, random_step

SLACK = 1e-5


def step_with_a_backward(seed: int) -> Problem:
    """A random step with at least three backward operations."""
    drawn = (random_step(1000 * seed + i) for i in itertools.count())
    return next(p for p in drawn if sum(op.phase is Phase.BACKWARD for op in p.ops) > 2)


def small_graph(seed: int) -> Problem:
    """At most five operations in any order: the search below runs a dozen times for each."""
    return random_graph(seed, Shape(5, 0, 9, 9))


def consistent(make: Callable[[int], Problem], count: int) -> list[Problem]:
    """The first problems of which every value that is needed may be read."""
    found: list[Problem] = []
    for seed in itertools.count():
        try:
            problem = make(seed)
            require_consistent(index(problem))
        except ProblemError:
            continue
        found.append(problem)
        if len(found) == count:
            return found
    raise AssertionError


def reachable_budgets(problem: Problem) -> list[int]:
    """The smallest budget that some plan fits, and budgets up to where none binds."""
    whole = problem.resident_nbytes + sum(v.nbytes for v in problem.values) * 2
    whole += sum(op.workspace_nbytes for op in problem.ops)
    low, high = 0, whole
    if cheapest_us(problem, high) == math.inf:
        return []
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cheapest_us(problem, middle) < math.inf else (middle + 1, high)
    return [low, low + 1, low + 3, (3 * low + whole) // 4, whole]


MAKERS = {"phases": step_with_a_backward, "no phases": small_graph}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def violations(problem: Problem) -> tuple[list[str], bool]:
    """Where a bound is above the exhaustive optimum; whether any bound was above the trivial."""
    budgets = reachable_budgets(problem)
    if not budgets:
        return [], False
    bounds = Bounds(index(problem))
    found = []
    if bounds.floor_nbytes > budgets[0]:
        found.append(f"floor {bounds.floor_nbytes} above the smallest peak {budgets[0]}")
    trivial = Bounds(index(problem)).time_us(budgets[-1])
    sharp = False
    for budget in budgets:
        bound, best = bounds.time_us(budget), cheapest_us(problem, budget)
        sharp |= bound > trivial + 0.5
        if bound > best + SLACK:
            found.append(f"bound {bound} at {budget} above the optimum {best}")
    return found, sharp


@both
def test_no_bound_is_above_the_exhaustive_optimum(make: Callable[[int], Problem]) -> None:
    """Time bound <= cheapest plan at five budgets, floor <= smallest peak; not by being trivial.

    Without phases the bound is what every order shares, so there it is.
    """
    count = 40 if make is step_with_a_backward else 100
    results = [violations(problem) for problem in consistent(make, count)]
    assert [found for found, _ in results if found] == []
    assert make is small_graph or sum(sharp for _, sharp in results) > 3


def test_no_bound_is_above_the_optimum_with_many_cuts_and_few_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most positions become cuts, and values have columns at every second of them only."""
    monkeypatch.setattr(certified, "TIGHT", 0.3)
    monkeypatch.setattr(intervals, "DENSE", 1)
    monkeypatch.setattr(intervals, "SPARSE", 2)
    results = [violations(problem) for problem in consistent(step_with_a_backward, 40)]
    assert [found for found, _ in results if found] == []
    assert sum(sharp for _, sharp in results) > 3


def test_no_bound_is_above_a_plan_of_a_larger_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of the leanest plan of simple strategies is met in the time that it takes."""
    monkeypatch.setattr(intervals, "DENSE", 2)
    close = 0
    for seed in range(30):
        problem = random_step(seed, Shape(24, 14, 50, 20))
        try:
            solver = Solver(problem, time_limit_s=0.0)
        except ProblemError:
            continue
        plan = simulate(problem, solver.lean_plan())
        bound = Bounds(index(problem)).time_us(plan.peak_nbytes)
        assert bound <= plan.time_us + SLACK
        close += bound > 0.9 * plan.time_us
    assert close > 3


def test_no_clock_changes_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps a day at each look: the same bound to the last bit."""
    calm = Bounds(index(chain(24))).time_us(62)
    days = itertools.count(0.0, 86_400.0)
    for name in ("monotonic", "perf_counter", "time", "process_time"):
        monkeypatch.setattr(time, name, lambda: next(days))
    assert Bounds(index(chain(24))).time_us(62) == calm


@both
def test_the_bound_falls_or_stays_as_the_budget_grows(make: Callable[[int], Problem]) -> None:
    """In whatever order budgets are asked for, each bound is proven for smaller ones too."""
    falls = 0
    for problem in consistent(make, 20 if make is step_with_a_backward else 50):
        smallest = reachable_budgets(problem)[:1]
        budgets = [low + extra for low in smallest for extra in (0, 1, 2, 4, 8, 16, 40)]
        up = [Bounds(index(problem)).time_us(budget) for budget in budgets]
        shared = Bounds(index(problem))
        down = [shared.time_us(budget) for budget in reversed(budgets)][::-1]
        for bounds in (up, down):
            assert all(a >= b - SLACK for a, b in itertools.pairwise(bounds)), problem
        falls += bool(up) and up[0] > up[-1] + SLACK
    assert make is small_graph or falls > 1


@both
def test_scaling_bytes_and_budget_leaves_the_bound(make: Callable[[int], Problem]) -> None:
    """Bytes times 1,000 at 1,000 times the budget: the same time, 1,000 times the floor."""
    for problem in consistent(make, 30):
        one, many = Bounds(index(problem)), Bounds(index(scaled(problem, 1000)))
        assert many.floor_nbytes == 1000 * one.floor_nbytes
        for budget in (one.floor_nbytes, one.floor_nbytes + 3):
            few_us = one.time_us(budget)
            assert many.time_us(1000 * budget) == pytest.approx(few_us, abs=1e-3)


def scaled(problem: Problem, factor: int) -> Problem:
    """The problem in smaller units of memory."""
    return Problem(
        tuple(replace(v, nbytes=v.nbytes * factor) for v in problem.values),
        tuple(replace(o, workspace_nbytes=o.workspace_nbytes * factor) for o in problem.ops),
        problem.outputs,
        problem.resident_nbytes * factor,
    )


def chain(length: int, nbytes: int = 10) -> Problem:
    """v0 -> v1 -> ...; b_i reads v_i and the gradient before it; gradients have one byte."""
    values = [Value(f"v{i}", nbytes) for i in range(length)]
    ops = [Op(f"f{i}", (f"v{i - 1}",) if i else (), (f"v{i}",), 1.0) for i in range(length)]
    before: tuple[str, ...] = ()
    for i in reversed(range(length)):
        values.append(Value(f"g{i}", 1))
        ops.append(Op(f"b{i}", (*before, f"v{i}"), (f"g{i}",), 1.0, phase=Phase.BACKWARD))
        before = (f"g{i}",)
    return Problem(tuple(values), tuple(ops))


def test_more_effort_or_a_further_target_never_lowers_the_bound() -> None:
    """No effort gives the runs that all plans share; a target that is met stops the search."""
    problem = chain(24)
    fresh = Bounds(index(problem)).time_us
    nothing, all_of_it = fresh(62, effort=0.0), fresh(62)
    assert nothing == pytest.approx(48.0, rel=1e-5)
    near = fresh(62, target_us=50.0)
    assert nothing <= near <= all_of_it
    assert near >= 50.0
    again = Bounds(index(problem))
    assert again.time_us(62) == all_of_it
    assert again.time_us(62, effort=0.0) == all_of_it


def test_a_solver_that_works_less_for_bounds_proves_less_and_finds_no_less() -> None:
    """What its bounds leave open it searches for."""
    problem = chain(24)
    usual, less = (Solver(problem, bound_effort=n).solve(62) for n in (None, 0.0))
    assert less.bound_us < usual.bound_us
    assert less.timeline.time_us <= usual.timeline.time_us


def test_a_value_kept_only_to_recompute_others_counts() -> None:
    """v0 (4 bytes) -> v1 (1 byte) -> v2 (8 bytes), read by b1; b0 needs all of a 10-byte budget.

        f0 f1 f2 | b0 (workspace 8) | b1 reads v2

    v2 does not fit beside b0, v1 does: f2 runs again, and nothing else. A bound that charges v1
    no bytes, or that cannot keep v1, would miss the optimum.
    """
    values = (Value("v0", 4), Value("v1", 1), Value("v2", 8), Value("g0", 1), Value("g1", 1))
    ops = (
        Op("f0", (), ("v0",), 5.0),
        Op("f1", ("v0",), ("v1",), 3.0),
        Op("f2", ("v1",), ("v2",), 2.0),
        Op("b0", (), ("g0",), 1.0, workspace_nbytes=8),
        Op("b1", ("g0", "v2"), ("g1",), 1.0, phase=Phase.BACKWARD),
    )
    problem = Problem(values, (*ops[:3], replace(ops[3], phase=Phase.BACKWARD), ops[4]), ("g1",))
    bounds = Bounds(index(problem))
    assert bounds.time_us(10) == pytest.approx(12.0 + 2.0, rel=1e-5)
    assert cheapest_us(problem, 10) == 14.0


def test_the_floor_sees_what_making_a_read_takes() -> None:
    """b1 reads v1 (1 byte), which f1 makes from v0 (8 bytes).

        f0 f1 | b0 (workspace 7) makes h (8 bytes) | b1 reads h and v1

    No operation takes more than the 15 bytes of b0. But v1 was either live beside b0 (16 bytes) or
    made again beside h, from v0 (17).
    """
    values = (Value("v0", 8), Value("v1", 1), Value("h", 8), Value("g", 1))
    problem = Problem(
        values,
        (
            Op("f0", (), ("v0",), 1.0),
            Op("f1", ("v0",), ("v1",), 1.0),
            Op("b0", (), ("h",), 1.0, workspace_nbytes=7, phase=Phase.BACKWARD),
            Op("b1", ("h", "v1"), ("g",), 1.0, phase=Phase.BACKWARD),
        ),
    )
    assert Bounds(index(problem)).floor_nbytes == reachable_budgets(problem)[0] == 16


def test_without_phases_only_what_every_order_shares_counts() -> None:
    """o0 -> o1 -> o2 -> o3, and o3 reads v0 too: o3 alone needs 10 bytes."""
    values = (Value("v0", 5), Value("v1", 2), Value("v2", 4), Value("v3", 1))
    ops = (
        Op("o0", (), ("v0",), 3.0, phase=Phase.ANY),
        Op("o1", ("v0",), ("v1",), 1.0, phase=Phase.ANY),
        Op("o2", ("v1",), ("v2",), 1.0, phase=Phase.ANY),
        Op("o3", ("v0", "v2"), ("v3",), 1.0, phase=Phase.ANY),
    )
    problem = Problem(values, ops)
    bounds = Bounds(index(problem))
    assert bounds.floor_nbytes == reachable_budgets(problem)[0] == 10
    assert bounds.time_us(10) == pytest.approx(6.0, rel=1e-5)
    assert cheapest_us(problem, 10) == 9.0


def test_without_a_linear_solver_the_bound_is_what_all_plans_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that does not load costs sharpness, not the plan."""
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.warns(RuntimeWarning, match="Is highspy installed correctly"):
        assert Bounds(index(chain(5))).time_us(22) == pytest.approx(10.0, rel=1e-5)
