"""Constraints, statuses and what is said of wrong input."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from autoremat_solver import (
    Op,
    Phase,
    Plan,
    Problem,
    ProblemError,
    Solver,
    Status,
    StepKind,
    Value,
    check,
    simulate,
    solve,
)

from tests.solver.test_solver_networks import transformer

BACKWARD = Phase.BACKWARD


def tiny(**changes: object) -> Problem:
    """f: a -> b -> c; backward: z reads c, y reads b, x reads a and makes the output gx."""
    values = tuple(Value(name, 10) for name in "abc") + tuple(Value(f"g{n}", 1) for n in "zyx")
    ops = (
        Op("fa", (), ("a",), 1.0),
        Op("fb", ("a",), ("b",), 2.0),
        Op("fc", ("b",), ("c",), 3.0),
        Op("z", ("c",), ("gz",), 1.0, phase=BACKWARD),
        Op("y", ("gz", "b"), ("gy",), 1.0, phase=BACKWARD),
        Op("x", ("gy", "a"), ("gx",), 1.0, phase=BACKWARD),
    )
    values = tuple(replace(v, **changes) if v.name == "b" else v for v in values)  # type: ignore[arg-type]
    return Problem(values, ops, ("gx",))


FORWARD_STEPS = ("fa", "fb", "fc")


@pytest.mark.parametrize(
    ("schedule", "culprit"),
    [
        (("fa", "nope"), "nope"),
        (("fa", "fc", "z", "y", "x"), "fb"),
        (("fa", "fb", "fb", "fc", "z", "y", "x"), "fb"),
        ((*FORWARD_STEPS, "z", "y"), "x"),
        ((*FORWARD_STEPS, "z", "x", "y"), "x"),
    ],
)
def test_check_names_the_culprit(schedule: tuple[str, ...], culprit: str) -> None:
    """Unknown, missing, repeated and disordered operations are each named."""
    violations = check(tiny(), Plan.of(schedule))
    assert violations
    assert any(f"'{culprit}'" in violation for violation in violations)


@pytest.mark.parametrize(
    ("number", "kind", "complaint"),
    [
        (3, StepKind.FIRST_RUN, "Step 3 is a first run, but 'fa' ran before."),
        (1, StepKind.RECOMPUTE, "Step 1 is a recompute, but 'fb' did not run before."),
    ],
)
def test_a_step_is_of_the_kind_that_it_says(number: int, kind: StepKind, complaint: str) -> None:
    """Nothing runs twice for the first time, nor again before it ran: simulate refuses it too."""
    problem = chain_without_phases()
    plan = Plan.of(("fa", "fb", "fc", "fa", "fd"))
    assert [step.target for step in plan.steps if step.kind is StepKind.RECOMPUTE] == ["fa"]
    steps = list(plan.steps)
    steps[number] = replace(steps[number], kind=kind)
    assert check(problem, Plan(tuple(steps))) == [complaint]
    with pytest.raises(ValueError, match=f"{kind} of '{steps[number].target}'"):
        simulate(problem, Plan(tuple(steps)))


def test_check_sees_a_peak_above_the_budget() -> None:
    """Saving a, b and c takes 31 bytes; 30 are not enough."""
    plan = Plan.of((*FORWARD_STEPS, "z", "y", "x"))
    assert simulate(tiny(), plan).peak_nbytes == 31
    assert check(tiny(), plan, 31) == []
    assert "above the budget" in check(tiny(), plan, 30)[0]


def test_must_save_and_must_recompute_are_kept() -> None:
    """With must_save b is never made again, with must_recompute its first instance is not read."""
    saved = tiny(must_save=True)
    assert Solver(saved).smallest_peak().plan.schedule.count("fb") == 1
    assert check(saved, Plan.of((*FORWARD_STEPS, "z", "fb", "y", "x")))
    again = tiny(must_recompute=True)
    assert Solver(again).fastest().plan.schedule.count("fb") == 2
    assert check(again, Plan.of((*FORWARD_STEPS, "z", "y", "x")))


def test_an_impossible_value_is_an_error() -> None:
    """A value that may neither be read from the forward nor made again is named."""
    problem = tiny(must_recompute=True)
    ops = tuple(replace(op, recomputable=op.name != "fb") for op in problem.ops)
    with pytest.raises(ProblemError, match="'b'"):
        Solver(replace(problem, ops=ops))


def late_only(**changes: object) -> Problem:
    """f: x; EITHER m: x -> mask, which must be recomputed; backward: b, then c reads mask."""
    values = (Value("x", 10), Value("mask", 4, must_recompute=True), Value("g", 1), Value("h", 1))
    ops = (
        Op("f", (), ("x",), 5.0),
        replace(Op("m", ("x",), ("mask",), 1.0, phase=Phase.EITHER), **changes),  # type: ignore[arg-type]
        Op("b", ("x",), ("g",), 1.0, phase=BACKWARD),
        Op("c", ("g", "mask"), ("h",), 1.0, phase=BACKWARD),
    )
    return Problem(values, ops, ("h",))


@pytest.mark.parametrize("time_limit_s", [0, 5])
@pytest.mark.parametrize("outputs", [("h",), ("h", "mask")])
@pytest.mark.parametrize("recomputable", [True, False])
def test_what_must_be_recomputed_may_run_for_the_first_time_in_the_backward(
    recomputable: bool, outputs: tuple[str, ...], time_limit_s: float
) -> None:
    """Operation m runs there alone if it runs once, or if mask is an output."""
    problem = replace(late_only(recomputable=recomputable), outputs=outputs)
    found = Solver(problem, time_limit_s=time_limit_s).fastest()
    assert found.plan.schedule == ("f", "b", "m", "c")
    assert check(problem, found.plan) == []


@pytest.mark.parametrize("time_limit_s", [0, 5])
def test_what_only_recompute_would_read_need_not_be_readable(time_limit_s: float) -> None:
    """Value a, an output, may not be read in the backward: so b is saved, not made from it."""
    problem = tiny()
    values = tuple(replace(v, must_recompute=v.name == "a") for v in problem.values)
    ops = tuple(replace(op, inputs=("gy",)) if op.name == "x" else op for op in problem.ops)
    problem = replace(problem, values=values, ops=ops, outputs=("gx", "a"))
    found = Solver(problem, time_limit_s=time_limit_s).smallest_peak()
    assert check(problem, found.plan) == []
    assert found.plan.schedule.count("fb") == 1


def test_an_either_operation_runs_where_it_is_best() -> None:
    """mask: small and wanted late by the backward; no plan may run it twice in the forward."""
    values = (Value("big", 100), Value("mask", 1), Value("g", 1), Value("h", 1))
    ops = (
        Op("f", (), ("big",), 5.0),
        Op("m", ("big",), ("mask",), 1.0, phase=Phase.EITHER),
        Op("b", (), ("g",), 1.0, 50, phase=BACKWARD),
        Op("c", ("g", "mask"), ("h",), 1.0, phase=BACKWARD),
    )
    problem = Problem(values, ops, ("h",))
    found = solve(problem, 101)
    assert found.plan.schedule == ("f", "m", "b", "c")
    assert found.status is Status.OPTIMAL


@pytest.mark.parametrize("budget", ["1GB", 1.5, True, None])
def test_a_budget_of_the_wrong_type_is_an_error(budget: object) -> None:
    """Bytes are int."""
    with pytest.raises(TypeError, match="bytes as int"):
        solve(tiny(), budget)  # type: ignore[arg-type]


def test_sizes_that_no_machine_counts_are_an_error() -> None:
    """Up to 2^60 bytes together are planned for; more are not."""
    values = (Value("a", 1 << 59), Value("g", (1 << 59) - 5))
    ops = (Op("f", (), ("a",), 1.0, 5), Op("b", ("a",), ("g",), 1.0, phase=BACKWARD))
    problem = Problem(values, ops, ("g",))
    assert solve(problem, 1 << 60).status is Status.OPTIMAL
    with pytest.raises(ProblemError, match="together are 1152921504606846977 bytes"):
        replace(problem, resident_nbytes=1)


def test_negative_numbers_are_errors() -> None:
    """Neither budget nor time limit can be negative."""
    with pytest.raises(ValueError, match="negative"):
        solve(tiny(), -1)
    with pytest.raises(ValueError, match="time_limit_s"):
        Solver(tiny(), time_limit_s=-1)
    with pytest.raises(ValueError, match="bound_effort is -1"):
        Solver(tiny(), bound_effort=-1)


@pytest.mark.parametrize("limit", [{"time_limit_s": -1.0}, {"effort": -1.0}, {"effort": math.nan}])
def test_limits_of_one_call_are_looked_at_too(limit: dict[str, float]) -> None:
    """As those of the solver are."""
    with pytest.raises(ValueError, match=f"{next(iter(limit))} is .*: give"):
        Solver(tiny()).solve(20, **limit)


def test_a_time_limit_of_zero_gives_the_best_simple_plan() -> None:
    """No time is no reason to have no plan."""
    problem = transformer(3)
    budget = Solver(problem, time_limit_s=0).fastest().timeline.peak_nbytes
    found = solve(problem, budget, time_limit_s=0)
    assert not found.tried
    assert "prices" in found.left_out
    assert check(problem, found.plan, budget) == []


@pytest.mark.parametrize(
    "problem",
    [
        Problem((), ()),
        Problem((Value("a", 5),), (Op("f", (), ("a",), 1.0),), ("a",)),
        Problem((Value("g", 5),), (Op("b", (), ("g",), 1.0, phase=BACKWARD),), ("g",)),
        Problem((), (Op("f", (), (), 1.0, 5), Op("b", (), (), 1.0, phase=BACKWARD))),
        Problem((), (Op("f", (), (), 1.0, 5, Phase.ANY),)),
    ],
    ids=["empty", "no backward", "no forward", "no values", "no values, no phases"],
)
def test_degenerate_problems_have_plans(problem: Problem) -> None:
    """A step without a forward, without a backward, without both, or without values."""
    found = solve(problem, 5)
    assert check(problem, found.plan, 5) == []
    assert found.status is Status.OPTIMAL


def chain_without_phases() -> Problem:
    """Chain a, b, c, d in which d reads a too; any operation may run again at any time."""
    reads = {"a": (), "b": ("a",), "c": ("b",), "d": ("c", "a")}
    values = tuple(Value(name, 10) for name in reads)
    ops = tuple(Op(f"f{name}", r, (name,), 1.0, phase=Phase.ANY) for name, r in reads.items())
    return Problem(values, ops)


def test_a_graph_without_phases_may_repeat_anything_after_its_first_run() -> None:
    """Recomputing `a` right before `d` frees it while `c` is made."""
    problem = chain_without_phases()
    plan = Plan.of(("fa", "fb", "fc", "fa", "fd"))
    assert check(problem, plan) == []
    assert simulate(problem, plan).live_nbytes == (10, 20, 20, 20, 30)
    assert any("'fc'" in v for v in check(problem, Plan.of(("fa", "fc", "fb", "fd"))))
    assert check(problem, Plan.of(("fa", "fb", "fb", "fc", "fd"))) == []
    assert any("'fd'" in v for v in check(problem, Plan.of(("fa", "fb", "fc"))))


def test_phases_are_given_to_all_operations_or_to_none() -> None:
    """A graph half with and half without phases is refused by name."""
    problem = chain_without_phases()
    mixed = (*problem.ops[:-1], replace(problem.ops[-1], phase=BACKWARD))
    with pytest.raises(ProblemError, match="'fd'"):
        replace(problem, ops=mixed)
