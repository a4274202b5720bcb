"""Regions: what runs several times is stated once, and means what it says written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autoremat_solver import (
    Op,
    Phase,
    Plan,
    Problem,
    ProblemError,
    Region,
    Solver,
    Value,
    check,
    read_problem,
    simulate,
    unrolled,
    unrolled_plan,
)

from tests.solver.random_problems import random_region_plan, random_regions

BLOCK = Region("block", ("f", "g", "G", "F"), 3, (("x", "y"), ("gy", "gx")))


def stack(count: int = 3, **changes: object) -> Problem:
    """Embedding e: x, head h and H, and between them a block of f: x -> a, g: a -> y.

    Its backward: G reads gy and a, F reads G's and x and makes gx and the gradient w, an output.
    """
    sizes = {"x": 8, "a": 32, "y": 8, "z": 1, "gy": 8, "ga": 32, "gx": 8, "w": 2}
    backward = Phase.BACKWARD
    ops = (
        Op("e", (), ("x",), 1.0),
        Op("f", ("x",), ("a",), 2.0),
        Op("g", ("a",), ("y",), 3.0),
        Op("h", ("y",), ("z",), 1.0),
        Op("H", ("z", "y"), ("gy",), 1.0, phase=backward),
        Op("G", ("gy", "a"), ("ga",), 3.0, phase=backward),
        Op("F", ("ga", "x"), ("gx", "w"), 4.0, phase=backward),
        Op("E", ("gx",), (), 1.0, phase=backward),
    )
    values = tuple(Value(name, nbytes) for name, nbytes in sizes.items())
    region = replace(BLOCK, **{"count": count, **changes})  # type: ignore[arg-type]
    return Problem(values, ops, ("w",), 100, (region,))


SAVING = Plan.of("efghHGFE")
AGAIN = Plan.of("efghHfGFE")


def test_a_region_runs_forward_and_then_backward_in_reverse() -> None:
    """Each run reads what the one before it made; outside, the last run is read."""
    assert [(op.name, op.inputs, op.outputs) for op in unrolled(stack(2)).ops] == [
        ("e", (), ("x",)),
        ("f@1", ("x",), ("a@1",)),
        ("g@1", ("a@1",), ("y@1",)),
        ("f@2", ("y@1",), ("a@2",)),
        ("g@2", ("a@2",), ("y@2",)),
        ("h", ("y@2",), ("z",)),
        ("H", ("z", "y@2"), ("gy",)),
        ("G@2", ("gy", "a@2"), ("ga@2",)),
        ("F@2", ("ga@2", "y@1"), ("gx@2", "w@2")),
        ("G@1", ("gx@2", "a@1"), ("ga@1",)),
        ("F@1", ("ga@1", "x"), ("gx@1", "w@1")),
        ("E", ("gx@1",), ()),
    ]
    assert unrolled(stack(2)).outputs == ("w@1", "w@2")


def test_one_plan_holds_for_all_runs() -> None:
    """What it makes again is made again in every run; a problem without regions stays as it is."""
    found = unrolled_plan(stack(2), AGAIN)
    assert " ".join(found.schedule) == "e f@1 g@1 f@2 g@2 h H f@2 G@2 F@2 f@1 G@1 F@1 E"
    assert found.recomputed == {"f@1", "f@2"}
    assert unrolled(unrolled(stack(2))) == unrolled(stack(2))
    assert unrolled_plan(unrolled(stack(2)), found) == found


def test_every_run_holds_what_it_saves_until_its_backward() -> None:
    """At G@3, beside 100 resident: gy, ga, three x (32 in y's and x), and a of the runs 1 to 3."""
    assert simulate(stack(), SAVING).peak_nbytes == 100 + 8 + 32 + 3 * 8 + 3 * 32
    assert simulate(stack(), AGAIN).peak_nbytes == 100 + 8 + 32 + 3 * 8 + 1 * 32
    assert simulate(stack(), AGAIN).time_us == 3 * 12.0 + 3 * 2.0 + 4.0


def test_check_judges_the_whole_step() -> None:
    """A plan whose steps of a region stand apart is none; a budget is that of all runs."""
    assert check(stack(), AGAIN) == check(stack(), SAVING, 260) == []
    assert "above the budget of 259" in check(stack(), SAVING, 259)[0]
    apart = Plan.of("efghHfGeFE")
    assert check(stack(), apart) == [
        "Operation 'F' stands apart from the others of the region 'block': they run together in "
        "the forward, and in the backward."
    ]
    with pytest.raises(ProblemError, match="'F' stands apart"):
        simulate(stack(), apart)


def test_the_solver_plans_the_step_written_out() -> None:
    """Stated once it is refused with the remedy; written out it is as good as one plan for all."""
    with pytest.raises(ProblemError, match=r"unrolled\(problem\)"):
        Solver(stack())
    found = Solver(unrolled(stack())).solve(simulate(stack(), AGAIN).peak_nbytes)
    assert check(unrolled(stack()), found.plan) == []
    assert found.timeline.time_us <= simulate(stack(), AGAIN).time_us


def test_regions_are_kept_in_json() -> None:
    """And a text without them, as older versions wrote it, is read."""
    assert read_problem(stack().to_json()) == stack()
    plain = replace(stack(), regions=())
    assert read_problem(plain.to_json().replace(',\n "regions": []', "")) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count=0"),
        ({"count": True}, "count=True"),
        ({"ops": ("f", "nope")}, "unknown operation 'nope'"),
        ({"ops": ("f", "f")}, "'f' appears in the regions twice"),
        ({"ops": ("f", "h"), "carried": ()}, "'h' stands apart"),
        ({"carried": (("a", "y"),)}, r"carries \('a', 'y'\)"),
        ({"carried": (("x", "z"),)}, r"carries \('x', 'z'\)"),
        ({"carried": (("nope", "y"),)}, r"carries \('nope', 'y'\)"),
    ],
)
def test_a_region_that_contradicts_its_problem_is_refused(
    changes: dict[str, object], message: str
) -> None:
    """The message names what does not fit."""
    with pytest.raises(ProblemError, match=message):
        stack(**changes)  # type: ignore[arg-type]


def test_random_regions_are_judged_as_the_step_written_out() -> None:
    """By `check` and by `simulate`, with counts up to 14."""
    valid = 0
    for seed in range(200):
        problem = random_regions(seed, most_count=14)
        plan = random_region_plan(problem, seed)
        whole, whole_plan = unrolled(problem), unrolled_plan(problem, plan)
        assert simulate(problem, plan) == simulate(whole, whole_plan), seed
        is_valid = check(problem, plan) == []
        assert is_valid == (check(whole, whole_plan) == []), seed
        valid += is_valid
    assert 50 < valid < 200
