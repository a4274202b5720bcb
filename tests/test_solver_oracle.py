"""The solver against an exhaustive search on small problems.

The search knows no schedule: its states are (backward operations done, values held), its moves
run one operation or let go of one value, and Dijkstra finds the cheapest way to the end.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import pytest
from autoremat_solver import Op, Phase, Problem, Solver, Value, check, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

repeatable = settings(deadline=None, max_examples=25, derandomize=True, database=None)

Held = frozenset[str]


def cheapest_us(problem: Problem, budget_nbytes: int) -> float:
    """Least time of any plan within the budget; infinite if there is none. FORWARD only."""
    size = {v.name: v.nbytes for v in problem.values}
    forward = [op for op in problem.ops if op.phase is Phase.FORWARD]
    backward = [op for op in problem.ops if op.phase is Phase.BACKWARD]
    pinned = set(problem.outputs)

    def fits(held: set[str] | Held, op: Op) -> bool:
        live = set(held) | set(op.inputs) | set(op.outputs)
        used = sum(size[name] for name in live) + op.workspace_nbytes
        return used + problem.resident_nbytes <= budget_nbytes

    base = sum(op.time_us for op in (*forward, *backward))
    queue: list[tuple[float, int, int, Held]] = []
    order = itertools.count()
    for held in _forward_ends(problem, forward, pinned, fits):
        saving = sum(problem.value_by_name[name].save_us for name in held - pinned)
        heapq.heappush(queue, (saving, next(order), 0, held))
    seen: set[tuple[int, Held]] = set()
    while queue:
        cost, _, done, held = heapq.heappop(queue)
        if done == len(backward):
            return base + cost
        if (done, held) in seen:
            continue
        seen.add((done, held))
        for name in held - pinned:
            heapq.heappush(queue, (cost, next(order), done, held - {name}))
        for op in (*forward, backward[done]):
            if set(op.inputs) <= held and fits(held, op):
                is_next = op.phase is Phase.BACKWARD
                if not is_next and (not op.recomputable or done == 0):
                    continue
                step = (cost, done + 1) if is_next else (cost + op.time_us, done)
                heapq.heappush(queue, (step[0], next(order), step[1], held | set(op.outputs)))
    return float("inf")


def _forward_ends(problem, forward, pinned, fits) -> Iterator[Held]:  # type: ignore[no-untyped-def]
    """Every set of values that a forward within the budget can hand over."""
    names = [name for op in forward for name in op.outputs]
    for bits in itertools.product((False, True), repeat=len(names)):
        kept = {name for name, bit in zip(names, bits, strict=True) if bit} | (pinned & set(names))
        held: set[str] = set()
        for i, op in enumerate(forward):
            if not fits(held, op):
                break
            later = {name for after in forward[i + 1 :] for name in after.inputs}
            held = {name for name in held | set(op.outputs) if name in later or name in kept}
        else:
            yield frozenset(held)


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
    assert cheapest_us(problem, low.floor_nbytes - 1) == float("inf")


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
        ([10, 10, 10, 10, 10, 10], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_small_chains_are_solved_to_the_optimum(sizes: list[int], times: list[float]) -> None:
    """On v0 -> v1 -> ... -> vn every budget from the smallest peak up gets the cheapest plan."""
    problem = small_chain(sizes, times)
    solver = Solver(problem)
    low = solver.smallest_peak().timeline.peak_nbytes
    assert cheapest_us(problem, low - 1) == float("inf")
    for budget in range(low, sum(sizes) + 3, 5):
        assert solver.solve(budget).timeline.time_us == pytest.approx(cheapest_us(problem, budget))


def test_an_uneven_small_chain_is_solved_to_15_percent() -> None:
    """Five values of five sizes: the search does not cover saving a value for a while only."""
    problem = small_chain([40, 10, 20, 30, 5], [1.0, 2.0, 3.0, 4.0, 5.0])
    solver = Solver(problem)
    low = solver.smallest_peak().timeline.peak_nbytes
    for budget in range(low, 108, 5):
        cheapest = cheapest_us(problem, budget)
        assert cheapest <= solver.solve(budget).timeline.time_us <= 1.15 * cheapest


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
