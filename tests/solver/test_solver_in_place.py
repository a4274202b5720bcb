"""Operations that leave their results in the memory of what they read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autoremat_solver import Op, Phase, Plan, Problem, ProblemError, Solver, Value, check, simulate
from autoremat_solver.model.indexed import index
from autoremat_solver.model.reduce import reduce
from autoremat_solver.plan_document import digest, peak_step
from autoremat_solver.plans.fast_measure import fast_measure
from autoremat_solver.regions import unrolled
from autoremat_solver.simulate import instance_spans, occupied_spans

from tests.solver.random_problems import MIDDLE, random_overwriting_step, random_regions

ONCE = Plan.of(["f", "loss", "first", "second"])


def problem(**changes: object) -> Problem:
    """The backward makes `gf` of the 40 bytes of `x`, and `gs` of those of `gf`."""
    values = (Value("x", 40), Value("g", 1), Value("gf", 40), Value("gs", 40))
    ops = (
        Op("f", (), ("x",), 1.0),
        Op("loss", (), ("g",), 1.0, phase=Phase.BACKWARD),
        Op("first", ("g", "x"), ("gf",), 1.0, phase=Phase.BACKWARD, overwrites=("x",)),
        Op("second", ("gf",), ("gs",), 1.0, 3, Phase.BACKWARD, overwrites=("gf",)),
    )
    return replace(Problem(values, ops, ("gs",)), **changes)  # type: ignore[arg-type]


def test_a_result_takes_the_place_of_what_is_read_last():
    """Both are there in no step."""
    assert simulate(problem(), ONCE).live_nbytes == (40, 41, 41, 43)
    assert check(problem(), ONCE, 43) == []
    assert Solver(problem()).smallest_peak().timeline.peak_nbytes == 43


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"outputs": ("gs", "x")}, (40, 41, 81, 83)),  # somebody holds it
        ({"outputs": ("gs", "gf")}, (40, 41, 41, 83)),
    ],
)
def test_what_somebody_keeps_is_not_written_over(changes: dict[str, object], expected: object):
    """Nor what the step returns."""
    assert simulate(problem(**changes), ONCE).live_nbytes == expected
    assert check(problem(**changes), ONCE) == []


def with_op(name: str, **changes: object) -> Problem:
    found = problem()
    ops = (replace(op, **changes) if op.name == name else op for op in found.ops)  # type: ignore[arg-type]
    return replace(found, ops=tuple(ops))


def test_what_is_read_later_is_not_written_over():
    """Unless another instance is read then."""
    later = with_op("second", inputs=("gf", "x"))
    assert simulate(later, ONCE).live_nbytes == (40, 41, 81, 83)
    again = Plan.of(["f", "loss", "first", "f", "second"])
    assert simulate(later, again).live_nbytes[2] == 41
    assert check(later, again) == check(later, ONCE) == []


def activated() -> Problem:
    """The forward makes `y` of `x`, in its place if the plan makes nothing else of that later."""
    values = (*problem().values, Value("y", 40))
    f, loss, first, second = problem().ops
    act = Op("act", ("x",), ("y",), 1.0, overwrites=("x",))
    first = replace(first, inputs=("g", "y"), overwrites=("y",))
    return Problem(values, (f, act, loss, first, second), ("gs",))


@pytest.mark.parametrize(
    ("schedule", "live"),
    [
        ("f act loss first second", (40, 40, 41, 41, 43)),
        ("f act loss act first second", (40, 80, 41, 41, 41, 43)),  # `x` is saved
        ("f act loss f act first second", (40, 40, 1, 41, 41, 41, 43)),
    ],
)
def test_the_plan_decides_what_the_forward_writes_over(schedule: str, live: tuple[int, ...]):
    """What it saves stays as it is."""
    plan = Plan.of(schedule.split())
    assert simulate(activated(), plan).live_nbytes == live
    assert check(activated(), plan, max(live)) == []
    assert fast_measure(index(activated()), index(activated()).numbers(plan)).live_nbytes == live


def test_a_result_has_no_more_room_than_its_own():
    """Of several that would do, the largest that has room."""
    values = tuple(Value(v.name, 50 if v.name == "x" else v.nbytes) for v in problem().values)
    larger = replace(with_op("first", overwrites=("x", "g")), values=values)
    assert simulate(larger, ONCE).live_nbytes == (50, 51, 90, 43)
    assert check(larger, ONCE) == []


def test_only_what_is_read_is_written_over():
    """Nothing else ends there."""
    with pytest.raises(ProblemError, match="'second' overwrites a value twice"):
        with_op("second", overwrites=("gf", "gf"))
    with pytest.raises(ProblemError, match="'second' overwrites 'x': it has to read that"):
        with_op("second", overwrites=("x",))


def test_spans_of_memory_add_up_to_what_is_live():
    """Where one is written over, the other begins."""
    assert ("x", 0, 2) in instance_spans(problem(), ONCE)
    assert ("x", 0, 1) in occupied_spans(problem(), ONCE)
    peak = peak_step(problem(), ONCE)
    assert sum(nbytes for _, nbytes in peak.largest) + peak.workspace_nbytes == peak.live_nbytes


@pytest.mark.parametrize("seed", range(40))
def test_reduced_problems_have_the_same_peaks(seed: int):
    """Each plan of the reduced problem is one of the whole problem, and takes no more."""
    whole = random_overwriting_step(seed, MIDDLE)
    free = tuple(replace(v, must_save=False, must_recompute=False) for v in whole.values)
    whole = replace(whole, values=free)
    reduction = reduce(whole)
    plan = Plan.of(op.name for op in reduction.problem.ops)
    lifted = reduction.lift(plan)
    assert check(whole, lifted) == check(reduction.problem, plan) == []
    assert simulate(whole, lifted).peak_nbytes <= simulate(reduction.problem, plan).peak_nbytes


def test_runs_of_a_region_write_over_their_own():
    """Values of one run have the names of that run; without it some of the steps take more."""
    gained = 0
    for seed in range(20):
        parted = random_regions(seed)
        free = tuple(replace(v, must_save=False, must_recompute=False) for v in parted.values)
        parted = replace(parted, values=free)
        over = tuple(
            replace(op, overwrites=op.inputs) if op.phase is Phase.BACKWARD else op
            for op in parted.ops
        )
        plain, parted = parted, replace(parted, ops=over)
        plan = Plan.of(op.name for op in parted.ops)
        assert check(unrolled(parted), Plan.of(op.name for op in unrolled(parted).ops)) == []
        gained += sum(simulate(parted, plan).live_nbytes) < sum(simulate(plain, plan).live_nbytes)
    assert gained >= 5


def test_a_problem_says_what_it_overwrites_and_nothing_else():
    """Those that overwrite nothing are stored, and known again, as ever."""
    assert Problem.from_json(problem().to_json()) == problem()
    without = replace(problem(), ops=tuple(replace(op, overwrites=()) for op in problem().ops))
    assert "overwrites" not in without.to_json()
    assert digest(without) != digest(problem())
