"""The search over reruns: live bytes as simulate counts them, valid plans, never worse ones."""

from __future__ import annotations

import random

import pytest
from autoremat_solver import Op, Phase, Plan, Problem, Solver, Value, check, simulate
from autoremat_solver.effort import Effort
from autoremat_solver.model.indexed import index
from autoremat_solver.search.arrangement import Arrangement, Layout, Order, Rules
from autoremat_solver.search.rearrange import Rearranger, rearranged

from tests.solver.test_solver_networks import transformer


def graph_without_phases(count: int, seed: int) -> Problem:
    """A random layered graph: up to three reads from the last eight operations."""
    draw = random.Random(seed)
    values, ops = [], []
    for i in range(count):
        near = range(max(0, i - 8), i)
        reads = draw.sample(near, min(len(near), draw.randint(1, 3)))
        values.append(Value(f"v{i}", draw.randint(1, 50)))
        inputs = tuple(f"v{j}" for j in sorted(reads))
        ops.append(Op(f"o{i}", inputs, (f"v{i}",), float(draw.randint(1, 9)), phase=Phase.ANY))
    return Problem(tuple(values), tuple(ops))


def plain(problem: Problem) -> list[int]:
    return list(range(len(problem.ops)))


@pytest.mark.parametrize("seed", range(8))
def test_a_layout_holds_what_simulate_says(seed: int) -> None:
    """Steps, instances and live bytes, whatever is run again."""
    problem = graph_without_phases(30, seed)
    indexed = index(problem)
    draw = random.Random(seed)
    reruns: dict[int, set[int]] = {}
    for _ in range(12):
        op = draw.randrange(29)
        reruns.setdefault(draw.randrange(op + 1, 30), set()).add(op)
    arrangement = Arrangement(
        Order(range(30)), {before: tuple(sorted(ops)) for before, ops in reruns.items()}
    )
    layout = Layout(indexed, arrangement)
    plan = indexed.plan(layout.steps)
    assert check(problem, plan) == []
    assert tuple(layout.live.tolist()) == simulate(problem, plan).live_nbytes
    assert Layout(indexed, Rules(indexed).take_apart(layout.steps)).steps == layout.steps
    again = layout.rerun_steps()
    assert again.keys() == set(arrangement.all_reruns())
    for (op, before), step in again.items():
        assert (layout.steps[step], arrangement.order[layout.places[step]]) == (op, before)


@pytest.mark.thorough
def test_a_schedule_with_phases_is_taken_apart_and_put_together_again() -> None:
    """Recompute in the backward stands right before what it is for."""
    problem = transformer(layers=4)
    solver = Solver(problem, time_limit_s=3)
    indexed = index(problem)
    for solution in (solver.fastest(), solver.smallest_peak()):
        steps = indexed.numbers(solution.plan)
        layout = Layout(indexed, Rules(indexed).take_apart(steps))
        timeline = simulate(problem, indexed.plan(layout.steps))
        assert layout.steps == steps
        assert tuple(layout.live.tolist()) == timeline.live_nbytes


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
@pytest.mark.parametrize("seed", range(4))
def test_without_phases_plans_fit_and_more_budget_is_not_slower(seed: int, share: float) -> None:
    """Whatever fits below fits above too, so a solver that knows both never contradicts itself."""
    problem = graph_without_phases(60, seed)
    peak = simulate(problem, Plan.of(op.name for op in problem.ops)).peak_nbytes
    solver = Solver(problem, time_limit_s=2)
    low, high = (solver.solve(int(peak * s)) for s in (share, min(1.0, share + 0.1)))
    for solution, budget in ((low, share), (high, min(1.0, share + 0.1))):
        fits = solution.timeline.peak_nbytes <= int(peak * budget)
        assert fits == (solution.status.name != "INFEASIBLE")
        assert check(problem, solution.plan) == []
    if low.status.name != "INFEASIBLE":
        assert solver.solve(int(peak * (share + 0.1))).timeline.time_us <= low.timeline.time_us


def test_an_order_can_be_enough() -> None:
    """Two wide values that are made early and read late: making them late costs nothing."""
    sizes = {"wide": 100, "a": 60, "b": 60, "end": 1}
    reads = {"wide": (), "a": (), "b": ("a",), "end": ("b", "wide")}
    problem = Problem(
        tuple(Value(name, nbytes) for name, nbytes in sizes.items()),
        tuple(Op(f"o{n}", r, (n,), 5.0, phase=Phase.ANY) for n, r in reads.items()),
    )
    assert simulate(problem, Plan.of(op.name for op in problem.ops)).peak_nbytes == 220
    solution = Solver(problem).solve(165)
    assert solution.timeline.time_us == 20.0
    assert check(problem, solution.plan, 165) == []


def test_improving_is_never_slower_and_keeps_the_budget() -> None:
    """From a chain plan near the smallest peak."""
    problem = transformer(layers=6)
    indexed = index(problem)
    start = Solver(problem, time_limit_s=2).smallest_peak()
    budget = int(1.1 * start.timeline.peak_nbytes)
    search = Rearranger(Rules(indexed), budget, Effort(10**6))
    layout = search.repair(Rules(indexed).take_apart(indexed.numbers(start.plan)))
    assert layout is not None
    better = search.improve(layout)
    assert search.rerun_us(better) <= search.rerun_us(layout)
    assert check(problem, indexed.plan(better.steps), budget) == []


def test_the_same_problem_gives_the_same_schedules() -> None:
    """Seeds are fixed and nothing depends on the clock."""
    problem = graph_without_phases(40, 3)
    indexed = index(problem)
    peak = simulate(problem, Plan.of(op.name for op in problem.ops)).peak_nbytes
    first, second = (
        list(rearranged(indexed, [plain(problem)], int(0.8 * peak), Effort(10**6)))
        for _ in range(2)
    )
    assert first == second
    assert first


def test_nothing_is_found_where_nothing_fits() -> None:
    """Below what one operation needs there is no schedule, and no exception."""
    problem = graph_without_phases(20, 1)
    assert list(rearranged(index(problem), [plain(problem)], 10, Effort(10**6))) == []
