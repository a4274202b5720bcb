"""The presolve: what it removes, and that nothing is lost on the way back."""

from __future__ import annotations

import pytest
from autoremat_solver import Op, Phase, Plan, Problem, ProblemError, Solver, Value, check, simulate
from autoremat_solver.model.indexed import index
from autoremat_solver.model.readable import require_consistent
from autoremat_solver.model.reduce import reduce
from autoremat_solver.plans.fast_measure import fast_measure, fast_saved, fast_spans
from autoremat_solver.plans.front import candidate
from autoremat_solver.simulate import measure, saved_of, spans_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.solver.exhaustive import cheapest_us
from tests.solver.random_problems import MIDDLE, random_step
from tests.solver.test_solver_networks import transformer

repeatable = settings(deadline=None, max_examples=300, derandomize=True, database=None)


def tower(width: int = 8) -> Problem:
    """Chain x -> a -> b -> c, with x and c read by the backward: a and b serve c alone.

    Backward: g0 reads c (and works on 4 bytes), g1 reads g0 (backward only), g2 reads g1 and x.
    """
    size = {"x": width, "a": width, "b": width, "c": width, "s": 0, "g0": 4, "g1": 4, "g2": 4}
    ops = (
        Op("x", (), ("x", "s"), 5.0),
        Op("a", ("x",), ("a",), 1.0),
        Op("b", ("a", "x"), ("b",), 2.0),
        Op("c", ("b",), ("c",), 3.0),
        Op("g0", ("c", "s"), ("g0",), 1.0, 4, Phase.BACKWARD),
        Op("g1", ("g0",), ("g1",), 1.0, phase=Phase.BACKWARD),
        Op("g2", ("g1", "x", "s"), ("g2",), 1.0, phase=Phase.BACKWARD),
    )
    return Problem(tuple(Value(n, b) for n, b in size.items()), ops, ("g2",))


def test_a_run_with_one_reader_each_becomes_one_operation() -> None:
    """Both a and b exist for c only: one operation of their time, which makes c from x."""
    reduced = reduce(tower())
    merged = next(op for op in reduced.problem.ops if "c" in op.outputs)
    assert reduced.parts[merged.name] == ("a", "b", "c")
    assert (merged.inputs, merged.time_us) == (("x",), 6.0)


def test_empty_values_leave_the_problem() -> None:
    """The empty value s is gone, and nobody reads it."""
    reduced = reduce(tower()).problem
    assert "s" not in reduced.value_by_name
    assert all("s" not in (*op.inputs, *op.outputs) for op in reduced.ops)


def test_a_backward_operation_without_forward_reads_joins_the_one_before() -> None:
    """g1 reads g0 only: g0 and g1 become one."""
    assert ("g0", "g1") in reduce(tower()).parts.values()


def test_a_problem_without_phases_comes_back_unchanged() -> None:
    """Operations that may run again at any time are left alone."""
    ops = tuple(
        Op(op.name, op.inputs, op.outputs, op.time_us, phase=Phase.ANY) for op in tower().ops
    )
    problem = Problem(tower().values, ops, tower().outputs)
    assert reduce(problem).problem is problem


@st.composite
def plans(draw: st.DrawFn, problem: Problem) -> Plan:
    """A plan of the problem with a random save set."""
    indexed = index(problem)
    saved = frozenset(v for v in indexed.candidates if draw(st.booleans()))
    return indexed.plan(candidate(indexed, saved, "random").steps)


def chained(seed: int) -> Problem:
    """A random step with runs that can merge: each operation's result passes through two more."""
    problem = random_step(seed, MIDDLE)
    values, ops, last = list(problem.values), [], {}
    for op in problem.ops:
        ops.append(
            Op(
                op.name,
                tuple(last.get(n, n) for n in op.inputs),
                op.outputs,
                op.time_us,
                op.workspace_nbytes,
                op.phase,
                op.recomputable,
            )
        )
        name = op.outputs[0]
        if name in problem.outputs or op.phase is Phase.EITHER or seed % 3 == 0:
            continue
        before, nbytes = name, problem.value_by_name[name].nbytes
        for i in range(2):
            new = f"{name}_{i}"
            values.append(Value(new, max(0, nbytes - (seed + i) % 2)))
            ops.append(Op(f"p_{new}", (before,), (new,), 1.0, seed % 4, op.phase))
            before = new
        last[name] = before
    return Problem(tuple(values), tuple(ops), problem.outputs, problem.resident_nbytes)


@repeatable
@given(st.data(), st.integers(0, 10_000))
def test_a_lifted_plan_is_valid_and_takes_as_much(data: st.DataObject, seed: int) -> None:
    """Every kind of operation and value: check passes, time and peak are equal."""
    problem = chained(seed)
    try:
        require_consistent(index(problem))
    except ProblemError:
        return
    reduction = reduce(problem)
    plan = data.draw(plans(reduction.problem))
    assert check(reduction.problem, plan) == []
    lifted = reduction.lift(plan)
    assert check(problem, lifted) == []
    small, whole = simulate(reduction.problem, plan), simulate(problem, lifted)
    assert abs(small.time_us - whole.time_us) < 1e-6
    assert whole.peak_nbytes == small.peak_nbytes


@st.composite
def small_steps(draw: st.DrawFn) -> Problem:
    """At most six forward and five backward operations, most of them in chains."""
    count = draw(st.integers(2, 6))
    values, ops = [], []
    for i in range(count):
        before = {i - 1} if i and draw(st.integers(0, 3)) else set()
        more = draw(st.sets(st.integers(0, i - 1), max_size=1)) if i else set()
        values.append(Value(f"v{i}", draw(st.integers(0, 4))))
        reads = tuple(f"v{j}" for j in sorted(before | more))
        time_us, workspace = float(draw(st.integers(0, 9))), draw(st.sampled_from((0, 0, 2)))
        ops.append(Op(f"f{i}", reads, (f"v{i}",), time_us, workspace))
    last: tuple[str, ...] = ()
    outputs = []
    for k in range(draw(st.integers(1, 5))):
        reads = tuple(f"v{j}" for j in sorted(draw(st.sets(st.integers(0, count - 1), max_size=1))))
        values.append(Value(f"g{k}", draw(st.integers(0, 4))))
        ops.append(Op(f"b{k}", last + reads, (f"g{k}",), 1.0, phase=Phase.BACKWARD))
        last = (f"g{k}",)
        if draw(st.integers(0, 3)) == 0:
            outputs.append(f"g{k}")
    return Problem(tuple(values), tuple(ops), tuple(outputs))


@pytest.mark.thorough
@repeatable
@given(small_steps(), st.integers(0, 12))
def test_no_optimum_is_lost(problem: Problem, extra: int) -> None:
    """The exhaustive search finds the same least time in both, at any budget."""
    reduction = reduce(problem)
    budget = max(simulate(problem, Plan.of(op.name for op in problem.ops)).live_nbytes)
    budget = max(0, budget - extra)
    assert cheapest_us(reduction.problem, budget) == cheapest_us(problem, budget)


def test_operations_merge_in_the_oracle_test() -> None:
    """The search above compares problems that differ."""
    differ = 0

    @settings(repeatable, max_examples=100)
    @given(small_steps())
    def count(problem: Problem) -> None:
        nonlocal differ
        differ += bool(reduce(problem).parts)

    count()
    assert differ > 20


@repeatable
@given(st.data(), st.integers(0, 10_000))
def test_the_fast_measure_is_the_definition(data: st.DataObject, seed: int) -> None:
    """Live bytes and time of random schedules are equal bit for bit."""
    problem = random_step(seed, MIDDLE)
    indexed = index(problem)
    plan = data.draw(plans(problem))
    steps = indexed.numbers(plan)
    assert fast_measure(indexed, steps) == measure(indexed, steps)


@repeatable
@given(st.data(), st.integers(0, 10_000))
def test_the_fast_spans_are_the_definition(data: st.DataObject, seed: int) -> None:
    """Instances of random schedules, and which of them the backward reads, are the same."""
    problem = random_step(seed, MIDDLE)
    indexed = index(problem)
    steps = indexed.numbers(data.draw(plans(problem)))
    spans = fast_spans(indexed, steps)
    found = zip(spans.value.tolist(), spans.born.tolist(), spans.last.tolist(), strict=True)
    assert sorted(found) == sorted(spans_of(indexed, steps))
    assert fast_saved(indexed, steps, spans) == saved_of(indexed, steps)


@pytest.mark.thorough
def test_the_solver_answers_for_the_original_problem() -> None:
    """Plan, timeline, bound and floor of a reduced step speak of the step that was given."""
    problem = transformer(4)
    solver = Solver(problem, time_limit_s=4)
    low, high = solver.smallest_peak(), solver.fastest()
    budget = (low.timeline.peak_nbytes + high.timeline.peak_nbytes) // 2
    found = solver.solve(budget)
    assert check(problem, found.plan, budget) == []
    assert found.timeline == simulate(problem, found.plan)
    assert found.bound_us <= found.timeline.time_us
    assert found.floor_nbytes <= low.timeline.peak_nbytes


def test_an_operation_may_run_again_beside_an_empty_value_that_must_be_saved() -> None:
    """What must be saved stays in the problem then: without it, smaller peaks would be lost."""
    problem = random_step(4911)
    empty = next(value for value in problem.values if value.must_save and not value.nbytes)
    assert problem.producer_of[empty.name].recomputable
    for budget_nbytes in range(18, 27):
        expected = cheapest_us(problem, budget_nbytes)
        assert cheapest_us(reduce(problem).problem, budget_nbytes) == expected
