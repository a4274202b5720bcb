"""The solver against an exhaustive search on small problems."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from autoremat_solver import (
    Op,
    Phase,
    Plan,
    Problem,
    ProblemError,
    Solver,
    Status,
    Value,
    check,
    simulate,
)
from autoremat_solver.model.indexed import index
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.solver.exact.search import ExactSearch
from tests.solver.exhaustive import NEVER, cheapest_us
from tests.solver.random_problems import random_graph, random_overwriting_step, random_step

repeatable = settings(deadline=None, max_examples=25, derandomize=True, database=None)


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    """At most five forward and five backward operations with random reads, sizes and times."""
    count = draw(st.integers(2, 5))
    values, ops, outputs = [], [], []
    for i in range(count):
        reads = draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else set()
        values.append(Value(f"v{i}", draw(st.integers(0, 8))))
        ops.append(
            Op(
                f"f{i}",
                tuple(f"v{j}" for j in sorted(reads)),
                (f"v{i}",),
                float(draw(st.integers(0, 9))),
                draw(st.sampled_from((0, 0, 3))),
                recomputable=draw(st.integers(0, 5)) > 0,
            )
        )
    before: tuple[str, ...] = ()
    for k in range(draw(st.integers(1, 5))):
        reads = draw(st.sets(st.integers(0, count - 1), max_size=2))
        values.append(Value(f"g{k}", draw(st.integers(0, 4))))
        inputs = before + tuple(f"v{j}" for j in sorted(reads))
        ops.append(Op(f"b{k}", inputs, (f"g{k}",), 1.0, phase=Phase.BACKWARD))
        before = (f"g{k}",)
        if draw(st.booleans()):
            outputs.append(f"g{k}")
    return Problem(tuple(values), tuple(ops), tuple(outputs), draw(st.integers(0, 5)))


@repeatable
@given(small_problems(), st.floats(0.0, 1.0))
def test_bounds_hold_and_plans_are_valid(problem: Problem, share: float) -> None:
    """Our plan >= the cheapest >= bound, every peak >= floor, and every plan passes `check`."""
    solver = Solver(problem)
    low, high = solver.smallest_peak(), solver.fastest()
    assert check(problem, low.plan) == []
    assert check(problem, high.plan) == []
    peaks = low.timeline.peak_nbytes, high.timeline.peak_nbytes
    budget = int(peaks[0] + share * (peaks[1] - peaks[0]))
    found = solver.solve(budget)
    assert check(problem, found.plan, budget) == []
    assert found.timeline == simulate(problem, found.plan)
    cheapest = cheapest_us(problem, budget)
    assert found.bound_us <= cheapest + 1e-6
    assert cheapest <= found.timeline.time_us + 1e-6
    assert cheapest_us(problem, low.floor_nbytes - 1) == NEVER


@repeatable
@given(small_problems())
def test_the_fastest_plan_is_the_cheapest_of_all(problem: Problem) -> None:
    """Without a budget the min-cut finds what the exhaustive search finds."""
    assert Solver(problem).fastest().timeline.time_us == pytest.approx(
        cheapest_us(problem, 10**9), abs=1e-6
    )


def small_chain(sizes: list[int], times: list[float]) -> Problem:
    """v0 -> v1 -> ...; b_i reads v_i; the gradients are small."""
    values = [Value(f"v{i}", n) for i, n in enumerate(sizes)]
    ops = [Op(f"f{i}", (f"v{i - 1}",) if i else (), (f"v{i}",), t) for i, t in enumerate(times)]
    before: tuple[str, ...] = ()
    for i in reversed(range(len(sizes))):
        values.append(Value(f"g{i}", 1))
        ops.append(Op(f"b{i}", (*before, f"v{i}"), (f"g{i}",), 1.0, phase=Phase.BACKWARD))
        before = (f"g{i}",)
    return Problem(tuple(values), tuple(ops))


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ([10, 10, 10, 10], [5.0, 5.0, 5.0, 5.0]),
        ([10, 40, 10, 40], [5.0, 1.0, 5.0, 1.0]),
        ([10, 10, 10, 10, 10], [1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_small_chains_are_solved_to_the_optimum(sizes: list[int], times: list[float]) -> None:
    """On v0 -> v1 -> ... -> vn every budget from the smallest peak up gets the cheapest plan."""
    problem = small_chain(sizes, times)
    solver = Solver(problem)
    low = solver.smallest_peak().timeline.peak_nbytes
    assert cheapest_us(problem, low - 1) == NEVER
    for budget in range(low, sum(sizes) + 3, 10):
        assert solver.solve(budget).timeline.time_us == pytest.approx(cheapest_us(problem, budget))


def test_an_uneven_small_chain_is_solved_to_the_optimum() -> None:
    """Five values of five sizes: some plans save a value for a while only."""
    problem = small_chain([40, 10, 20, 30, 5], [1.0, 2.0, 3.0, 4.0, 5.0])
    solver = Solver(problem)
    low = solver.smallest_peak().timeline.peak_nbytes
    assert cheapest_us(problem, low - 1) == NEVER
    for budget in range(low, 108, 5):
        assert solver.solve(budget).timeline.time_us == pytest.approx(cheapest_us(problem, budget))


def is_torn(problem: Problem) -> bool:
    """Whether an operation makes one value to be saved and another to be recomputed.

    The solver runs such an operation once, though a run after the last read of the first would do.
    """
    values = problem.value_by_name
    return any(
        any(values[n].must_save for n in op.outputs)
        and any(values[n].must_recompute for n in op.outputs)
        for op in problem.ops
    )


@dataclass
class Compared:
    """How often the solver reaches what the exhaustive search proves.

    Attributes:
        problems, lowest: compared, and those of which it finds the smallest peak.
        budgets, cheapest: compared at or above that peak, and those at which it finds the cheapest.
    """

    problems: int = 0
    lowest: int = 0
    budgets: int = 0
    cheapest: int = 0

    def add(self, problem: Problem, seed: int) -> None:
        """Compare at the smallest peak found and above it; whatever is wrong is raised."""
        rng = random.Random(seed)
        try:
            solver = Solver(problem)
        except ProblemError:
            assert is_torn(problem) or cheapest_us(problem, 10**9) == NEVER, seed
            return
        smallest = solver.smallest_peak()
        low = smallest.timeline.peak_nbytes
        self.problems += 1
        self.lowest += low == 0 or cheapest_us(problem, low - 1) == NEVER
        floor = smallest.floor_nbytes
        assert floor == 0 or cheapest_us(problem, floor - 1) == NEVER, seed
        most = sum(value.nbytes for value in problem.values) + problem.resident_nbytes + 3
        for budget in {low, rng.randint(low, max(low, most)), low + rng.randint(1, 4)}:
            cheapest, found = cheapest_us(problem, budget), solver.solve(budget)
            assert check(problem, found.plan, budget) == [], (seed, budget)
            assert found.bound_us <= cheapest + 1e-6, (seed, budget)
            self.budgets += 1
            self.cheapest += found.timeline.time_us == pytest.approx(cheapest, abs=1e-6)


def compared(make: Callable[[int], Problem], seeds: range) -> Compared:
    result = Compared()
    for seed in seeds:
        result.add(make(seed), seed)
    return result


def test_problems_of_up_to_seven_operations_are_solved_to_the_optimum() -> None:
    """Every kind of operation and value; the smallest peak is missed where little may be moved."""
    found = compared(random_step, range(200))
    assert found.budgets > 500
    assert found.cheapest == found.budgets
    assert found.lowest >= 0.88 * found.problems


@pytest.mark.thorough
def test_problems_whose_operations_write_in_place_are_solved_to_the_optimum() -> None:
    """What an operation is the last to read, it may write over; which it is, the plan decides."""
    found = compared(random_overwriting_step, range(200))
    assert found.cheapest >= 0.99 * found.budgets
    assert found.lowest >= 0.88 * found.problems
    gained = [
        cheapest_us(problem, budget) != cheapest_us(random_step(seed), budget)
        for seed in range(60)
        for problem in [random_overwriting_step(seed)]
        for budget in [simulate(problem, as_given(problem)).peak_nbytes]
    ]
    assert sum(gained) >= 5


def as_given(problem: Problem) -> Plan:
    """Each operation once, in the problem's order."""
    return Plan.of(op.name for op in problem.ops)


@pytest.mark.slow
def test_thousands_of_small_problems_are_solved_to_the_optimum() -> None:
    """The same for 5,000 more."""
    found = compared(random_step, range(200, 5200))
    assert found.cheapest >= 0.995 * found.budgets
    assert found.lowest >= 0.88 * found.problems


def needs(problem: Problem) -> tuple[bool, bool]:
    """Whether the plan of the smallest peak changes the order, and whether it runs any op again."""
    schedule = Solver(problem).smallest_peak().plan.schedule
    first_runs = list(dict.fromkeys(schedule))
    return first_runs != [op.name for op in problem.ops], len(schedule) > len(first_runs)


@pytest.mark.thorough
def test_graphs_without_phases_are_solved_to_the_optimum() -> None:
    """Any order, any reruns, at the smallest peak and above it."""
    seeds = range(250, 330)
    found = compared(random_graph, seeds)
    assert found.cheapest >= 0.97 * found.budgets
    assert found.lowest >= 0.95 * found.problems
    reordered, repeated = zip(*(needs(random_graph(seed)) for seed in seeds), strict=True)
    assert sum(reordered) > 15
    assert sum(repeated) > 5


def exactly_us(problem: Problem, budget_nbytes: int) -> float:
    """The time that the second oracle finds: a search that shares the solver's numbers only."""
    indexed = index(problem)
    steps = ExactSearch(indexed).cheapest(budget_nbytes)
    if steps is None:
        return NEVER
    plan = indexed.plan(steps)
    assert check(problem, plan, budget_nbytes) == []
    return simulate(problem, plan).time_us


@pytest.mark.parametrize("make", [random_step, random_graph])
def test_both_oracles_agree(make: Callable[[int], Problem]) -> None:
    """One follows the sentences of `Phase` and `Value`, the other one is fast."""
    for seed in range(30):
        problem = make(seed)
        most = sum(value.nbytes for value in problem.values) + problem.resident_nbytes
        for share in (0.3, 0.6, 1.0):
            budget = int(share * most)
            try:
                found_us = exactly_us(problem, budget)
            except ProblemError:
                continue
            assert found_us == pytest.approx(cheapest_us(problem, budget)), (seed, budget)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_chain_of_nine_is_solved_to_the_optimum(share: float) -> None:
    """An uneven chain, against the second oracle."""
    problem = small_chain(
        [8, 3, 5, 9, 2, 7, 4, 6, 3], [2.0, 5.0, 1.0, 7.0, 3.0, 2.0, 6.0, 4.0, 1.0]
    )
    solver = Solver(problem)
    low = solver.smallest_peak().timeline.peak_nbytes
    assert exactly_us(problem, low - 1) == NEVER
    budget = low + int(share * (solver.fastest().timeline.peak_nbytes - low))
    assert solver.solve(budget).timeline.time_us == pytest.approx(exactly_us(problem, budget))


@pytest.mark.parametrize(("recomputable", "time_us"), [(True, 7.0), (False, NEVER)])
def test_what_runs_once_is_not_run_again_ahead_of_need(recomputable: bool, time_us: float) -> None:
    """Chain x, p, a, b, end; end reads p too: only x, p, a, x, b, p, end fits, with x twice."""
    sizes = {"x": 10, "p": 15, "a": 0, "b": 0, "end": 0}
    reads = {"x": (), "p": ("x",), "a": ("p",), "b": ("a",), "end": ("p", "b")}
    needs_nbytes = {"a": 20, "b": 25}
    ops = (
        Op(n, r, (n,), 1.0, needs_nbytes.get(n, 0), Phase.ANY, recomputable or n != "x")
        for n, r in reads.items()
    )
    problem = Problem(tuple(Value(n, nbytes) for n, nbytes in sizes.items()), tuple(ops))
    assert cheapest_us(problem, 35) == time_us
    found = Solver(problem).solve(35)
    assert (found.status is Status.INFEASIBLE) == (time_us == NEVER)
    assert time_us in (NEVER, found.timeline.time_us)


def test_a_rerun_makes_outputs_beside_their_first_instance() -> None:
    """Op o makes `kept` and `w`, 10 bytes each; running it again for `w` takes 30."""
    values = (Value("kept", 10), Value("w", 10), Value("m", 0), Value("b", 0), Value("end", 0))
    ops = (
        Op("o", (), ("kept", "w"), 1.0, phase=Phase.ANY),
        Op("m", ("w",), ("m",), 1.0, phase=Phase.ANY),
        Op("b", ("m",), ("b",), 1.0, 15, Phase.ANY),
        Op("end", ("w", "b"), ("end",), 1.0, phase=Phase.ANY),
    )
    problem = Problem(values, ops, ("kept",))
    assert (cheapest_us(problem, 29), cheapest_us(problem, 30)) == (NEVER, 5.0)
    assert Solver(problem).solve(29).status is Status.INFEASIBLE
    assert Solver(problem).solve(30).plan.schedule == ("o", "m", "b", "o", "end")


@pytest.mark.slow
@pytest.mark.parametrize("first", [400, 1400, 2400])
def test_thousands_of_graphs_without_phases_are_solved_to_the_optimum(first: int) -> None:
    """The same for 3,000 more."""
    found = compared(random_graph, range(first, first + 1000))
    assert found.cheapest >= 0.97 * found.budgets
    assert found.lowest >= 0.95 * found.problems


@repeatable
@given(small_problems())
def test_more_budget_is_never_slower(problem: Problem) -> None:
    """Along ascending budgets the time falls or stays."""
    solver = Solver(problem)
    low = solver.smallest_peak().timeline.peak_nbytes
    times = [solver.solve(low + extra).timeline.time_us for extra in (0, 2, 5, 9, 30)]
    assert times == sorted(times, reverse=True)


@repeatable
@given(small_problems(), st.integers(2, 1000))
def test_scaling_bytes_and_budget_changes_nothing(problem: Problem, factor: int) -> None:
    """The same plan comes out when every size and the budget are multiplied."""
    scaled = Problem(
        tuple(Value(v.name, v.nbytes * factor) for v in problem.values),
        tuple(
            Op(
                o.name,
                o.inputs,
                o.outputs,
                o.time_us,
                o.workspace_nbytes * factor,
                o.phase,
                o.recomputable,
            )
            for o in problem.ops
        ),
        problem.outputs,
        problem.resident_nbytes * factor,
    )
    budget = Solver(problem).smallest_peak().timeline.peak_nbytes + 3
    one, many = Solver(problem).solve(budget), Solver(scaled).solve(budget * factor)
    assert one.timeline.time_us == pytest.approx(many.timeline.time_us)


@repeatable
@given(small_problems())
def test_json_round_trip_and_determinism(problem: Problem) -> None:
    """A problem read back is equal, and equal problems get equal plans."""
    again = Problem.from_json(problem.to_json())
    assert again == problem
    budget = Solver(problem).smallest_peak().timeline.peak_nbytes
    assert Solver(problem).solve(budget).plan == Solver(again).solve(budget).plan
    assert Solver(problem).solve(budget).timeline.peak_nbytes <= budget
