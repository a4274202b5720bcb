"""Values that wait on the host: what plans with copies take, which are plans, who finds them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from autoremat_solver import (
    Link,
    OffloadSolver,
    Op,
    Phase,
    Plan,
    Problem,
    ProblemError,
    Region,
    Solver,
    Status,
    Step,
    StepKind,
    Value,
    check,
    simulate,
)
from autoremat_solver.simulate import step_times

from tests.solver import exhaustive
from tests.solver.exhaustive_offload import cheapest_us
from tests.solver.random_problems import MIDDLE, TINY, random_graph, random_overwriting_step

PLENTY = 1 << 40


def step(*, link: Link | None = None) -> Problem:
    """Four operations of 10 us: `big` lies idle while `work` and `back` run.

    make --big(8)----------------------> end --g(1)
      `--a(1)--> work --b(4)--> back --c(1)--^
    """
    values = (Value("big", 8), Value("a", 1), Value("b", 4), Value("c", 1), Value("g", 1))
    ops = (
        Op("make", (), ("big", "a"), 10.0),
        Op("work", ("a",), ("b",), 10.0),
        Op("back", ("b",), ("c",), 10.0, phase=Phase.BACKWARD),
        Op("end", ("big", "c"), ("g",), 10.0, phase=Phase.BACKWARD),
    )
    return Problem(values, ops, ("g",), 100, link=link or Link(2.0, 1.0, latency_us=1.0))


def plan(text: str) -> Plan:
    """Runs by their names, `+v` and `v!` for the copy of v to the host, `-v` for the one back."""
    kinds = {"+": StepKind.OFFLOAD, "!": StepKind.RELEASE, "-": StepKind.RELOAD}
    runs = iter(Plan.of(word for word in text.split() if not set(word) & set(kinds)).steps)
    return Plan(
        tuple(
            next((Step(k, word.strip("+!-")) for sign, k in kinds.items() if sign in word), None)
            or next(runs)
            for word in text.split()
        )
    )


def test_a_copy_takes_no_time_where_computing_has_other_things_to_do() -> None:
    """8 bytes take 1 + 4 us to the host and 1 + 8 back: nobody waits for either."""
    found = simulate(step(), plan("make +big work big! -big back end"))
    assert (found.time_us, found.stall_us) == (40.0, 0.0)
    assert found.live_nbytes == (109, 109, 113, 112, 112, 113, 110)
    assert found.host_nbytes == (0, 8, 8, 8, 8, 8, 8)
    assert check(step(), plan("make +big work big! -big back end")) == []


def test_a_value_that_has_left_takes_no_bytes_until_it_comes_back() -> None:
    """The wait for the copy costs its 5 us, the reload before the last operation its 9."""
    found = simulate(step(), plan("make +big big! work back -big end"))
    assert found.live_nbytes == (109, 109, 109, 105, 105, 109, 110)
    assert (found.time_us, found.stall_us) == (54.0, 14.0)


def test_a_slower_link_costs_time_and_no_bytes() -> None:
    """Which bytes are live follows from the order of the steps alone."""
    steps = plan("make +big work big! back -big end")
    fast, slow = (simulate(step(link=Link(b, b)), steps) for b in (8.0, 0.1))
    assert fast.live_nbytes == slow.live_nbytes
    assert fast.host_nbytes == slow.host_nbytes
    assert (fast.time_us, slow.time_us) == (41.0, 40.0 + 70.0 + 80.0)


def test_what_it_takes_to_ask_for_copies_is_time_of_the_plan() -> None:
    """3 us each way, in which the copies themselves do not wait."""
    asked = replace(step(), link=Link(2.0, 1.0, latency_us=1.0, ask_us=3.0))
    steps = plan("make +big work big! -big back end")
    found = simulate(asked, steps)
    assert (found.time_us, found.stall_us) == (46.0, 0.0)
    assert check(asked, steps) == []


def test_what_computing_loses_beside_copies_is_time_of_the_plan() -> None:
    """A half of each: 5 us out at 2 B/us and 9 us back, 1 us of them the latency."""
    slowed = replace(step(), link=Link(2.0, 1.0, latency_us=1.0, slowdown=0.5))
    steps = plan("make +big work big! -big back end")
    found = simulate(slowed, steps)
    assert (found.time_us, found.stall_us) == (40.0 + 2.5 + 4.5, 0.0)
    assert check(slowed, steps) == []


def test_copies_that_take_long_to_ask_for_are_left_where_recompute_is_faster() -> None:
    """Of the same link and budget."""
    free = OffloadSolver(step(link=Link(2.0, 2.0)), PLENTY).solve(110)
    assert free.plan.offloaded
    for link in (Link(2.0, 2.0, ask_us=9.0), Link(2.0, 2.0, slowdown=3.0)):
        slow = OffloadSolver(step(link=link), PLENTY).solve(110)
        assert not slow.plan.offloaded
        assert slow.plan.recomputed


def test_an_engine_takes_one_copy_after_the_other_and_both_work_at_once() -> None:
    """`a` waits for `big` on the way out, while nothing keeps the way back busy."""
    problem = replace(step(), link=Link(1.0, 1.0))
    both = plan("make +big +a big! a! -a work -big back end")
    assert simulate(problem, both).stall_us == 8.0 + 1.0 + 1.0  # big out, a out, a back
    assert check(problem, both) == []


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ("make work big! back end", "none is on its way"),
        ("make +big work back end", "Nobody waits for the copy of 'big'"),
        ("make +big work -big big! back end", "not on the host"),
        ("make +big work big! back end", "which has left and is not back"),
        ("make +big +big big! work back -big end", "a second time"),
        ("make +big big! work back -big -big end", "Nobody waits for the copy of 'big'"),
        ("make work back +c c! end", "which has left and is not back"),
        ("make work back +big big! end -big", "which has left and is not back"),
        ("make work back end +big big!", "never comes back"),
        ("+big make big! work -big back end", "not made yet"),
        ("make work back end +g g! -g", "an output stays"),
        ("make work back end +x x! -x", "unknown value"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_culprit(steps: str, says: str) -> None:
    """One sentence for each way to get copies wrong."""
    assert says in check(step(), plan(steps))[0]


def test_both_budgets_are_checked() -> None:
    """Each memory has its own."""
    steps = plan("make +big big! work back -big end")
    assert check(step(), steps, 110, 8) == []
    assert "on the device" in check(step(), steps, 109, 8)[0]
    assert "on the host" in check(step(), steps, 110, 7)[0]


def test_without_a_link_no_value_leaves() -> None:
    """Neither `check` nor `simulate` takes such a plan, and nobody looks for one."""
    problem, steps = replace(step(), link=None), plan("make +big big! work back -big end")
    assert "no link" in check(problem, steps)[0]
    with pytest.raises(ValueError, match="no link"):
        simulate(problem, steps)
    with pytest.raises(ValueError, match="no link"):
        OffloadSolver(problem, PLENTY)


def test_a_link_is_part_of_the_problem_and_of_its_file() -> None:
    """What has none is written as before; numbers that are no speed are refused."""
    assert Problem.from_json(step().to_json()) == step()
    assert "link" not in replace(step(), link=None).as_data()
    with pytest.raises(ProblemError, match="out_nbytes_per_us=0"):
        step(link=Link(0.0, 1.0))
    with pytest.raises(ProblemError, match="latency_us=-1"):
        step(link=Link(1.0, 1.0, -1.0))
    for name in ("ask_us", "slowdown", "latency_us"):
        with pytest.raises(ProblemError, match=rf"{name}=-1\.0"):
            step(link=Link(1.0, 1.0, **{name: -1.0}))


def test_a_plan_for_all_runs_of_a_region_does_not_offload() -> None:
    """Every run would have to take the same steps; the whole step written out may."""
    problem = replace(step(), regions=(Region("r", ("work",), 2),))
    assert "regions" in check(problem, plan("make +big big! work back -big end"))[0]


def _with_copies(problem: Problem, found: Plan, rng: random.Random) -> Plan:
    """The plan with values sent away at random between two accesses."""
    steps = list(found.steps)
    for _ in range(rng.randint(1, 12)):
        last: dict[str, int] = {}
        gaps: list[tuple[str, int, int]] = []
        for place, one in enumerate(steps):
            op = problem.op_by_name.get(one.target) if one.is_run else None
            for name in op.inputs if op else ():
                if name not in problem.outputs and last[name] >= 0:
                    gaps.append((name, last[name], place))
            reached = {*op.inputs, *op.outputs} if op else {one.target}
            last.update(dict.fromkeys(reached, place if op else -1))
        if not gaps:
            break
        name, after, before = rng.choice(gaps)
        places = sorted((rng.randint(after + 1, before) for _ in range(3)), reverse=True)
        kinds = (StepKind.RELOAD, StepKind.RELEASE, StepKind.OFFLOAD)
        for place, kind in zip(places, kinds, strict=True):
            steps.insert(place, Step(kind, name))
    return Plan(tuple(steps))


@pytest.mark.parametrize("seed", range(60))
def test_the_two_definitions_agree_on_random_plans_and_need_every_copy(seed: int) -> None:
    """`check` counts bytes and time by itself; without any one of its copies a plan is none."""
    rng = random.Random(seed)
    shape = MIDDLE if seed % 2 else TINY
    problem = (random_graph if seed % 3 == 0 else random_overwriting_step)(seed, shape)
    rates = rng.uniform(1, 20), rng.uniform(1, 20), rng.random()
    costs = {name: rng.choice((0.0, rng.random())) for name in ("ask_us", "slowdown")}
    problem = replace(problem, link=Link(*rates, **costs))
    try:
        alone = Solver(problem, time_limit_s=0).smallest_peak().plan
    except ProblemError:
        pytest.skip("it can neither save nor recompute what it needs")
    found = _with_copies(problem, alone, rng)
    assert check(problem, found) == []
    whole_us = sum(stall_us + time_us for stall_us, time_us in step_times(problem, found))
    assert whole_us == pytest.approx(simulate(problem, found).time_us)
    for number, one in enumerate(found.steps):
        if not one.is_run:
            assert check(problem, Plan(found.steps[:number] + found.steps[number + 1 :]))


def chain(seed: int) -> Problem:
    """Three layers forward and back, of random sizes and times; the last gradient is an output."""
    rng, count = random.Random(seed), 3
    values = [Value(f"v{i}", rng.randint(2, 6)) for i in range(count)]
    values += [Value(f"g{i}", rng.randint(1, 3)) for i in range(count)]
    ops = [
        Op(f"f{i}", (f"v{i - 1}",) if i else (), (f"v{i}",), float(rng.randint(1, 9)))
        for i in range(count)
    ]
    for i in reversed(range(count)):
        reads = (f"v{i}", f"g{i + 1}")[: 2 if i + 1 < count else 1]
        ops.append(Op(f"b{i}", reads, (f"g{i}",), float(rng.randint(1, 9)), phase=Phase.BACKWARD))
    rates = rng.choice((1, 2, 4)), rng.choice((1, 2, 4)), rng.choice((0, 1))
    link = Link(*rates, ask_us=0.5 * (seed % 2), slowdown=0.25 * (seed % 3))
    return Problem(tuple(values), tuple(ops), ("g0",), link=link)


@pytest.mark.parametrize(
    "seed", [11, 16, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (5, 6, 10, 17))]
)
def test_no_plan_is_better_than_the_best_and_no_bound_above_it(seed: int) -> None:
    """Against brute force over both memories, at the middle of the budgets within reach."""
    problem = chain(seed)
    solver = OffloadSolver(problem, PLENTY)
    low = solver.smallest_peak().timeline.peak_nbytes
    budget = (low + solver.solver.fastest().timeline.peak_nbytes) // 2
    found = solver.solve(budget)
    assert check(problem, found.plan, budget, PLENTY) == []
    cheapest = cheapest_us(problem, budget, PLENTY)
    assert found.bound_us <= cheapest <= found.timeline.time_us <= 1.3 * cheapest
    assert cheapest <= exhaustive.cheapest_us(problem, budget)
    assert found.timeline.time_us <= solver.solver.solve(budget).timeline.time_us


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_no_plan_is_below_the_floor(seed: int) -> None:
    """Not even one that sends everything away at once."""
    problem = chain(seed)
    floor_nbytes = OffloadSolver(problem, PLENTY).smallest_peak().floor_nbytes
    assert cheapest_us(problem, floor_nbytes - 1, PLENTY) == exhaustive.NEVER


def test_it_finds_the_best_plan_of_a_step_that_recompute_cannot_help() -> None:
    """`make` is expensive and `big` may not be made again: it leaves, and costs nothing."""
    problem = step()
    ops = tuple(replace(op, recomputable=False) for op in problem.ops)
    problem = replace(problem, ops=ops)
    assert Solver(problem).smallest_peak().timeline.peak_nbytes == 113
    found = OffloadSolver(problem, PLENTY).solve(110)
    assert found.plan.offloaded == ("big",)
    assert found.timeline.time_us == cheapest_us(problem, 110, PLENTY)


def test_where_the_link_is_fast_enough_a_budget_costs_nothing() -> None:
    """The proven bound is that of a step without a budget, for nothing can be faster."""
    problem = step(link=Link(100.0, 100.0))
    found = OffloadSolver(problem, PLENTY).smallest_peak()
    assert found.timeline.peak_nbytes == found.floor_nbytes == 110
    assert found.timeline.time_us == pytest.approx(40.0 + 0.16)
    assert OffloadSolver(problem, PLENTY).solve(113).status is Status.OPTIMAL


def test_a_host_without_room_leaves_recompute_alone() -> None:
    """What the host may hold is kept; with nothing the plan is the one without copies."""
    problem, budget = chain(5), Solver(chain(5)).smallest_peak().timeline.peak_nbytes
    alone = Solver(problem).solve(budget)
    found = OffloadSolver(problem, 0).solve(budget)
    assert (found.plan, found.plan.offloaded) == (alone.plan, ())
    for host_nbytes in range(12):
        found = OffloadSolver(problem, host_nbytes).solve(budget)
        assert found.timeline.host_peak_nbytes <= host_nbytes
        assert found.timeline.time_us <= alone.timeline.time_us


def test_pinned_memory_is_given_in_powers_of_two() -> None:
    """Five bytes take eight there: so says the timeline, and a host of seven takes none."""
    values = (replace(step().values[0], nbytes=5), *step().values[1:])
    pinned = replace(step(link=Link(2.0, 1.0, 1.0, is_pinned=True)), values=values)
    found = OffloadSolver(pinned, 8).solve(109)
    assert check(pinned, found.plan, 109, 8) == []
    assert found.timeline.host_peak_nbytes == 8
    assert check(pinned, found.plan, 109, 7)
    assert not OffloadSolver(pinned, 7).smallest_peak().plan.offloaded
    assert OffloadSolver(replace(pinned, link=Link(2.0, 1.0, 1.0)), 5).solve(109).plan.offloaded
    assert Problem.from_json(pinned.to_json()) == pinned


def test_a_budget_below_all_plans_is_refused_with_the_smallest() -> None:
    """The status says so, and the floor is below what was found."""
    found = OffloadSolver(step(), PLENTY).solve(50)
    assert found.status is Status.INFEASIBLE
    assert found.floor_nbytes <= found.timeline.peak_nbytes == 110


def test_recompute_may_be_left_out() -> None:
    """Then every operation runs once, and only copies keep the budget."""
    found = OffloadSolver(chain(5), PLENTY, recompute=False).smallest_peak()
    assert not found.plan.recomputed
    assert found.plan.offloaded


def test_one_problem_one_plan() -> None:
    """Nothing in it is left to chance or to the clock."""
    problem = replace(random_overwriting_step(7, MIDDLE), link=Link(5.0, 5.0))
    budget = OffloadSolver(problem, 60).smallest_peak().timeline.peak_nbytes
    assert (
        OffloadSolver(problem, 60).solve(budget).plan
        == OffloadSolver(problem, 60).solve(budget).plan
    )
